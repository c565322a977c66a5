"""The Python API of AMD's `mori` 1.2.4 (its `io` and `cpp`) over Ferry's io engine.

Names, arguments, results and errors are the original's; where the original ends the process, this
raises. Bytes move by the first transport that both sides have: within the process, from process to
process on one host, or by TCP, whatever the backend is called. What differs on purpose:

* a peer must have a Ferry engine, unless `FERRY_CMA_TRUST_DESCRIPTORS=1` believes its descriptors;
* `register_memory` takes an object with a buffer too, and keeps it;
* memory that was deregistered stays so: a transfer of it fails, and does not register it again;
* an address that is not mapped into the process (a device's) is refused.
"""

import importlib
from types import ModuleType

from ferry import __version__ as _ferry_version

__version__ = f"1.2.4+ferry.{_ferry_version}"

_MODULES = ("cpp", "io")


def __getattr__(name: str) -> ModuleType:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
