"""Compiles the inner loops with numba where it is installed; without it the same code runs, to the same result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

try:
    import numba
except ImportError:
    numba = None  # type: ignore[assignment]

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """Decorator of a loop over arrays. Results are the same bits either way: nothing is reordered or fused."""
    if numba is None:
        return function
    fast: Any = numba.njit(cache=True)(function)
    return cast(Function, fast)
