"""`mori.cpp`: the native classes, with methods in the original's CamelCase."""

from typing import Any, NoReturn

from ferry._ferry import (
    EngineDesc,
    IOEngine,
    IOEngineSession,
    MemoryDesc,
    PeerFailureEvent,
    TransferStatus,
    set_log_level,
)
from ferry.mori_compat.config import (
    BackendConfig,
    FabricBackendConfig,
    IOEngineConfig,
    RdmaBackendConfig,
    XgmiBackendConfig,
)
from ferry.mori_compat.enums import (
    BackendType,
    MemoryLocationType,
    PeerFailureReason,
    PollCqMode,
    StatusCode,
)

__all__ = [
    "BackendConfig",
    "BackendType",
    "EngineDesc",
    "FabricBackendConfig",
    "IOEngine",
    "IOEngineConfig",
    "IOEngineSession",
    "MemoryDesc",
    "MemoryLocationType",
    "PeerFailureEvent",
    "PeerFailureReason",
    "PollCqMode",
    "RdmaBackendConfig",
    "StatusCode",
    "TransferStatus",
    "XgmiBackendConfig",
    "fabric_alloc",
    "fabric_free",
    "set_log_level",
]

# The original exports the members of these, the later over the earlier ones of the same name.
globals().update(BackendType.__members__)
globals().update(MemoryLocationType.__members__)
globals().update(StatusCode.__members__)


def fabric_alloc(*_arguments: Any, **_keywords: Any) -> NoReturn:
    """Refuse: there is no fabric memory here."""
    raise RuntimeError("fabric memory needs AMD's mori; register ordinary memory")


def fabric_free(*_arguments: Any, **_keywords: Any) -> NoReturn:
    """Refuse: there is no fabric memory here."""
    fabric_alloc()
