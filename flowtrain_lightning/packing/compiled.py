"""Compiles the inner loops with numba where it is installed; without it the same code runs, to the same result."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

try:
    import numba
    from numba.core import event
except ImportError:
    numba = None  # type: ignore[assignment]

Function = TypeVar("Function", bound=Callable[..., Any])

_COMPILING = "numba:compile"
_ANNOUNCEMENT = "flowtrain: numba compiles the packer's inner loops, once on this machine; that takes about a minute."

_listeners: list[Any] = []  # one at most, of this process


def compiled(function: Function) -> Function:
    """Decorator of a loop over arrays. Results are the same bits either way: nothing is reordered or fused."""
    if numba is None:
        return function
    fast: Any = numba.njit(cache=True)(function)
    return cast(Function, fast)


def announce_compilation(announce: Callable[[str], object]) -> None:
    """Have ``announce`` called with a sentence before loops are compiled of which numba's cache on disk holds none.

    It is called once, however many loops are compiled: one that only a later run needs takes seconds. A later call of
    this function replaces ``announce``.
    """
    if numba is None:
        return

    class Announcer(event.Listener):  # type: ignore[misc]
        announced = False

        def on_start(self, started: Any) -> None:
            loop = started.data["dispatcher"]
            if self.announced or not loop.py_func.__module__.startswith(__package__):
                return
            self.announced = True
            if not _has_compiled(loop):
                announce(_ANNOUNCEMENT)

        def on_end(self, ended: Any) -> None:
            pass

    while _listeners:
        event.unregister(_COMPILING, _listeners.pop())  # type: ignore[no-untyped-call]
    _listeners.append(Announcer())
    event.register(_COMPILING, _listeners[0])  # type: ignore[no-untyped-call]


def _has_compiled(loop: Any) -> bool:
    """Whether loops beside this one are in the cache, compiled by this numba from files that are as they were."""
    since = max(Path(file).stat().st_mtime for file in (numba.__file__, loop.py_func.__code__.co_filename))
    return any(found.stat().st_mtime > since for found in Path(loop.stats.cache_path).glob("*.nbi"))
