"""The names of components for memory that SGLang registers by address alone."""

from __future__ import annotations

import functools
from typing import Any

from ferry.mori_compat import io
from ferry.sglang_plugin import is_on, metrics


def names_of(args: Any) -> dict[int, str]:
    """Return the component of each address in SGLang's `KVArgs`."""
    names = dict.fromkeys(args.kv_data_ptrs, "kv")
    names |= dict.fromkeys(args.aux_data_ptrs, "aux")
    types = getattr(args, "state_types", None) or []
    for kind, addresses in zip(types, args.state_data_ptrs, strict=False):
        names |= dict.fromkeys(addresses, str(getattr(kind, "value", kind)))
    return names


@functools.cache
def labelled(manager: type) -> type:
    """Return a manager of SGLang's that says which component each of its buffers belongs to."""

    class Labelled(manager):
        def __init__(self, args: Any, *arguments: Any, **keywords: Any) -> None:
            metrics.serve(args)
            names = names_of(args) if is_on("FERRY_LABELS") else {}
            with io.labels(names):
                super().__init__(args, *arguments, **keywords)

    Labelled.__name__, Labelled.__qualname__ = manager.__name__, manager.__qualname__
    return Labelled
