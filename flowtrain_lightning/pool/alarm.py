"""What any thread may tell the one that uses a mesh: that something has arrived, or that all is over."""

from __future__ import annotations

import os
import threading

from flowtrain_lightning.pool.errors import PeerFailed


class Alarm:
    """A bell and the first fault.

    Args:
        bell: an ``eventfd``, which peers of this machine ring, too; closed by `close`.

    Attributes:
        bell: the same.
    """

    def __init__(self, bell: int) -> None:
        self.bell = bell
        self._fault: tuple[str, int | None] | None = None
        self._lock = threading.Lock()

    @property
    def raised(self) -> bool:
        """Whether all is over."""
        return self._fault is not None

    def ring(self) -> None:
        """Wake whoever waits for the bell. Safe to call from any thread."""
        with self._lock:
            if self.bell >= 0:
                os.eventfd_write(self.bell, 1)

    def abort(self, sentence: str, rank: int | None) -> None:
        """Say that all is over, and ring. Safe to call from any thread; the first sentence stays."""
        with self._lock:
            if self._fault is None:
                self._fault = (sentence, rank)
        self.ring()

    def check(self) -> None:
        """Raise when all is over.

        Raises:
            PeerFailed: with the first sentence.
        """
        if self._fault is not None:
            raise PeerFailed(*self._fault)

    def close(self) -> None:
        """Let go of the bell."""
        with self._lock:
            os.close(self.bell)
            self.bell = -1
