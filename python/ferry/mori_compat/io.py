"""`mori.io`: engines, sessions and memory, with the original's Python names."""

from __future__ import annotations

import contextlib
import ctypes
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NoReturn

from ferry.mori_compat import cpp as mori_cpp
from ferry.mori_compat.cpp import (
    BackendType,
    EngineDesc,
    FabricBackendConfig,
    IOEngineConfig,
    MemoryDesc,
    MemoryLocationType,
    PeerFailureEvent,
    PollCqMode,
    RdmaBackendConfig,
    StatusCode,
    TransferStatus,
    XgmiBackendConfig,
    fabric_alloc,
    fabric_free,
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
    "fabric_alloc",
    "fabric_free",
    "fabric_mem_pool",
    "fabric_torch_allocator",
    "make_fabric_mem_pool",
    "set_log_level",
    "use_fabric_torch_allocator",
]

TORCH_DEVICE_TYPE_MAP = {"cpu": MemoryLocationType.CPU, "cuda": MemoryLocationType.GPU}

_DEFAULT_CONFIGS = {
    BackendType.RDMA: RdmaBackendConfig,
    BackendType.XGMI: XgmiBackendConfig,
    BackendType.FABRIC: FabricBackendConfig,
}


_labels: ContextVar[Mapping[int, str]] = ContextVar("labels", default={})  # noqa: B039


@contextlib.contextmanager
def labels(names: Mapping[int, str]) -> Iterator[None]:
    """Let memory at these addresses be counted under these names; not in the original."""
    token = _labels.set(names)
    try:
        yield
    finally:
        _labels.reset(token)


def label_of(address: int) -> str:
    """Return the name under which memory at an address is counted; not in the original."""
    return _labels.get().get(address, "memory")


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "data_ptr") and hasattr(value, "is_contiguous")


def _locate(buffer: Any) -> tuple[int, int, Any]:
    """Return the address and size of a writable, contiguous buffer, and what keeps it."""
    view = memoryview(buffer)
    if view.nbytes == 0:
        raise RuntimeError("a buffer without bytes cannot be registered")
    kept = (ctypes.c_char * view.nbytes).from_buffer(view)
    return ctypes.addressof(kept), view.nbytes, kept


class IOEngineSession:
    """Transfers between one local and one remote memory."""

    def __init__(self, session: mori_cpp.IOEngineSession) -> None:
        """Wrap what `IOEngine.create_session` made."""
        self._sess = session

    def allocate_transfer_uid(self) -> int:
        """Return a number for a transfer."""
        return self._sess.AllocateTransferUniqueId()

    def read(
        self, local_offset: int, remote_offset: int, size: int, transfer_uid: int
    ) -> TransferStatus:
        """Read one range."""
        status = TransferStatus()
        self._sess.Read(local_offset, remote_offset, size, status, transfer_uid)
        return status

    def write(
        self, local_offset: int, remote_offset: int, size: int, transfer_uid: int
    ) -> TransferStatus:
        """Write one range."""
        status = TransferStatus()
        self._sess.Write(local_offset, remote_offset, size, status, transfer_uid)
        return status

    def batch_read(
        self,
        local_offsets: Sequence[int],
        remote_offsets: Sequence[int],
        sizes: Sequence[int],
        transfer_uid: int,
    ) -> TransferStatus:
        """Read many ranges as one transfer; the lists may be arrays."""
        status = TransferStatus()
        self._sess.BatchRead(local_offsets, remote_offsets, sizes, status, transfer_uid)
        return status

    def batch_write(
        self,
        local_offsets: Sequence[int],
        remote_offsets: Sequence[int],
        sizes: Sequence[int],
        transfer_uid: int,
    ) -> TransferStatus:
        """Write many ranges as one transfer; the lists may be arrays."""
        status = TransferStatus()
        self._sess.BatchWrite(local_offsets, remote_offsets, sizes, status, transfer_uid)
        return status

    def alive(self) -> bool:
        """Return whether the peer is still there."""
        return self._sess.Alive()

    @property
    def transport(self) -> str:
        """How the bytes move: `local`, `cma` or `tcp`. Not in the original."""
        return self._sess.transport


class IOEngine:
    """Moves bytes between registered memory of this and of other processes."""

    def __init__(self, key: str, config: IOEngineConfig) -> None:
        """Start an engine with a unique key; it listens at once."""
        self._engine = mori_cpp.IOEngine(key, config)

    def get_engine_desc(self) -> EngineDesc:
        """Return what peers need to know of this engine."""
        return self._engine.GetEngineDesc()

    def create_backend(self, type: BackendType, config: Any = None) -> None:
        """Allow transfers. No device is needed: the bytes take whatever way there is."""
        if config is None:
            make_config = _DEFAULT_CONFIGS.get(type)
            if make_config is None:
                raise NotImplementedError(f"there is no backend of type {type}")
            config = make_config()
        if not self._engine.CreateBackend(type, config):
            warnings.warn(f"a backend of type {type} exists already", stacklevel=2)

    def remove_backend(self, type: BackendType) -> None:
        """Allow no more transfers by a backend."""
        self._engine.RemoveBackend(type)

    def register_remote_engine(self, engine_desc: EngineDesc) -> None:
        """Make a peer known; no connection is opened yet."""
        self._engine.RegisterRemoteEngine(engine_desc)

    def deregister_remote_engine(self, engine_desc: EngineDesc) -> None:
        """Forget a peer: transfers to it fail from now on."""
        self._engine.DeregisterRemoteEngine(engine_desc)

    def register_memory(
        self,
        ptr: Any,
        size: int | None = None,
        device_id: int = -1,
        mem_loc: MemoryLocationType = MemoryLocationType.CPU,
    ) -> MemoryDesc:
        """Register memory of this process.

        `ptr` is an address, whose `size` bytes must stay until `deregister_memory` has returned; or
        an object with a writable, contiguous buffer (an array of numpy, a bytearray, a
        memoryview), or a tensor of torch, which are kept for as long as they are needed.
        """
        if isinstance(ptr, int):
            if size is None:
                raise TypeError("an address needs a size")
            return self._engine.RegisterMemory(ptr, size, device_id, mem_loc, None, label_of(ptr))
        if _is_tensor(ptr):
            return self.register_torch_tensor(ptr)
        address, length, kept = _locate(ptr)
        if size is not None and size > length:
            raise ValueError(f"{size} bytes are more than the {length} of the buffer")
        length = length if size is None else size
        return self._engine.RegisterMemory(address, length, device_id, mem_loc, kept)

    def register_torch_tensor(self, tensor: Any) -> MemoryDesc:
        """Register a contiguous tensor, and keep it."""
        if not tensor.is_contiguous():
            raise RuntimeError("only a contiguous tensor can be registered")
        device = tensor.device
        if device.type not in TORCH_DEVICE_TYPE_MAP:
            raise RuntimeError(f"memory of a {device.type} device cannot be registered")
        device_id = -1 if device.index is None else device.index
        return self._engine.RegisterMemory(
            tensor.data_ptr(),
            tensor.nelement() * tensor.element_size(),
            device_id,
            TORCH_DEVICE_TYPE_MAP[device.type],
            tensor,
        )

    def deregister_memory(self, mem_desc: MemoryDesc) -> None:
        """End a registration; nobody writes into the memory after it has returned."""
        self._engine.DeregisterMemory(mem_desc)

    def allocate_transfer_uid(self) -> int:
        """Return a number for a transfer."""
        return self._engine.AllocateTransferUniqueId()

    def read(
        self,
        local_mem: MemoryDesc,
        local_offset: int,
        remote_mem: MemoryDesc,
        remote_offset: int,
        size: int,
        transfer_uid: int,
    ) -> TransferStatus:
        """Read one range of remote memory."""
        status = TransferStatus()
        self._engine.Read(
            local_mem, local_offset, remote_mem, remote_offset, size, status, transfer_uid
        )
        return status

    def write(
        self,
        local_mem: MemoryDesc,
        local_offset: int,
        remote_mem: MemoryDesc,
        remote_offset: int,
        size: int,
        transfer_uid: int,
    ) -> TransferStatus:
        """Write one range of remote memory."""
        status = TransferStatus()
        self._engine.Write(
            local_mem, local_offset, remote_mem, remote_offset, size, status, transfer_uid
        )
        return status

    def batch_read(
        self,
        local_mems: Sequence[MemoryDesc],
        local_offsets: Sequence[Sequence[int]],
        remote_mems: Sequence[MemoryDesc],
        remote_offsets: Sequence[Sequence[int]],
        sizes: Sequence[Sequence[int]],
        transfer_uids: Sequence[int],
    ) -> list[TransferStatus]:
        """Read many ranges; one transfer and one status for each pair of memories."""
        return self._engine.begin_batch(
            False, local_mems, local_offsets, remote_mems, remote_offsets, sizes, transfer_uids
        )

    def batch_write(
        self,
        local_mems: Sequence[MemoryDesc],
        local_offsets: Sequence[Sequence[int]],
        remote_mems: Sequence[MemoryDesc],
        remote_offsets: Sequence[Sequence[int]],
        sizes: Sequence[Sequence[int]],
        transfer_uids: Sequence[int],
    ) -> list[TransferStatus]:
        """Write many ranges; one transfer and one status for each pair of memories."""
        return self._engine.begin_batch(
            True, local_mems, local_offsets, remote_mems, remote_offsets, sizes, transfer_uids
        )

    def create_session(
        self, local_mem: MemoryDesc, remote_mem: MemoryDesc
    ) -> IOEngineSession | None:
        """Open the way between two memories; `None` if there is no backend or no such peer."""
        session = self._engine.CreateSession(local_mem, remote_mem)
        return None if session is None else IOEngineSession(session)

    def pop_inbound_transfer_status(
        self, remote_key: str, transfer_uid: int
    ) -> TransferStatus | None:
        """Return a status that has succeeded once a peer's transfer has ended here."""
        status = TransferStatus()
        has_ended = self._engine.PopInboundTransferStatus(remote_key, transfer_uid, status)
        return status if has_ended else None

    def wait_all(self, statuses: Sequence[TransferStatus], timeout_ms: int = -1) -> StatusCode:
        """Wait for all transfers; return the first code that is not success.

        Without a limit if `timeout_ms` is negative; 0 only looks. `IN_PROGRESS` says that the time
        is over and none has failed so far.
        """
        return self._engine.WaitAll(statuses, timeout_ms)

    def pop_peer_failure(self) -> PeerFailureEvent | None:
        """Return the next peer that was found to be unreachable."""
        return self._engine.PopPeerFailure()


def fabric_torch_allocator(*_arguments: Any, **_keywords: Any) -> NoReturn:
    """Refuse: there is no fabric memory here."""
    fabric_alloc()


use_fabric_torch_allocator = make_fabric_mem_pool = fabric_mem_pool = fabric_torch_allocator
