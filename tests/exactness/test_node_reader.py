"""Ranks for which one process reads train to the same bits as ranks that read for themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flowtrain_lightning.data.node import node_sources
from tests.data.sources.test_resuming import Lines
from tests.data.sources.test_stores import as_tar, embedded
from tests.data.support import records_in
from tests.exactness.compare import read_run, same_bits
from tests.exactness.data import write_steps
from tests.exactness.layouts import ranks_of
from tests.exactness.train import train
from tests.forks import Job, run_jobs


def train_on(folder: Path, *, data: str, layout: str, form: str, each: bool) -> None:
    """Trains on a tar shard or a stream, which ``each`` rank may read for itself."""
    if each:
        node_sources.can_read_for_others = lambda: False  # type: ignore[assignment]
    file = Path(data, "train.jsonl")
    given: Any = file.with_suffix(".tar") if form == "tar" else Lines([embedded(one) for one in records_in(file)])
    train(folder, data=data, layout=layout, settings={"train": given})


@pytest.mark.parametrize(
    ("layout", "form"),
    [
        ("1+1", "stream"),
        pytest.param("1+2", "tar", marks=pytest.mark.full),
        pytest.param("ddp 2", "tar", marks=pytest.mark.full),
        pytest.param("mixed 1+2", "stream", marks=pytest.mark.full),
    ],
)
def test_losses_and_weights_are_equal_to_the_bit(tmp_path, layout, form):
    write_steps(tmp_path / "data")
    as_tar(tmp_path / "data/train.jsonl")
    target, arguments = f"{__name__}:train_on", {"data": str(tmp_path / "data"), "layout": layout, "form": form}
    jobs = [Job(name, target, ranks_of(layout), {**arguments, "each": name == "each"}) for name in ("each", "node")]
    done = run_jobs(tmp_path, jobs)
    each, node = (read_run(done[name].check().folder) for name in ("each", "node"))
    assert each.losses == node.losses
    assert same_bits(each, node)
