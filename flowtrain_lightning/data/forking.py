"""How workers are forked: while no thread of the process loads, and to end with the thread that starts them."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_SET_PARENT_DEATH_SIGNAL = 1  # of prctl(2)


class ForkLock:
    """Either threads load, or one forks.

    A fork has only the thread that made it, but every lock as it was at that moment: what another thread held then, a
    lock of numpy, numba or the interpreter, is never released in the fork, which hangs as soon as it wants it.
    """

    def __init__(self) -> None:
        self._renew()
        os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        self._changed = threading.Condition()
        self._loading = 0
        self._forking = False

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Inside, this process does not fork; waits while it does."""
        with self._changed:
            self._changed.wait_for(lambda: not self._forking)
            self._loading += 1
        try:
            yield
        finally:
            with self._changed:
                self._loading -= 1
                self._changed.notify_all()

    @contextmanager
    def forking(self) -> Iterator[None]:
        """Inside, no thread loads; waits until those have done that do."""
        with self._changed:
            self._changed.wait_for(lambda: not self._forking)
            self._forking = True
        try:
            with self._changed:
                self._changed.wait_for(lambda: not self._loading)
            yield
        finally:
            with self._changed:
                self._forking = False
                self._changed.notify_all()


fork_lock = ForkLock()
"""Of this process."""


def end_with_starter(_: int) -> None:
    """Let this worker end when the thread that started it does; a ``worker_init_fn``.

    PyTorch's workers notice a dead parent after seconds, and not while they load; the kernel tells them at once. It
    counts the thread that started them as their parent: for a Trainer, the one that runs its loop.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
