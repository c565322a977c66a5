"""What a rank's buffers are: SGLang's `KVArgs`, with pools in place of addresses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ferry.pool import Pool


@dataclass(frozen=True)
class Tensor:
    """One buffer in a pool: `nbytes` bytes at `offset`, in items of `item_len` bytes.

    A buffer that this rank does not have (0 bytes) needs no pool.
    """

    pool: Pool | None
    offset: int
    nbytes: int
    item_len: int


@dataclass(frozen=True)
class Kv:
    """The paged KV cache: K tensors then V tensors (`mha`), or one list (`mla`, `hybrid_mla`)."""

    tensors: Sequence[Tensor]
    attention: str = "mha"
    head_num: int = 1
    total_head_num: int | None = None
    layer_ids: Sequence[int] = ()
    start_layer: int = 0
    num_draft_entries: int = 0


@dataclass(frozen=True)
class State:
    """One state component, by SGLang's name of its type: `mamba`, `swa`, `dsa`, ...

    `dims`, `outer_counts` and `conv_shard_groups` say how its tensors are sharded (`mamba`); each
    has one element for each tensor, or none.
    """

    type: str
    tensors: Sequence[Tensor]
    dims: Sequence[int] = ()
    outer_counts: Sequence[int] = ()
    conv_shard_groups: Sequence[Sequence[int] | None] = ()
    layer_ids: Sequence[int] = ()


@dataclass(frozen=True)
class Layout:
    """All buffers of a rank. Pages have `page_size` tokens."""

    page_size: int
    kv: Kv
    aux: Sequence[Tensor] = ()
    states: Sequence[State] = ()


@dataclass(frozen=True)
class Parallel:
    """Sizes and ranks in the parallel groups, by SGLang's names."""

    attn_tp_size: int = 1
    attn_tp_rank: int = 0
    attn_dp_size: int = 1
    attn_dp_rank: int = 0
    pp_size: int = 1
    pp_rank: int = 0
    system_dp_size: int = 1
    system_dp_rank: int = 0
    dcp_size: int = 1
    dcp_rank: int = 0


@dataclass(frozen=True)
class Engine:
    """What a prefill publishes about its engine, and a decode compares with its own."""

    kv_cache_dtype: str = "auto"
    kv_layout: str | None = None
    load_balance_method: str = "round_robin"
    decode_allocation_policy: str = "early"
    prefill_http_port: int | None = None


@dataclass
class _Pools:
    """The pools of a layout, each once, in the order in which they appear."""

    pools: list[Pool] = field(default_factory=list)

    def number(self, pool: Pool) -> int:
        if not any(pool is known for known in self.pools):
            self.pools.append(pool)
        return next(at for at, known in enumerate(self.pools) if known is pool)


def _plain(part: Any, pools: _Pools) -> Any:
    if isinstance(part, Tensor):
        number = 0 if part.pool is None else pools.number(part.pool)
        place = {"pool": number, "offset": part.offset}
        return place | {"bytes": part.nbytes, "item_len": part.item_len}
    if isinstance(part, (Layout, Kv, State, Parallel, Engine)):
        return {each.name: _plain(getattr(part, each.name), pools) for each in fields(part)}
    if part is None or isinstance(part, (str, int)):
        return part
    return [_plain(each, pools) for each in part]


def describe(layout: Layout, parallel: Parallel, engine: Engine) -> tuple[dict, list[Pool]]:
    """Return the parts of an attach request, and the pools in its order."""
    pools = _Pools()
    described = _plain(layout, pools)
    kv = described["kv"]
    if kv["total_head_num"] is None:
        kv["total_head_num"] = kv["head_num"] * parallel.attn_tp_size
    parts = {"layout": described, "parallel": _plain(parallel, pools)}
    parts |= {"engine": _plain(engine, pools), "pools": [pool.nbytes for pool in pools.pools]}
    return parts, pools.pools
