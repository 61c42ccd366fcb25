"""Roles whose ranks share optimizer states by DeepSpeed: losses, gradients and weights are those of a plain loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.exactness.compare import Run, error, read_run
from tests.exactness.data import write_steps
from tests.exactness.layouts import ranks_of
from tests.exactness.test_layouts import LIMIT, without_key_biases
from tests.exactness.test_sharded import CUT, FSDP, Case, check_against_plain_loop, run  # noqa: F401
from tests.forks import Job, run_jobs

pytest.importorskip("deepspeed")

ZERO1 = {"shard": "deepspeed-1"}
ZERO2 = {"shard": "deepspeed-2"}
ZERO3 = {"shard": "deepspeed-3"}
ON_HOST = {"offload": "optimizer"}

QUICK = [Case("2+2", {"encoder": ZERO1, "backbone": ZERO2}, "32-true", clip=0.2)]
LONG = [
    Case("2+2", {"encoder": {**ZERO2, "recompute": "full"}, "backbone": FSDP}, "32-true", {"encoder_activations": 0}),
    Case("2+2", {"encoder": ZERO2, "backbone": ZERO2}, "32-true", freeze=True),
    Case("colocated 2", {"encoder": ZERO3, "backbone": ZERO3}, "32-true", {"encoder_activations": 0}),
    Case("colocated 2", {"encoder": {**ZERO3, **ON_HOST}, "backbone": {**ZERO2, **ON_HOST}}, "32-true", data=CUT),
]
LONG += (
    [
        Case(layout, {"encoder": encoder, "backbone": backbone}, "32-true", {"encoder_activations": kept}, clip=0.2)
        for layout, kept in (("3+2", 4), ("colocated 3", 1))
        for encoder, backbone in (
            ({}, ZERO1),
            ({}, ZERO2),
            (ZERO1, ZERO1),
            (ZERO2, ZERO2),
            (FSDP, ZERO2),
            (ZERO2, FSDP),
        )
    ]
    + [
        Case(layout, {"encoder": encoder, "backbone": backbone}, "32-true", {"encoder_activations": kept}, clip=0.2)
        for layout, kept in (("3+2", 4), ("colocated 3", 0))
        for encoder, backbone in (({}, ZERO3), (ZERO3, {}), (ZERO3, ZERO3), (FSDP, ZERO3), (ZERO3, ZERO2))
    ]
    + [
        Case("colocated 2", {"encoder": ZERO2, "backbone": ZERO1}, "32-true", clip=0.2),
        Case("2+2", {"encoder": ZERO3, "backbone": ZERO3}, "32-true", clip=0.2, data=CUT),
        Case("2+2", {"encoder": ZERO3, "backbone": ZERO3}, "32-true", freeze=True),
        Case("1+1", {"encoder": ZERO3, "backbone": ZERO3}, "32-true"),
        Case("2+2", {"encoder": {**ZERO2, **ON_HOST}, "backbone": {**ZERO1, **ON_HOST}}, "32-true", clip=0.2),
        Case("1+3", {"backbone": {**ZERO3, **ON_HOST}}, "32-true", clip=0.2),
        Case("2+2", {"encoder": {}, "backbone": {**ZERO3, "offload": "activations"}}, "32-true"),
        Case("1+1", {"encoder": ZERO2, "backbone": ZERO1}, "32-true"),
        Case("2+2", {"encoder": {}, "backbone": {**ZERO1, "offload": "activations"}}, "32-true"),
    ]
)
CASES = [pytest.param(case, id=str(case)) for case in QUICK] + [
    pytest.param(case, id=str(case), marks=pytest.mark.full) for case in LONG
]


@pytest.mark.parametrize("case", CASES)
def test_training_by_deepspeed_is_that_of_the_plain_loop(run: Callable[..., Run], case: Case):  # noqa: F811
    check_against_plain_loop(run, case)


@pytest.mark.parametrize(
    ("encoder", "backbone"),
    [
        (ZERO3, ZERO2),
        *(
            pytest.param(*each, marks=pytest.mark.full)
            for each in ((ZERO1, ZERO3), (ZERO2, ZERO1), ({**ZERO3, **ON_HOST}, {**ZERO1, **ON_HOST}))
        ),
    ],
    ids=lambda layout: " ".join(layout.values()),
)
def test_frozen_parts_groups_ties_hooks_and_clipping_by_value_are_exact(tmp_path, encoder, backbone):
    """Parameter groups with learning rates and weight decay of their own among them; in one run, beside one process."""
    write_steps(tmp_path / "data")
    settings = {"data": str(tmp_path / "data"), "kind": "particular", "precision": "32-true"}
    settings |= {"clip": 0.01, "clip_by": "value"}
    roles = {"encoder": encoder, "backbone": backbone}

    def trained(layout: str, **more: Any) -> Run:
        arguments = {**settings, "layout": layout, **more}
        job = Job(layout, "tests.exactness.train:train", ranks_of(layout), arguments, imports="deepspeed")
        return read_run(run_jobs(tmp_path, [job])[layout].check().folder)

    found, expected = trained("colocated 2", strategy={"roles": roles}), trained("auto")
    limit = LIMIT["32-true"]
    assert found.losses == pytest.approx(expected.losses, rel=limit)
    assert max(error(*pair) for pair in zip(found.gradients, expected.gradients, strict=True)) <= limit
    assert error(without_key_biases(found.weights[-1]), without_key_biases(expected.weights[-1])) <= limit
    frozen = {name for name, gradient in expected.gradients[0].items() if gradient is None}
    assert frozen == {"encoder.embed.weight", "encoder.embed.bias", "backbone.place.weight"}
    largest = max(float(gradient.abs().max()) for gradient in expected.gradients[0].values() if gradient is not None)
    assert largest > 2 * settings["clip"]
