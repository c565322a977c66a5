"""Lets `import mori` find `ferry.mori_compat`, and `import mooncake` `ferry.mooncake_compat`.

Every interpreter imports this when it starts (`ferry_takeover.pth`), so it is small and imports
nothing of Ferry before somebody asks for one of the two. `FERRY_TAKEOVER` says what to do: without
it the real package is taken if there is one, "1" always takes Ferry's, "0" never does.
"""

import importlib
import importlib.util
import os
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec

_COMPATIBLE = {"mori": "ferry.mori_compat", "mooncake": "ferry.mooncake_compat"}


def _compatible_name(name):
    top, dot, rest = name.partition(".")
    return _COMPATIBLE[top] + dot + rest


class _Alias(Loader):
    """Gives a second name to a module."""

    def create_module(self, spec):
        """Let the import system make one, which is replaced."""

    def exec_module(self, module):
        """Put the module with the other name into its place: there is only one of each."""
        name = module.__spec__.name
        sys.modules[name] = importlib.import_module(_compatible_name(name))


class _Finder(MetaPathFinder):
    """Finds the packages and their modules."""

    is_forced = False

    def find_spec(self, name, path=None, target=None):
        """Return where such a module is; `None` for every other, and if it is not ours."""
        top = name.partition(".")[0]
        if top not in _COMPATIBLE:
            return None
        if not (self._is_wanted(top) if name == top else _is_ours(top)):
            return None
        if importlib.util.find_spec(_compatible_name(name)) is None:
            return None
        return ModuleSpec(name, _Alias(), is_package=name == top)

    def _is_wanted(self, top):
        choice = os.environ.get("FERRY_TAKEOVER", "")
        if choice == "0":
            return False
        return self.is_forced or choice == "1" or not self._real_exists(top)

    def _real_exists(self, top):
        for finder in sys.meta_path:
            find_spec = getattr(finder, "find_spec", None)
            spec = None if finder is self or find_spec is None else find_spec(top, None)
            # A folder that happens to have this name is no package.
            if spec is not None and spec.origin is not None:
                return True
        return False


def _is_ours(top):
    module = sys.modules.get(top)
    return module is not None and module is sys.modules.get(_COMPATIBLE[top])


_FINDER = _Finder()


def install(*, is_forced=False):
    """Take part in imports; `is_forced` prefers Ferry's module to the real one."""
    _FINDER.is_forced = _FINDER.is_forced or is_forced
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)
