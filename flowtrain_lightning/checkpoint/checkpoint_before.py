"""Which checkpoint of the same folder can take the place of a damaged one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from flowtrain_lightning.checkpoint.checkpoint_index import Index
from flowtrain_lightning.checkpoint.index_file import DamagedCheckpointError, parse_index, read_index


@contextmanager
def offering_another(path: Path) -> Iterator[None]:
    """Inside, what is said of a damaged checkpoint ends with the name of the one that can take its place."""
    try:
        yield
    except DamagedCheckpointError as error:
        other = _checkpoint_before(path)
        advice = (
            f"The checkpoint before it that has all its files is {other}: pass that as ckpt_path."
            if other
            else "No other checkpoint in that folder has all its files: copy it there again from where it is whole."
        )
        raise DamagedCheckpointError(f"{error} {advice}") from error


def _checkpoint_before(path: Path) -> Path | None:
    """The checkpoint beside ``path`` of the most steps, but not of more than it has itself if that can be told."""
    own = _steps(parse_index, path)
    others = (other for other in path.parent.iterdir() if other.is_dir() and not other.name.startswith("."))
    steps = {other: _steps(read_index, other) for other in others if not other.samefile(path)}
    before = {other: taken for other, taken in steps.items() if taken is not None and (own is None or taken <= own)}
    return max(before, key=lambda other: (before[other], other.name), default=None)


def _steps(read: Callable[[Path], Index], path: Path) -> int | None:
    """How many steps a checkpoint's run had taken; None where that cannot be read."""
    try:
        return int(read(path).lightning.get("global_step", 0))
    except (OSError, ValueError):
        return None
