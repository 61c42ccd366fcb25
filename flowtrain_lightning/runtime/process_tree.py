"""Processes as the kernel shows them: the descendants of one, and which of them are stopped."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from flowtrain_lightning.pool import is_stopped


def descendants(process: int, spared: Collection[int] = ()) -> list[int]:
    """The processes that descend from one, but for ``spared`` and those that descend from them."""
    parents = _parents()
    found = [process]
    for parent in found:
        found.extend(child for child, of in parents.items() if of == parent and child not in spared)
    return found[1:]


def stopped_descendants(process: int) -> list[int]:
    """Those that are stopped, by SIGSTOP or by a debugger; none where the process runs on another host."""
    return [child for child in descendants(process) if is_stopped(child)]


def _parents() -> dict[int, int]:
    """The parent of every process that can be seen."""
    parents = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError, IndexError, ValueError):  # it ended while we looked
                parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    return parents
