"""The part of `mori.cpp` that SGLang uses; see the package for how bytes move."""

import ctypes
import enum
import itertools
import os
import socket
import threading
import time

import msgpack

# Ranges of one system call; the kernel's own limit is 1,024.
RANGES_OF_A_CALL = 512


class StatusCode(enum.IntEnum):
    """State of a transfer; above 10 it failed."""

    SUCCESS = 0
    INIT = 1
    IN_PROGRESS = 2
    ERR_INVALID_ARGS = 11
    ERR_NOT_FOUND = 12
    ERR_RDMA_OP = 13
    ERR_BAD_STATE = 14
    ERR_GPU_OP = 15


FIRST_ERROR = 11


class BackendType(enum.IntEnum):
    """How a real engine would move bytes."""

    Unknown = 0
    XGMI = 1
    RDMA = 2
    TCP = 3
    FABRIC = 4


class MemoryLocationType(enum.IntEnum):
    """What registered memory claims to be; the double's is in host memory always."""

    Unknown = 0
    CPU = 1
    GPU = 2


class PollCqMode(enum.IntEnum):
    """How a real engine would wait for completions."""

    POLLING = 0
    EVENT = 1


class RdmaBackendConfig:
    """Accepted and not used."""

    def __init__(
        self,
        qp_per_transfer=1,
        post_batch_size=-1,
        num_worker_threads=-1,
        poll_cq_mode=PollCqMode.POLLING,
        enable_notification=True,
    ):
        """Keep what was asked for."""
        self.qp_per_transfer = qp_per_transfer
        self.post_batch_size = post_batch_size
        self.num_worker_threads = num_worker_threads
        self.poll_cq_mode = poll_cq_mode
        self.enable_notification = enable_notification


class XgmiBackendConfig:
    """Accepted and not used."""

    def __init__(self, num_streams=64, num_events=64):
        """Keep what was asked for."""
        self.num_streams = num_streams
        self.num_events = num_events


FabricBackendConfig = XgmiBackendConfig


class IOEngineConfig:
    """Where an engine listens."""

    def __init__(self, host="", port=0):
        """Port 0 takes a free one."""
        self.host = host
        self.port = port


def set_log_level(_level):
    """Change nothing: the double does not log."""


class EngineDesc:
    """What peers are told of an engine."""

    FIELDS = ("key", "node_id", "hostname", "host", "port", "pid")

    def __init__(self, *values):
        """Take the fields in their order on the wire."""
        for name, value in zip(self.FIELDS, values, strict=True):
            setattr(self, name, value)

    def pack(self):
        """Return the bytes that go over the wire."""
        return msgpack.packb([getattr(self, name) for name in self.FIELDS])

    @staticmethod
    def unpack(data):
        """Read bytes from the wire; elements behind the known ones are ignored."""
        return EngineDesc(*msgpack.unpackb(data, raw=False)[: len(EngineDesc.FIELDS)])


class MemoryDesc:
    """What peers are told of a registered memory."""

    DEFAULTS = {
        "engine_key": "",
        "id": 0,
        "device_id": -1,
        "device_bus_id": "",
        "data": 0,
        "size": 0,
        "loc": MemoryLocationType.Unknown,
        "ipc_handle": bytes(64),
        "numa_node": -1,
        "ipc_offset": 0,
        "fabric_handle": bytes(64),
        "vpod_id": -1,
        "vpod_ppod_id": "",
        "fabric_offset": 0,
        "fabric_alloc_size": 0,
    }

    def __init__(self, *values):
        """Take the fields in their order on the wire; what is missing has its default."""
        fields = list(self.DEFAULTS.items())
        for place, (name, default) in enumerate(fields):
            setattr(self, name, values[place] if place < len(values) else default)
        self.loc = MemoryLocationType(self.loc)

    def pack(self):
        """Return the bytes that go over the wire."""
        values = {name: getattr(self, name) for name in self.DEFAULTS}
        values["loc"] = int(self.loc)
        return msgpack.packb(list(values.values()))

    @staticmethod
    def unpack(data):
        """Read bytes from the wire; elements behind the known ones are ignored."""
        return MemoryDesc(*msgpack.unpackb(data, raw=False))


class TransferStatus:
    """State of one transfer; a failure stays."""

    def __init__(self):
        """Begin in the state INIT."""
        self._code = StatusCode.INIT
        self._message = ""
        self._changed = threading.Condition()

    def Code(self):  # noqa: N802
        """Return the state."""
        return self._code

    def Message(self):  # noqa: N802
        """Return why it failed."""
        return self._message

    def Update(self, code, message):  # noqa: N802
        """Change the state, unless it failed before."""
        with self._changed:
            if self._code < FIRST_ERROR:
                self._message, self._code = message, StatusCode(code)
                self._changed.notify_all()

    def InProgress(self):  # noqa: N802
        """Say whether it has not ended."""
        return self._code == StatusCode.IN_PROGRESS

    def Succeeded(self):  # noqa: N802
        """Say whether all bytes have landed."""
        return self._code == StatusCode.SUCCESS

    def Failed(self):  # noqa: N802
        """Say whether it failed."""
        return self._code >= FIRST_ERROR

    def WaitFor(self, timeout_ms=-1):  # noqa: N802
        """Wait for the end, for ever if the time is negative; return the state."""
        timeout = None if timeout_ms < 0 else timeout_ms / 1000
        with self._changed:
            self._changed.wait_for(lambda: not self.InProgress(), timeout)
            return self._code

    def Wait(self):  # noqa: N802
        """Wait for the end."""
        self.WaitFor()


class _IoVec(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("len", ctypes.c_size_t)]


_LIBC = ctypes.CDLL(None, use_errno=True)
for _call in (_LIBC.process_vm_writev, _LIBC.process_vm_readv):
    _call.restype = ctypes.c_ssize_t
    _call.argtypes = [
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_ulong,
        ctypes.c_void_p,
        ctypes.c_ulong,
        ctypes.c_ulong,
    ]


def _move_between_processes(call, pid, ranges):
    """Move (local address, remote address, bytes); whatever does not fit one call is split."""
    for start in range(0, len(ranges), RANGES_OF_A_CALL):
        part = ranges[start : start + RANGES_OF_A_CALL]
        array = _IoVec * len(part)
        local = array(*[(address, size) for address, _, size in part])
        remote = array(*[(address, size) for _, address, size in part])
        wanted = sum(size for _, _, size in part)
        moved = call(pid, local, len(part), remote, len(part), 0)
        if moved != wanted:
            reason = os.strerror(ctypes.get_errno()) if moved < 0 else f"{moved} of {wanted} bytes"
            raise OSError(f"process {pid}: {reason}")


class Hooks:
    """What a test can change in every engine of its process."""

    # Called before a transfer with ("read" or "write", local, remote); a text is why it fails.
    fail_opt = None
    # While this event is not set, transfers stay in progress.
    hold_opt = None


class IOEngine:
    """An engine: its registered memory and its peers."""

    def __init__(self, key, config):
        """Make an engine that does not listen yet."""
        self._host = config.host
        self._next_memory = itertools.count()
        self._next_uid = itertools.count()
        self._remote = {}
        hostname = socket.gethostname()
        self._desc = EngineDesc(key, hostname, hostname, config.host, config.port, os.getpid())
        self._listener_opt = None

    def GetEngineDesc(self):  # noqa: N802
        """Return what peers are told."""
        return self._desc

    def CreateBackend(self, _backend_type, _config):  # noqa: N802
        """Take a port: SGLang insists on one."""
        if self._listener_opt is None:
            family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
            self._listener_opt = socket.socket(family, socket.SOCK_STREAM)
            self._listener_opt.bind((self._host, self._desc.port))
            self._listener_opt.listen(1)
            self._desc.port = self._listener_opt.getsockname()[1]

    def RemoveBackend(self, _backend_type):  # noqa: N802
        """Leave everything as it is: there is one way to move bytes."""

    def RegisterRemoteEngine(self, desc):  # noqa: N802
        """Get to know a peer."""
        self._remote[desc.key] = desc

    def DeregisterRemoteEngine(self, desc):  # noqa: N802
        """Forget a peer."""
        self._remote.pop(desc.key, None)

    def RegisterMemory(self, pointer, size, device_id, location):  # noqa: N802
        """Describe a part of this process's memory."""
        location = MemoryLocationType(location)
        is_device = location == MemoryLocationType.GPU
        bus_id = "0000:03:00.0" if is_device else ""
        number = next(self._next_memory)
        place = (device_id, bus_id, int(pointer), int(size), location)
        numa_node = -1 if is_device else 0
        return MemoryDesc(self._desc.key, number, *place, bytes(64), numa_node)

    def DeregisterMemory(self, _desc):  # noqa: N802
        """Change nothing: the double keeps no table of its own memory."""

    def AllocateTransferUniqueId(self):  # noqa: N802
        """Return a number that no other transfer of the engine has."""
        return next(self._next_uid)

    def _refusal(self, local, local_offsets, remote, remote_offsets, sizes):
        """Return why a transfer is impossible, if it is."""
        if not len(local_offsets) == len(remote_offsets) == len(sizes):
            return StatusCode.ERR_INVALID_ARGS, "lengths differ"
        if remote.engine_key != self._desc.key and remote.engine_key not in self._remote:
            return StatusCode.ERR_NOT_FOUND, f"engine {remote.engine_key} is not registered"
        for here, there, size in zip(local_offsets, remote_offsets, sizes, strict=True):
            if min(here, there) < 0 or here + size > local.size or there + size > remote.size:
                sides = f"{here} of {local.size} here, {there} of {remote.size} there"
                return StatusCode.ERR_INVALID_ARGS, f"{size} bytes at {sides} leave their memory"
        return None

    def _move(self, direction, local, local_offsets, remote, remote_offsets, sizes):
        failure_opt = Hooks.fail_opt(direction, local, remote) if Hooks.fail_opt else None
        if failure_opt is not None:
            raise OSError(failure_opt)
        offsets = zip(local_offsets, remote_offsets, sizes, strict=True)
        ranges = [(local.data + here, remote.data + there, size) for here, there, size in offsets]
        is_write = direction == "write"
        if remote.engine_key != self._desc.key:
            call = _LIBC.process_vm_writev if is_write else _LIBC.process_vm_readv
            _move_between_processes(call, self._remote[remote.engine_key].pid, ranges)
            return
        for here, there, size in ranges:
            ctypes.memmove(*((there, here) if is_write else (here, there)), size)

    def _begin(self, direction, *arguments):
        *batch, status, _uid = arguments
        refusal_opt = self._refusal(*batch)
        if refusal_opt is not None:
            status.Update(*refusal_opt)
            return
        status.Update(StatusCode.IN_PROGRESS, "")

        def finish(hold_opt=None):
            if hold_opt is not None:
                hold_opt.wait()
            try:
                self._move(direction, *batch)
                status.Update(StatusCode.SUCCESS, "")
            except OSError as error:
                status.Update(StatusCode.ERR_RDMA_OP, str(error))

        if Hooks.hold_opt is None:
            finish()
        else:
            threading.Thread(target=finish, args=(Hooks.hold_opt,), daemon=True).start()

    def BatchWrite(self, *arguments):  # noqa: N802
        """Write; each argument has one element for each pair of memories."""
        for batch in zip(*arguments, strict=True):
            self._begin("write", *batch)

    def BatchRead(self, *arguments):  # noqa: N802
        """Read; each argument has one element for each pair of memories."""
        for batch in zip(*arguments, strict=True):
            self._begin("read", *batch)

    def WaitAll(self, statuses, timeout_ms=-1):  # noqa: N802
        """Wait for all; return the first error, or the state when the time is over."""
        first = StatusCode.SUCCESS
        deadline = time.monotonic() + timeout_ms / 1000
        for status in statuses:
            left_ms = max(0, int((deadline - time.monotonic()) * 1000))
            code = status.WaitFor(left_ms if timeout_ms >= 0 else -1)
            if code == StatusCode.IN_PROGRESS:
                return first if first != StatusCode.SUCCESS else code
            if first == StatusCode.SUCCESS:
                first = code
        return first

    def CreateSession(self, local, remote):  # noqa: N802
        """Join two registered memories."""
        return IOEngineSession(self, local, remote)


class IOEngineSession:
    """A pair of registered memories."""

    def __init__(self, engine, local, remote):
        """Join two registered memories."""
        self._engine = engine
        self._local = local
        self._remote = remote

    def AllocateTransferUniqueId(self):  # noqa: N802
        """Return a number that no other transfer of the engine has."""
        return self._engine.AllocateTransferUniqueId()

    def BatchWrite(self, local_offsets, remote_offsets, sizes, status, uid):  # noqa: N802
        """Write many ranges."""
        sides = (self._local, local_offsets, self._remote, remote_offsets)
        self._engine._begin("write", *sides, sizes, status, uid)

    def BatchRead(self, local_offsets, remote_offsets, sizes, status, uid):  # noqa: N802
        """Read many ranges."""
        sides = (self._local, local_offsets, self._remote, remote_offsets)
        self._engine._begin("read", *sides, sizes, status, uid)

    def Write(self, local_offset, remote_offset, size, status, uid):  # noqa: N802
        """Write one range."""
        self.BatchWrite([local_offset], [remote_offset], [size], status, uid)

    def Read(self, local_offset, remote_offset, size, status, uid):  # noqa: N802
        """Read one range."""
        self.BatchRead([local_offset], [remote_offset], [size], status, uid)

    def Alive(self):  # noqa: N802
        """Say whether the session can be used."""
        return True
