"""Ferry moves the state of large language models between prefill and decode engines.

`ferry.mori_compat` has the names of AMD's `mori`, for engines that were written for it.
"""

from ferry._ferry import __version__, set_log_level

__all__ = ["__version__", "set_log_level", "takeover"]


def takeover() -> None:
    """Let `import mori` find `ferry.mori_compat` from now on, even if the real one is installed.

    An installed wheel does so by itself where the real package is absent; this is for interpreters
    that do not read `.pth` files. What was imported before stays as it is.
    """
    import ferry_takeover

    ferry_takeover.install(is_forced=True)
