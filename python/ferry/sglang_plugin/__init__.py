"""Ferry as a plugin of SGLang, found by its entry point group `sglang.srt.plugins`.

SGLang loads it in each of its processes. It changes which classes SGLang takes for the backends
`mori` and `mooncake`, and nothing in SGLang's files:

* the bootstrap server is Ferry's (`FERRY_BOOTSTRAP=0`: SGLang's own);
* memory is registered under the name of its component, so that metrics are by component
  (`FERRY_LABELS=0`: all of it is `memory`);
* with `FERRY_MANAGER=1` the manager, sender and receiver are Ferry's, whose rank actor does control
  messages, plans and transfers; peers may be SGLang's own;
* `/metrics` of all ranks of a host is served at `FERRY_METRICS_PORT` (9477; 0: nowhere).

`FERRY_PLUGIN=0` switches all of it off.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

__all__ = ["is_on", "register"]

BACKENDS = ("mori", "mooncake")
TARGET = "sglang.srt.disaggregation.utils.get_kv_class"


def is_on(variable: str, *, default: bool = True) -> bool:
    """Return whether an environment variable switches something on."""
    value = os.environ.get(variable, "").strip().lower()
    return default if not value else value not in ("0", "false", "no", "off")


def register() -> None:
    """Register what SGLang is to ask; its plugin loader calls it."""
    if not is_on("FERRY_PLUGIN"):
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(TARGET, choose_class, HookType.AROUND)


def choose_class(original: Callable, transfer_backend: Any, class_type: Any) -> Any:
    """Return the class of one part of a backend, in the place of SGLang's function."""
    chosen = original(transfer_backend, class_type)
    backend = getattr(transfer_backend, "value", transfer_backend)
    part = getattr(class_type, "value", class_type)
    if backend not in BACKENDS:
        return chosen
    if part == "bootstrap_server" and is_on("FERRY_BOOTSTRAP"):
        from ferry.sglang_plugin.bootstrap import PluginBootstrapServer

        return PluginBootstrapServer
    if backend == "mori" and is_on("FERRY_MANAGER", default=False):
        from ferry.sglang_plugin import manager

        ours = {
            "manager": manager.FerryKVManager,
            "sender": manager.FerryKVSender,
            "receiver": manager.FerryKVReceiver,
        }
        return ours.get(part, chosen)
    if part == "manager":
        from ferry.sglang_plugin.labels import labelled

        return labelled(chosen)
    return chosen
