"""Bounds on activations, on room in the pool and on devices cost time and change no gradient."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flowtrain_lightning.compute.feature_spec import FeatureSpec
from tests.exactness.compare import Run, error, read_run, same_bits
from tests.exactness.data import STEPS, steps_data, write_steps
from tests.exactness.layouts import ranks_of
from tests.forks import Done, Job, run_jobs
from tests.packing.sizes import shard_of
from tests.runtime.interleaving import least_bytes

SPEC = FeatureSpec(((16,),), (torch.float64,))
"""What the module's encoder returns for a row."""

ROLES = {"1+1": (1, 1), "colocated 1": (1, 1), "colocated 2": (2, 2), "2+3": (2, 3)}
"""Layout -> encoder ranks, backbone ranks."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bounds")
    write_steps(folder / "data")
    return folder


@pytest.fixture(scope="module")
def reference(folder: Path) -> Run:
    job = Job("plain", "tests.exactness.reference:train", 1, {"data": str(folder / "data")})
    return read_run(run_jobs(folder, [job])["plain"].check().folder)


def train(
    folder: Path,
    layout: str,
    module: dict[str, Any] | None = None,
    replan: bool = False,
    kind: str = "tiny",
    **strategy: Any,
) -> Done:
    given = {"layout": layout, "kind": kind, "module": module, "strategy": strategy, "replan": replan}
    arguments = {"data": str(folder / "data"), **given}
    job = Job(" ".join(map(str, given.values())), "tests.exactness.train:train", ranks_of(layout), arguments)
    return run_jobs(folder, [job])[job.name]


def check_exact(done: Done, reference: Run) -> None:
    run = read_run(done.check().folder)
    assert run.losses == pytest.approx(reference.losses, rel=1e-12)
    assert max(error(*pair) for pair in zip(run.gradients, reference.gradients, strict=True)) <= 1e-9
    assert error(run.weights[-1], reference.weights[-1]) <= 1e-9


def least_pool(folder: Path, layout: str) -> int:
    """The least ``PoolSettings.bytes`` with which every step can run."""
    encoder_ranks, backbone_ranks = ROLES[layout]
    data = steps_data(folder / "data")
    data.setup("fit")
    both = {"encoder": 0} if layout.startswith("colocated") else {}
    shard = shard_of(encoder_ranks, backbone_ranks, backbone=0, **both)
    steps = replace(data.train_dataloader().steps, shard=shard)
    return 2 * max(least_bytes(steps.plan(0, step), SPEC) for step in range(STEPS))


@pytest.mark.parametrize("layout", ["1+1", pytest.param("2+3", marks=pytest.mark.full)])
def test_an_encoder_that_keeps_the_activations_of_one_batch_gives_the_same_gradients(folder, reference, layout):
    check_exact(train(folder, layout, encoder_activations=1), reference)


LONGER = [pytest.param(layout, marks=pytest.mark.full) for layout in ("colocated 1", "2+3")]


@pytest.mark.parametrize("layout", ["1+1", *LONGER])
def test_an_encoder_that_recomputes_its_forwards_gives_the_same_gradients(folder, reference, layout):
    check_exact(train(folder, layout, encoder_activations=0), reference)


@pytest.mark.parametrize(
    "layout", ["colocated 2", *(pytest.param(each, marks=pytest.mark.full) for each in ("1+1", "2+3"))]
)
def test_the_least_room_in_the_pool_gives_the_same_gradients(folder, reference, layout):
    least = least_pool(folder, layout)
    done = train(folder, layout, pool={"bytes": least}, encoder_activations=1)
    check_exact(done, reference)
    assert f"flowtrain: a pool of {least:,} bytes on each rank" in done.log


def test_what_encoder_ranks_tell_of_their_times_takes_no_room_from_features(folder, reference):
    check_exact(train(folder, "1+1", replan=True, pool={"bytes": least_pool(folder, "1+1")}), reference)


@pytest.mark.parametrize("layout", ["1+1", pytest.param("colocated 2", marks=pytest.mark.full)])
def test_two_ranks_that_share_a_device_give_the_same_gradients(folder, reference, layout):
    check_exact(train(folder, layout, ranks_per_device=2), reference)


ENCODERS = {"dropout": ("tiny", {"dropout": 0.5}), "draws of numpy": ("noisy", {}), "buffers": ("counting", {})}


@pytest.mark.parametrize("name", ENCODERS)
def test_a_recomputed_forward_sees_and_leaves_what_the_first_one_did(folder, name):
    kind, module = ENCODERS[name]
    kept, recomputed = (
        read_run(train(folder, "1+1", module=module, kind=kind, encoder_activations=kept).check().folder)
        for kept in (4, 0)
    )
    assert same_bits(kept, recomputed)


def test_less_than_the_least_room_is_refused_with_the_number_that_works(folder):
    least = least_pool(folder, "1+1")
    done = train(folder, "1+1", pool={"bytes": least - 1})
    assert done.codes == [1, 1]
    told = re.findall(r"PoolSettings\(bytes=(\d+)\)", done.log)
    assert {int(number) for number in told} == {least}
