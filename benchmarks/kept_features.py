"""Where features of frozen encoders are kept best: a file of safetensors for each media item, or a database of LMDB.

python benchmarks/kept_features.py              about a minute; needs lmdb (pip install lmdb)
python benchmarks/kept_features.py --quick      few items, to see that it runs; the figures mean nothing

Media items of 64 and 1,024 rows of 1,152 numbers in bfloat16 are written, and read in an order that is drawn. Both keep
the same bytes, with a digest that is looked at when they are read; neither forces them onto the disk, since what was
cut off is made anew. They come from the page cache, as on a machine that has room for them. CPU time is taken, which
other work on the machine hardly changes; what is told is that of the fastest round, in which the ways take turns.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import lmdb
import numpy as np
import torch
from torch import Tensor

from benchmarks.launch import machine
from benchmarks.modules import ROOT, SEED
from benchmarks.report import machine_line, table, write_results
from flowtrain_lightning.data import KeepFeatures
from flowtrain_lightning.data.features.feature_store import packed, unpacked

WIDTH = 1152
SIZES = {64: 500, 1024: 50}
"""Rows of features of a media item, and how many items there are."""


class Files:
    """A file for each media item, as training keeps them.

    Args:
        folder: of all.
    """

    name = "file for each item"

    def __init__(self, folder: Path) -> None:
        self._store = KeepFeatures(folder).store("encoder")
        self._store.open()

    def write(self, item: str, features: Sequence[Tensor]) -> None:
        """Keeps a media item's features."""
        assert self._store.write(item, features)

    def read(self, item: str, rows: int) -> tuple[Tensor, ...]:
        """The features of a media item."""
        found = self._store.read(item, rows)
        assert found is not None
        return found


class Database:
    """One database of all media items, in which each is written in a transaction of its own.

    Args:
        folder: of the database.
    """

    name = "LMDB"

    def __init__(self, folder: Path) -> None:
        self._database = lmdb.open(str(folder), map_size=1 << 34, sync=False)

    def write(self, item: str, features: Sequence[Tensor]) -> None:
        """Keeps a media item's features."""
        with self._database.begin(write=True) as transaction:
            transaction.put(item.encode(), packed(features))

    def read(self, item: str, rows: int) -> tuple[Tensor, ...]:
        """The features of a media item."""
        with self._database.begin() as transaction:
            content = transaction.get(item.encode())
        assert content is not None
        found = unpacked(content)
        assert found[0].shape[0] == rows
        return found


WAYS: tuple[Callable[[Path], Any], ...] = (Files, Database)


@dataclass(frozen=True)
class Items:
    """What is kept.

    Attributes:
        rows: of features of each.
        count: how many there are.
    """

    rows: int
    count: int

    def measure(self, way: Callable[[Path], Any], folder: Path) -> dict[str, float]:
        """CPU milliseconds and those on the clock that writing and reading an item take, and bytes on the disk."""
        features = [torch.randn(self.rows, WIDTH, dtype=torch.bfloat16)]
        names = [f"{number:032x}"[::-1] for number in range(self.count)]
        shuffled = np.random.default_rng(SEED).permutation(names).tolist()
        store = way(folder)
        found = {
            **self._timed("write", lambda: [store.write(name, features) for name in names]),
            **self._timed("read", lambda: [store.read(name, self.rows) for name in shuffled]),
        }
        blocks = sum(file.stat().st_blocks for file in folder.rglob("*"))
        return {**found, "bytes": blocks * 512 / (self.count * features[0].nbytes)}

    def _timed(self, kind: str, work: Callable[[], Any]) -> dict[str, float]:
        start, spent = time.monotonic(), time.process_time()
        work()
        each = 1000 / self.count
        return {kind: (time.process_time() - spent) * each, f"{kind}, clock": (time.monotonic() - start) * each}


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="how often both take turns")
    parser.add_argument("--quick", action="store_true", help="few items; the figures mean nothing")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results", help="folder of the results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    where, found = machine(), {}
    for rows, count in SIZES.items():
        items = Items(rows, 8 if options.quick else count)
        rounds: dict[str, list[dict[str, float]]] = {}
        for _ in range(1 if options.quick else options.rounds):
            for way in WAYS:
                with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
                    rounds.setdefault(way.name, []).append(items.measure(way, Path(folder)))  # type: ignore[attr-defined]
        for name, each in rounds.items():
            found[f"{rows:,} rows, {name}"] = {figure: min(one[figure] for one in each) for figure in each[0]}
    text = f"{machine_line(where)}\n\n{report(found)}"
    write_results(options.out, "kept-features", {"machine": where, "figures": found}, text)
    print(f"\n{text}\nWritten to {options.out}.")


def report(found: dict[str, dict[str, float]]) -> str:
    """The figures as a table."""
    head = ["media items of", "write: CPU ms", "on the clock", "read: CPU ms", "on the clock", "disk / features"]
    figures = ("write", "write, clock", "read", "read, clock", "bytes")
    return table(head, [[name, *(f"{each[figure]:.2f}" for figure in figures)] for name, each in found.items()])


if __name__ == "__main__":
    main()
