"""A searched order of all works (``order: searched``): losses, gradients and weights are those of a plain loop."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flowtrain_lightning.allocator import Allocation, Layout
from flowtrain_lightning.allocator.plan_file import write_plan
from tests.exactness.compare import Run, error, read_run, same_bits
from tests.exactness.data import STEPS, write_steps
from tests.exactness.layouts import ranks_of
from tests.exactness.test_layouts import LIMIT, without_key_biases
from tests.exactness.test_sharded import CUT
from tests.forks import Job, run_jobs

CLIP = 0.2


def colocated(ranks: int, stages: int, of_encoder: int = 1) -> Allocation:
    """Every rank encodes, or has a stage of the encoder, and has a stage of the backbone."""
    degrees = {"encoder": of_encoder, "backbone": stages}
    both = {role: Layout(data=ranks // count, pipeline=count) for role, count in degrees.items()}
    return Allocation("colocated", both, dict.fromkeys(both, tuple(range(ranks))), order="searched")


def separate(encoders: int, stages: int) -> Allocation:
    """Some ranks encode, and each of the others has a stage of the backbone."""
    layouts = {"encoder": Layout(data=encoders), "backbone": Layout(pipeline=stages)}
    ranks = {"backbone": tuple(range(stages)), "encoder": tuple(range(stages, stages + encoders))}
    return Allocation("separate", layouts, ranks, order="searched")


def train(folder: Path, layout: str, allocation: Allocation | None, name: str, **more: Any) -> Run:
    """A run from an allocation file; or the plain loop's."""
    data = folder / "data"
    if not data.exists():
        write_steps(data)
    strategy, settings = dict(more.pop("strategy", {})), {**CUT, **more.pop("settings", {})}
    arguments = {"data": str(data), "kind": "deep", "precision": "64-true", "clip": CLIP, "module": {}, **more}
    target = "tests.exactness.reference:train"
    if allocation is not None:
        write_plan(allocation, folder / f"{name}.yaml", "of a test")
        target, strategy = "tests.exactness.train:train", {**strategy, "allocation": str(folder / f"{name}.yaml")}
        arguments |= {"layout": layout, "strategy": strategy, "settings": settings}
    ranks = ranks_of(layout) if allocation is not None else 1
    return read_run(run_jobs(folder, [Job(name, target, ranks, arguments)])[name].check().folder)


CASES = [
    pytest.param("colocated 2", colocated(2, 2), {"encoder_activations": 1}, "64-true", id="2 ranks"),
    pytest.param("colocated 2", colocated(2, 2, 2), {"encoder_activations": 1}, "64-true", id="both in stages"),
    pytest.param("colocated 4", colocated(4, 2, 2), {}, "32-true", id="both, 2x2", marks=pytest.mark.full),
    pytest.param(
        "colocated 2", colocated(2, 1, 2), {"encoder_activations": 0}, "64-true", id="encoder", marks=pytest.mark.full
    ),
    pytest.param("colocated 4", colocated(4, 4), {}, "64-true", id="4 ranks", marks=pytest.mark.full),
    pytest.param(
        "colocated 4", colocated(4, 2), {"encoder_activations": 0}, "32-true", id="2x2", marks=pytest.mark.full
    ),
    pytest.param("colocated 2", colocated(2, 1), {}, "64-true", id="no stages", marks=pytest.mark.full),
    pytest.param("1+2", separate(1, 2), {"encoder_activations": 1}, "64-true", id="1+2", marks=pytest.mark.full),
    pytest.param("2+3", separate(2, 3), {}, "32-true", id="2+3", marks=pytest.mark.full),
]


@pytest.mark.parametrize(("layout", "allocation", "strategy", "precision"), CASES)
def test_a_searched_order_trains_as_the_plain_loop_does(tmp_path, layout, allocation, strategy, precision):
    expected = train(tmp_path, layout, None, "plain", precision=precision)
    found = train(tmp_path, layout, allocation, "searched", precision=precision, strategy=strategy)
    assert error(found.initial, expected.initial) == 0.0
    assert found.losses == pytest.approx(expected.losses, rel=LIMIT[precision])
    errors = [error(*pair) for pair in zip(found.gradients, expected.gradients, strict=True)]
    assert len(errors) == STEPS
    assert max(errors) <= LIMIT[precision], errors
    weights = found.weights[-1], expected.weights[-1]
    if precision == "32-true":
        weights = without_key_biases(weights[0]), without_key_biases(weights[1])
    assert error(*weights) <= LIMIT[precision]


MOST, FULL = 800_000.0, {"token_budget": 128}
"""Bytes of activations within which some batches of a step keep theirs, and some do not; microbatches that fit."""


def limited(allocation: Allocation, moving: str, most: float = MOST) -> Allocation:
    """With room for some of a step's activations: those of one role are moved, the other's are computed again."""
    return replace(allocation, activation_bytes=most, offload={moving: "activations"})


AGAIN, MOVED = "encoder: forward again", "backbone: forward moved"
LIMITED = [
    pytest.param("colocated 2", limited(colocated(2, 2, 2), "backbone"), "64-true", (AGAIN, MOVED), id="both staged"),
    pytest.param(
        "colocated 2",
        limited(colocated(2, 1), "encoder", 570_000.0),
        "32-true",
        ("encoder: forward moved",),
        id="no stages",
        marks=pytest.mark.full,
    ),
    pytest.param("1+2", limited(separate(1, 2), "backbone"), "64-true", (AGAIN,), id="1+2", marks=pytest.mark.full),
]


@pytest.mark.parametrize(("layout", "allocation", "precision", "given_up"), LIMITED)
def test_so_do_batches_that_are_kept_computed_again_and_moved_in_one_step(
    tmp_path, layout, allocation, precision, given_up
):
    expected = train(tmp_path, layout, None, "plain", precision=precision)
    found = train(tmp_path, layout, allocation, "limited", precision=precision, settings=FULL)
    assert found.losses == pytest.approx(expected.losses, rel=LIMIT[precision])
    assert max(error(*pair) for pair in zip(found.gradients, expected.gradients, strict=True)) <= LIMIT[precision]
    first, *others = [sum(map(Counter, of_ranks), Counter()) for of_ranks in zip(*found.computed, strict=True)]
    for role in ("encoder", "backbone"):  # it counts what is kept
        assert first[f"{role}: forward again"] == first[f"{role}: backward"]
    backward = {name: f"{name.split(':')[0]}: backward" for name in given_up}
    assert any(all(0 < each[name] < each[backward[name]] for name in given_up) for each in others), others


@pytest.mark.full
@pytest.mark.parametrize(
    "allocation", [colocated(2, 2, 2), limited(colocated(2, 2, 2), "encoder")], ids=["", "limited"]
)
def test_so_does_one_with_a_frozen_encoder_in_stages(tmp_path, allocation):
    frozen = {"module": {"freeze_encoder": True}}
    expected = train(tmp_path, "colocated 2", None, "plain", **frozen)
    found = train(tmp_path, "colocated 2", allocation, "searched", settings=FULL, **frozen)
    assert max(error(*pair) for pair in zip(found.gradients, expected.gradients, strict=True)) <= LIMIT["64-true"]
    assert error(found.weights[-1], expected.weights[-1]) <= LIMIT["64-true"]


@pytest.mark.full
@pytest.mark.parametrize("of_encoder", [1, 2])
def test_a_searched_order_gives_the_same_bits_whatever_takes_how_long(tmp_path, of_encoder):
    runs = [train(tmp_path, "colocated 2", colocated(2, 2, of_encoder), name) for name in ("one", "other")]
    assert same_bits(*runs)
