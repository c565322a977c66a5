"""Ferry moves the state of large language models between prefill and decode engines.

* `PrefillRank` and `DecodeRank` are ranks that an engine of one's own drives, over `Pool`s of
  shared memory that a `Layout` describes; a `BootstrapServer` lets them find each other.
* `ferry.mori_compat` has the names of AMD's `mori`, for engines that were written for it.
"""

from ferry._ferry import (
    BootstrapServer,
    RoomView,
    TransferView,
    __version__,
    metrics_text,
    set_log_level,
)
from ferry.layout import Engine, Kv, Layout, Parallel, State, Tensor
from ferry.pool import Pool
from ferry.rank import DecodeRank, PrefillRank, RankError, RoomFailedError, RoomStatus

__all__ = [
    "BootstrapServer",
    "DecodeRank",
    "Engine",
    "Kv",
    "Layout",
    "Parallel",
    "Pool",
    "PrefillRank",
    "RankError",
    "RoomFailedError",
    "RoomStatus",
    "RoomView",
    "State",
    "Tensor",
    "TransferView",
    "__version__",
    "metrics_text",
    "set_log_level",
    "takeover",
]


def takeover() -> None:
    """Let `import mori` find `ferry.mori_compat` from now on, even if the real one is installed.

    An installed wheel does so by itself where the real package is absent; this is for interpreters
    that do not read `.pth` files. What was imported before stays as it is.
    """
    import ferry_takeover

    ferry_takeover.install(is_forced=True)
