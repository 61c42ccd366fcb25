"""Ranks of a node that only load: processes that are forked, with as much of a Trainer as a data module asks."""

from __future__ import annotations

import io
import multiprocessing
import os
import pickle
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from flowtrain_lightning.data import FlowDataModule, RankShard, StepBatch
from flowtrain_lightning.data.sources.data_file import DataFile
from tests.data.ray_runs import epoch_of
from tests.data.sources.test_resuming import Lines


def rank_of_node(rank: int, ranks: int, address: str, barrier: Any) -> Any:
    """What a data module asks of the Trainer of one rank of several, all of one node."""
    strategy = SimpleNamespace(
        rank_shard=RankShard.plain(rank, ranks),
        node_shards=tuple(RankShard.plain(other, ranks) for other in range(ranks)),
        broadcast=lambda value: address if isinstance(value, str) else value,
        barrier=lambda name: barrier.wait(120),
        root_device=SimpleNamespace(type="cpu"),
    )
    place = {"global_rank": rank, "local_rank": rank, "node_rank": 0, "num_nodes": 1, "world_size": ranks}
    return SimpleNamespace(strategy=strategy, lightning_module=None, **place)


def loaded_by_ranks(
    folder: Path,
    ranks: int,
    build: Callable[[], FlowDataModule],
    read: Callable[[FlowDataModule, int], Any],
) -> list[Any]:
    """What each rank returns of ``read(data, rank)``, once its data module was set up; or its exception."""
    folder.mkdir(exist_ok=True)
    barrier, address = multiprocessing.get_context("fork").Barrier(ranks), f"\0{folder}-{os.getpid()}"
    children = [
        _forked(folder / f"{rank}", rank_of_node(rank, ranks, address, barrier), build, read) for rank in range(ranks)
    ]
    for child in children:
        os.waitpid(child, 0)
    return [pickle.loads((folder / f"{rank}").read_bytes()) for rank in range(ranks)]


def _forked(file: Path, trainer: Any, build: Callable[[], FlowDataModule], read: Callable[..., Any]) -> int:
    if child := os.fork():
        return child
    try:
        data = build()
        data.trainer = trainer
        try:
            data.setup("fit")
            found = read(data, trainer.global_rank)
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            found = error
        file.write_bytes(pickle.dumps(found))
        trainer.strategy.barrier("all have read")
        data.teardown()
    finally:
        os._exit(0)


def all_steps(loader: Any, epochs: Iterable[int] = range(2)) -> list[StepBatch]:
    """Those of some epochs, without what ties them to their loader."""
    found = [step for epoch in epochs for step in epoch_of(loader, epoch)]
    for step in found:
        step.following = None
    return found


class Rows(Lines):
    """A stream that counts its rows, whoever reads them.

    Args:
        rows: the rows.
        counted: a file that has a byte for each row read.
    """

    def __init__(self, rows: list[dict[str, Any]], counted: Path) -> None:
        super().__init__(rows)
        self.counted = counted

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for row in super().__iter__():
            append(self.counted, b"r")
            yield row


class _CountedFile(io.FileIO):
    def __init__(self, path: Path, counted: Path) -> None:
        super().__init__(path)
        self._counted = counted

    def readinto(self, buffer: Any) -> int | None:
        count = super().readinto(buffer)
        append(self._counted, b"%d\n" % (count or 0))
        return count

    def readall(self) -> bytes:
        found = super().readall()
        append(self._counted, b"%d\n" % len(found))
        return found


def count_bytes(monkeypatch: Any, counted: Path) -> None:
    """From now on a file has the number of bytes of every reading of a data file by this process and its forks."""
    monkeypatch.setattr(DataFile, "open", lambda file: io.BufferedReader(_CountedFile(file.path, counted)))


def append(file: Path, content: bytes) -> None:
    """Write behind what others write at the same time."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(descriptor, content)
    os.close(descriptor)


def counted_bytes(counted: Path) -> int:
    """All that were read since it was asked last."""
    found = sum(map(int, counted.read_bytes().split())) if counted.exists() else 0
    counted.unlink(missing_ok=True)
    return found
