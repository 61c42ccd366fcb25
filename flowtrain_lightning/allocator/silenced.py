"""Keeps what a C library prints by itself away from standard output."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_OUTPUT = 1


@contextmanager
def silenced_output() -> Iterator[None]:
    """Inside, nothing that is written to file descriptor 1 is seen.

    Some libraries print past ``sys.stdout``: HiGHS, scipy's solver, prints lines of its own for some problems though
    its display is off, and a command that prints JSON must print nothing else. Without a standard output there is
    nothing to keep clean.
    """
    with suppress(OSError, ValueError, AttributeError):  # closed, or replaced by something without `flush`
        sys.stdout.flush()
    try:
        kept = os.dup(_OUTPUT)
    except OSError:
        yield
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, _OUTPUT)
        yield
    finally:
        _flush_c()  # what C has in its buffer would else be written later, to the output that is put back
        os.dup2(kept, _OUTPUT)
        os.close(kept)
        os.close(nowhere)


def _flush_c() -> None:
    """Writes out what the C library has buffered, where Python can reach it."""
    with suppress(OSError, AttributeError, TypeError):  # as on Windows, where None names no library
        ctypes.CDLL(None).fflush(None)
