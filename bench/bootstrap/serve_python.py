"""Serves SGLang's own Python bootstrap server on 127.0.0.1: serve_python.py WHEEL_FOLDER PORT

The server's module is run as the wheel has it. What it imports and never uses while it serves
(torch, triton, the engine's own state) is replaced by empty modules, so that neither a GPU nor
gigabytes of wheels are needed.
"""

import importlib.machinery
import logging
import sys
import time
import types
from pathlib import Path

# Modules that are replaced, with all below them.
REPLACED = (
    "torch",
    "triton",
    "sglang.kernels",
    "sglang.srt.configs",
    "sglang.srt.distributed",
    "sglang.srt.mem_cache",
    "sglang.srt.observability",
    "sglang.srt.runtime_context",
    "sglang.srt.server_args",
    "sglang.srt.utils",
)
# Below those, what is real after all.
REAL = ("sglang.srt.utils.network",)


class _Nothing(type):
    """A class that is false and whose every attribute is itself: enough for annotations,
    decorators and questions such as whether there is an accelerator."""

    def __bool__(cls):
        return False

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return cls


class Nothing(metaclass=_Nothing):
    def __new__(cls, *_arguments, **_options):
        return cls


class EmptyModule(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing


class Replacer:
    """Finds the replaced modules before the real ones are looked for."""

    def __init__(self, wheel):
        self.wheel = wheel

    def find_spec(self, name, _path=None, _target=None):
        replaced = any(name == known or name.startswith(known + ".") for known in REPLACED)
        if name != "sglang" and (not replaced or name in REAL):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        module = EmptyModule(spec.name)
        # A real module below a replaced package is still found.
        module.__path__ = [str(self.wheel / spec.name.replace(".", "/"))]
        return module

    def exec_module(self, module):
        pass


def main():
    wheel, port = Path(sys.argv[1]), int(sys.argv[2])
    sys.meta_path.insert(0, Replacer(wheel))
    logging.basicConfig(level=logging.ERROR)
    from sglang.srt.disaggregation.common.conn import CommonKVBootstrapServer

    server = CommonKVBootstrapServer("127.0.0.1", port)
    while server.thread.is_alive():
        time.sleep(1)


if __name__ == "__main__":
    main()
