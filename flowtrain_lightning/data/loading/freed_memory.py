"""A process that decodes keeps what it frees for its next picture, since the system clears each page that it gives.

A picture takes megabytes for milliseconds. By default glibc returns those at once, and takes them again for the next.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt(3)

_KEPT_BYTES = 1 << 28
"""That may be free before some are returned, at most."""

_LARGEST = 1 << 25
"""Bytes of what is kept, the most that glibc can; larger pieces are returned as before."""


def keep_freed_memory() -> None:
    """From now on this process returns little of what it frees. It does nothing where there is no glibc."""
    with suppress(AttributeError, OSError):
        allocation = ctypes.CDLL(None)
        allocation.mallopt(_MMAP_THRESHOLD, _LARGEST)
        allocation.mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)
