"""The configurations. Most of what they say is about network cards and has no meaning here."""

from __future__ import annotations

from typing import Any

from ferry.mori_compat.enums import PollCqMode

_INT_BITS = 32
_PORT_BITS = 16


def _is_integer(value: object, low: int, high: int) -> bool:
    return isinstance(value, int) and low <= value < high


class _Checked:
    """Refuses attributes of a wrong type, as a native class does."""

    _kinds: dict[str, str] = {}

    def __setattr__(self, name: str, value: Any) -> None:
        kind = self._kinds.get(name)
        if kind is None:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        is_right = {
            "str": isinstance(value, str),
            "bool": isinstance(value, bool),
            "mode": isinstance(value, PollCqMode),
            "port": _is_integer(value, 0, 1 << _PORT_BITS),
            "unsigned": _is_integer(value, 0, 1 << _INT_BITS),
            "int": _is_integer(value, -(1 << (_INT_BITS - 1)), 1 << (_INT_BITS - 1)),
        }[kind]
        if not is_right:
            raise TypeError(f"{type(self).__name__}.{name} cannot be {value!r}: it is a {kind}")
        object.__setattr__(self, name, value)


class IOEngineConfig(_Checked):
    """Where an engine listens; port 0 takes a free one."""

    _kinds = {"host": "str", "port": "port"}

    host: str
    port: int

    def __init__(self, host: str = "", port: int = 0) -> None:
        """Listen at all addresses unless a host is named."""
        self.host = host
        self.port = port


class BackendConfig(_Checked):
    """The base of the backends' configurations."""

    def __init__(self) -> None:
        """Refuse: only a backend's own can be made."""
        raise TypeError(f"{type(self).__name__}: No constructor defined!")


class RdmaBackendConfig(BackendConfig):
    """The configuration of most backends. Only `enable_notification` has a meaning here."""

    _kinds = {
        "qp_per_transfer": "int",
        "post_batch_size": "int",
        "num_worker_threads": "int",
        "poll_cq_mode": "mode",
        "enable_notification": "bool",
        "notif_per_qp": "unsigned",
        "enable_transfer_chunking": "bool",
        "chunk_bytes": "unsigned",
        "max_chunks_per_transfer": "int",
        "num_nics_per_transfer": "int",
        "max_send_wr": "unsigned",
        "max_cqe_num": "unsigned",
        "max_msg_sge": "unsigned",
    }

    def __init__(
        self,
        qp_per_transfer: int = 1,
        post_batch_size: int = -1,
        num_worker_threads: int = -1,
        poll_cq_mode: PollCqMode = PollCqMode.POLLING,
        enable_notification: bool = True,
        notif_per_qp: int = 1024,
        enable_transfer_chunking: bool = False,
        chunk_bytes: int = 65536,
        max_chunks_per_transfer: int = 64,
        num_nics_per_transfer: int = 1,
    ) -> None:
        """Take the original's defaults."""
        self.qp_per_transfer = qp_per_transfer
        self.post_batch_size = post_batch_size
        self.num_worker_threads = num_worker_threads
        self.poll_cq_mode = poll_cq_mode
        self.enable_notification = enable_notification
        self.notif_per_qp = notif_per_qp
        self.enable_transfer_chunking = enable_transfer_chunking
        self.chunk_bytes = chunk_bytes
        self.max_chunks_per_transfer = max_chunks_per_transfer
        self.num_nics_per_transfer = num_nics_per_transfer
        self.max_send_wr = self.max_cqe_num = self.max_msg_sge = 0


class XgmiBackendConfig(BackendConfig):
    """The configuration of a backend between GPUs; it has no meaning here."""

    _kinds = {"num_streams": "int", "num_events": "int"}

    def __init__(self, num_streams: int = 64, num_events: int = 64) -> None:
        """Take the original's defaults."""
        self.num_streams = num_streams
        self.num_events = num_events


class FabricBackendConfig(BackendConfig):
    """The configuration of a backend between GPUs; it has no meaning here."""

    _kinds = {"num_streams": "int", "num_events": "int"}

    def __init__(self, num_streams: int = 64, num_events: int = 64) -> None:
        """Take the original's defaults."""
        self.num_streams = num_streams
        self.num_events = num_events
