"""Damaged checkpoints, and what their readers get. `make proofs` damages 10,000, and goes on where it was stopped.

Half of them were saved by ranks that hold copies of the backbone, half by ranks that share it.
"""

from __future__ import annotations

import logging
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import Tensor

from flowtrain_lightning.allocator import default_allocation
from flowtrain_lightning.checkpoint import DamagedCheckpointError, load_checkpoint
from flowtrain_lightning.checkpoint.index_file import read_checked, read_index
from flowtrain_lightning.checkpoint.tensor_files import read_tensors
from flowtrain_lightning.parallel.ranks.groups import Groups
from flowtrain_lightning.parallel.regions import Region
from tests import trials
from tests.checkpoint.conftest import groups_alone
from tests.checkpoint.damage import Damage, damage, files_of
from tests.checkpoint.saving import NothingHeld
from tests.checkpoint.test_resume import same
from tests.checkpoint.training import LAYOUTS, write_data
from tests.forks import Job, run_jobs

SAVED_ON = ("1+2", "1+2 sharded")
"""The layouts of the two runs whose checkpoints are damaged."""

EARLIER, LATER = 3, 5
"""The steps after which they are saved."""

_RANKS = 2  # that divide each tensor in the second way of reading


@dataclass(frozen=True)
class Bench:
    """Two checkpoints of a run, of which the later one is damaged again and again.

    Attributes:
        whole: the later one as it was saved, in a folder of its own.
        path: where it is damaged.
        earlier: the other one, beside it.
        groups: of the process that reads.
        content: what each way of reading gives of the later one.
    """

    whole: Path
    path: Path
    earlier: Path
    groups: Groups
    content: list[Any]

    @classmethod
    def of(cls, later: Path, earlier: Path, folder: Path, groups: Groups) -> Bench:
        """Copies two checkpoints into a new folder."""
        path, beside = folder / "last.ckpt", folder / "before.ckpt"
        shutil.copytree(later, path)
        shutil.copytree(earlier, beside)
        return cls(later, path, beside, groups, [read() for read in _readings(path, groups)])

    def trial(self, seed: int) -> str:
        """Damages the checkpoint, reads it as one process and as one of several ranks do, and makes it whole again.

        Returns:
            ``"refused"`` in a sentence that helps, or ``"read as it was"`` to the bit.

        Raises:
            AssertionError: something else is read, or the sentence does not help.
        """
        done = damage(self.path, self.earlier, seed)
        try:
            refused, *others = [
                self._is_refused(read, content, done)
                for number, (read, content) in enumerate(
                    zip(_readings(self.path, self.groups), self.content, strict=True)
                )
                if number in (0, 1 + seed // 2 % _RANKS)
            ]
        finally:
            shutil.rmtree(self.path)
            shutil.copytree(self.whole, self.path)
        assert refused or not any(others), f"{done.how}: who reads all reads what others refuse"
        return "refused" if refused else "read as it was"

    def _is_refused(self, read: Callable[[], Any], content: Any, done: Damage) -> bool:
        try:
            found = read()
        except DamagedCheckpointError as error:
            said = str(error)
        else:
            assert same(found, content), f"{done.how}: something else is read"
            return False
        files = {file.relative_to(of) for of in (self.path, self.whole) for file in files_of(of)}
        assert any(str(self.path / file) in said for file in files), f"{done.how}: no file is named: {said}"
        tensors = {piece.partition("[")[0] for piece in done.pieces}
        assert not tensors or any(name in said for name in tensors), f"{done.how}: no tensor is named: {said}"
        if read.func is _read_all:
            assert str(self.earlier) in said, f"{done.how}: the other one is not offered: {said}"
        return True


def _readings(path: Path, groups: Groups) -> list[partial[Any]]:
    """Ways to read a checkpoint: all of it by one process, and by ranks that divide it anew."""
    return [partial(_read_all, path, groups), *(partial(_read_part, path, rank) for rank in range(_RANKS))]


def _read_all(path: Path, groups: Groups) -> dict[str, Any]:
    return load_checkpoint(path, NothingHeld(), default_allocation(1), groups, TorchCheckpointIO())


def _read_part(path: Path, rank: int) -> dict[str, Tensor]:
    index = read_index(path)
    for name in index.files:
        if not name.endswith(".safetensors"):
            read_checked(path, name, index)
    regions = {key: _part(stored.shape, rank) for key, stored in index.tensors.items()}
    return read_tensors(path, index, {key: region for key, region in regions.items() if region.elements})


def _part(shape: tuple[int, ...], rank: int) -> Region:
    """A rank's rows, as even as it goes; a single number belongs to all."""
    if not shape:
        return Region((), ())
    first, last = (shape[0] * each // _RANKS for each in (rank, rank + 1))
    return Region((first, *[0] * (len(shape) - 1)), (last - first, *shape[1:]))


def benches(folder: Path, layouts: tuple[str, ...] = SAVED_ON) -> list[Bench]:
    """Trains once on each layout, and saves twice on the way."""
    write_data(folder / "data")
    found = []
    for number, layout in enumerate(layouts):
        arguments = {"data": str(folder / "data"), "case": "dropout", "layout": layout, "saves": [EARLIER, LATER]}
        job = Job(layout, "tests.checkpoint.training:train", LAYOUTS[layout][0], arguments)
        saved = run_jobs(folder, [job])[layout].check().folder
        later, earlier = saved / f"step{LATER}.ckpt", saved / f"step{EARLIER}.ckpt"
        found.append(Bench.of(later, earlier, folder / f"bench{number}", groups_alone()))
    return found


def main() -> int:
    """Runs the trials that were not run yet."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)  # it tells whoever reads which layout saved
    with tempfile.TemporaryDirectory(prefix="damaged-") as name:
        of_layout = benches(Path(name))
        return trials.main("damaged checkpoints", lambda seed: of_layout[seed % len(of_layout)].trial(seed))


if __name__ == "__main__":
    sys.exit(main())
