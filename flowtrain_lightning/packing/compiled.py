"""Compiles the inner loops with numba where it is installed and pays; others run as they are, to the same result."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar, cast

Function = TypeVar("Function", bound=Callable[..., Any])

_LOOK_AFTER = 0.2
"""Seconds of loops after which a process imports numba, to see whether its cache on disk has them."""

_COMPILE_AFTER = 10.0
"""Seconds of loops after which a process compiles them. Most trainings never come to it: planning a step of 200 samples
takes Python 35 ms, beside a step of seconds; compiling takes up to a minute, on every machine that is new."""

_ANNOUNCEMENT = "flowtrain: numba compiles the packer's inner loops, once on this machine; that takes about a minute."


class _Process:
    """How the loops of this process run.

    Attributes:
        compiled: as machine code; none is compiled before its first call.
        seconds: that they took before.
        looked: numba's cache has been asked.
        running: one of them runs, whose time holds that of others that it calls.
        announce: is told before they are compiled.
    """

    def __init__(self) -> None:
        self.compiled = False
        self.seconds = 0.0
        self.looked = False
        self.running = False
        self.announce: Callable[[str], object] = lambda sentence: None

    def timed(self, loop: _Loop, arguments: tuple[Any, ...]) -> Any:
        """Runs a loop as it is, and from then on compiled ones where that pays."""
        self.running, start = True, time.perf_counter()
        try:
            return loop.function(*arguments)
        finally:
            self.running = False
            self.seconds += time.perf_counter() - start
            if self.seconds >= _COMPILE_AFTER:
                self.compile(loop)
            elif self.seconds >= _LOOK_AFTER and not self.looked:
                self.looked = True
                self.compile(loop, if_cached=True)

    def compile(self, loop: _Loop, *, if_cached: bool = False) -> None:
        """Has loops run compiled from their next call on, or only where numba's cache has some."""
        import numba
        from numba import types
        from numba.extending import typeof_impl

        if numba.config.DISABLE_JIT:  # type: ignore[attr-defined]  # as NUMBA_DISABLE_JIT says
            self.seconds = -math.inf
            return
        is_cached = _has_compiled(loop)
        if if_cached and not is_cached:
            return
        # A compiled loop that calls another one sees what numba made of that.
        typeof_impl.register(_Loop)(lambda value, context: types.Dispatcher(value.fast))
        if not is_cached:
            self.announce(_ANNOUNCEMENT)
        self.compiled = True


_process = _Process()
_loops: list[_Loop] = []


class _Loop:
    """A loop over arrays, as it is and compiled."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        functools.update_wrapper(self, function)

    @functools.cached_property
    def fast(self) -> Any:
        """By numba."""
        import numba

        return numba.njit(cache=True)(self.function)

    def __call__(self, *arguments: Any) -> Any:
        if _process.compiled:
            return self.fast(*arguments)
        return self.function(*arguments) if _process.running else _process.timed(self, arguments)


def compiled(function: Function) -> Function:
    """Decorator of a loop over arrays. Results are the same bits either way: nothing is reordered or fused."""
    if find_spec("numba") is None:
        return function
    _loops.append(_Loop(function))
    return cast(Function, _loops[-1])


def announce_compilation(announce: Callable[[str], object]) -> None:
    """Have ``announce`` called with a sentence before loops are compiled of which numba's cache on disk holds none.

    It is called once, however many loops are compiled: one that only a later run needs takes seconds. A later call of
    this function replaces ``announce``.
    """
    _process.announce = announce


def compile_at_once() -> None:
    """Compiles loops from their first call on, as pays where much is packed; without numba they run as they are."""
    if _loops and not _process.compiled:
        _process.compile(_loops[0])


def _has_compiled(loop: _Loop) -> bool:
    """Whether loops beside this one are in the cache, compiled by this numba from files that are as they were."""
    import numba

    since = max(Path(file).stat().st_mtime for file in (numba.__file__, loop.function.__code__.co_filename))
    return any(found.stat().st_mtime > since for found in Path(loop.fast.stats.cache_path).glob("*.nbi"))
