"""Ranks for which one process reads train to the same bits as ranks that read for themselves."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import flowtrain_lightning as flow
from flowtrain_lightning.data.node import node_sources
from flowtrain_lightning.parallel.ranks.connecting import disconnect_groups
from tests.data.node_ranks import Rows
from tests.data.sources.test_resuming import Lines
from tests.data.sources.test_stores import as_tar, embedded
from tests.data.support import records_in
from tests.exactness.compare import read_run, same_bits
from tests.exactness.data import GLOBAL_BATCH, STEPS, steps_data, write_steps
from tests.exactness.layouts import ranks_of
from tests.exactness.train import Recorder, train
from tests.forks import Job, run_jobs
from tests.hosts import Hosts, why_not
from tests.lightning import nodes
from tests.tiny import TinyVLM


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


def train_on_hosts(folder: Path, *, data: str, tester: int, each: bool) -> None:
    """Trains on a stream on two hosts of two ranks; rows are counted for each host."""
    if each:
        node_sources.can_read_for_others = lambda: False  # type: ignore[assignment]
    host = nodes.go_to_host(tester)
    rows = [embedded(one) for one in records_in(Path(data, "train.jsonl"))]
    recorder = Recorder()
    strategy = flow.FlowTrainStrategy(encoder_ranks=2, hang_timeout=60)
    trainer = nodes.trainer_for(2, strategy, callbacks=[recorder], default_root_dir=folder)
    trainer.fit(TinyVLM(), steps_data(Path(data), train=Rows(rows, folder / f"rows of host {host}")))
    recorder.save(folder)
    disconnect_groups()


@pytest.mark.full
@pytest.mark.timeout(1000)
def test_each_of_two_nodes_reads_a_stream_once_to_the_same_bits(tmp_path):
    if reason := why_not():
        pytest.skip(f"no hosts can be made of network namespaces here: {reason}")
    write_steps(tmp_path / "data")
    target, arguments = f"{__name__}:train_on_hosts", {"data": str(tmp_path / "data"), "tester": os.getpid()}
    jobs = [  # the check of the packing takes samples of a step by a stream of its own, in one rank
        Job(name, target, nodes.RANKS, {**arguments, "each": name == "each"}, checks_packing=False)
        for name in ("each", "node")
    ]
    with Hosts():
        done = {name: one.check().folder for name, one in run_jobs(tmp_path, jobs).items()}
    read = {
        name: [(folder / f"rows of host {host}").stat().st_size for host in (0, 1)] for name, folder in done.items()
    }
    rows = GLOBAL_BATCH * STEPS
    assert read == {"each": [2 * rows, 2 * rows], "node": [rows, rows]}
    each, node = (read_run(folder) for folder in done.values())
    assert each.losses == node.losses
    assert same_bits(each, node)
