"""The part of `mori.io` that SGLang uses: thin wrappers over `mori.cpp`."""

from . import cpp
from .cpp import (
    BackendType,
    EngineDesc,
    FabricBackendConfig,
    IOEngineConfig,
    MemoryDesc,
    MemoryLocationType,
    PollCqMode,
    RdmaBackendConfig,
    StatusCode,
    XgmiBackendConfig,
    set_log_level,
)

__all__ = [
    "BackendType",
    "EngineDesc",
    "FabricBackendConfig",
    "IOEngine",
    "IOEngineConfig",
    "IOEngineSession",
    "MemoryDesc",
    "MemoryLocationType",
    "PollCqMode",
    "RdmaBackendConfig",
    "StatusCode",
    "XgmiBackendConfig",
    "set_log_level",
]


class IOEngineSession:
    """A pair of registered memories."""

    def __init__(self, session):
        """Wrap a session of `mori.cpp`."""
        self._session = session

    def allocate_transfer_uid(self):
        """Return a number that no other transfer of the engine has."""
        return self._session.AllocateTransferUniqueId()

    def _begin(self, move, *arguments):
        *ranges, uid = arguments
        status = cpp.TransferStatus()
        move(*ranges, status, uid)
        return status

    def read(self, *arguments):
        """Read one range."""
        return self._begin(self._session.Read, *arguments)

    def write(self, *arguments):
        """Write one range."""
        return self._begin(self._session.Write, *arguments)

    def batch_read(self, *arguments):
        """Read many ranges."""
        return self._begin(self._session.BatchRead, *arguments)

    def batch_write(self, *arguments):
        """Write many ranges."""
        return self._begin(self._session.BatchWrite, *arguments)

    def alive(self):
        """Say whether the session can be used."""
        return self._session.Alive()


class IOEngine:
    """An engine: its registered memory and its peers."""

    def __init__(self, key, config):
        """Make an engine with a key that is unique among its peers."""
        self._engine = cpp.IOEngine(key, config)

    def get_engine_desc(self):
        """Return what peers are told."""
        return self._engine.GetEngineDesc()

    def create_backend(self, backend_type, config=None):
        """Listen; the double has one way to move bytes, whatever backend is asked for."""
        self._engine.CreateBackend(backend_type, config or RdmaBackendConfig())

    def remove_backend(self, backend_type):
        """Forget a backend."""
        self._engine.RemoveBackend(backend_type)

    def register_remote_engine(self, desc):
        """Get to know a peer."""
        self._engine.RegisterRemoteEngine(desc)

    def deregister_remote_engine(self, desc):
        """Forget a peer."""
        self._engine.DeregisterRemoteEngine(desc)

    def register_memory(self, pointer, size, device_id, location):
        """Register a part of this process's memory."""
        return self._engine.RegisterMemory(pointer, size, device_id, location)

    def deregister_memory(self, desc):
        """Forget a registered memory."""
        self._engine.DeregisterMemory(desc)

    def allocate_transfer_uid(self):
        """Return a number that no other transfer of the engine has."""
        return self._engine.AllocateTransferUniqueId()

    def _begin_batch(self, move, *arguments):
        *ranges, uids = arguments
        statuses = [cpp.TransferStatus() for _ in uids]
        move(*ranges, statuses, uids)
        return statuses

    def batch_read(self, *arguments):
        """Read; each argument has one element for each pair of memories."""
        return self._begin_batch(self._engine.BatchRead, *arguments)

    def batch_write(self, *arguments):
        """Write; each argument has one element for each pair of memories."""
        return self._begin_batch(self._engine.BatchWrite, *arguments)

    def create_session(self, local, remote):
        """Join two registered memories."""
        return IOEngineSession(self._engine.CreateSession(local, remote))

    def pop_inbound_transfer_status(self, _remote_key, _uid):
        """Notifications are not part of the double."""
        return

    def wait_all(self, statuses, timeout_ms=-1):
        """Wait for all; return the first error, or the state when the time is over."""
        return self._engine.WaitAll(statuses, timeout_ms)
