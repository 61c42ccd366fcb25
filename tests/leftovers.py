"""What processes that have ended left in shared memory, also where other tests and programs use it at the same time."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
_SPAWNED = "sem.mp-"
_OTHERS_SECONDS = 3.0
"""Within which a program that has just ended, or is just making a file, is through with it."""


def abandoned_files() -> set[str]:
    """The files of shared memory that no living process has mapped; a file that one has belongs to another test.

    Semaphores of Python's multiprocessing do not count. What forks share has no name; those with one are of a test
    that spawns, whose processes unmap them some time before they are removed.
    """
    files = {str(path) for path in SHARED_MEMORY.iterdir() if not path.name.startswith(_SPAWNED)}
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):  # the process has ended, or belongs to somebody else
            mapped = maps.read_text()
            files = {file for file in files if file not in mapped}
    return files


def newly_abandoned_files(before: set[str]) -> set[str]:
    """What was left behind since, apart from what is gone a little later."""
    end = time.monotonic() + _OTHERS_SECONDS
    while True:
        files = abandoned_files() - before
        if not files or time.monotonic() > end:
            return files
        time.sleep(0.1)
