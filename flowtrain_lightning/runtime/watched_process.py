"""A process that started this one, or that this one started: whether it has ended, and how long it was stopped."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress

from flowtrain_lightning.pool import is_stopped

_LONGEST_LOOK_SECONDS = 1.0
"""Beyond which the time between two looks does not count: this process was stopped itself, by Ctrl-Z for example."""


class WatchedProcess:
    """A process that is looked at several times a second.

    Args:
        pid: its number.
        exit_code: gives its exit code once it has ended, and None before.

    Attributes:
        exit_code: see there.
    """

    def __init__(self, pid: int, exit_code: Callable[[], int | None]) -> None:
        self.exit_code = exit_code
        self._pid = pid
        self._looked = time.monotonic()
        self._stopped_seconds = 0.0

    def stopped_seconds(self) -> float:
        """For how long the process has been stopped now, by SIGSTOP or by a debugger; 0 while it runs."""
        now = time.monotonic()
        passed, self._looked = now - self._looked, now
        is_still = self.exit_code() is None and is_stopped(self._pid)
        self._stopped_seconds = self._stopped_seconds + min(passed, _LONGEST_LOOK_SECONDS) if is_still else 0.0
        return self._stopped_seconds

    def kill(self) -> None:
        """End it, unless it has ended: its number may be another one's by then."""
        if self.exit_code() is None:
            with suppress(OSError):
                os.kill(self._pid, signal.SIGKILL)


def parent_process(pid: int) -> WatchedProcess:
    """The process that started this one; nobody tells its exit code but 0."""
    return WatchedProcess(pid, lambda: None if os.getppid() == pid else 0)
