"""Roles whose ranks share optimizer states by DeepSpeed: losses, gradients and weights are those of a plain loop."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.exactness.compare import Run
from tests.exactness.test_sharded import FSDP, Case, check_against_plain_loop, run  # noqa: F401

pytest.importorskip("deepspeed")

ZERO1 = {"shard": "deepspeed-1"}
ZERO2 = {"shard": "deepspeed-2"}
ZERO3 = {"shard": "deepspeed-3"}

QUICK = [
    Case("2+2", {"encoder": ZERO1, "backbone": ZERO2}, "32-true", clip=0.2),
    Case("colocated 2", {"encoder": ZERO2, "backbone": ZERO1}, "32-true", clip=0.2),
    Case("2+2", {"encoder": {**ZERO2, "recompute": "full"}, "backbone": FSDP}, "32-true", {"encoder_activations": 0}),
    Case("2+2", {"encoder": ZERO2, "backbone": ZERO2}, "32-true", freeze=True),
    Case("2+2", {"encoder": ZERO3, "backbone": ZERO3}, "32-true", clip=0.2),
    Case("colocated 2", {"encoder": ZERO3, "backbone": ZERO3}, "32-true", {"encoder_activations": 0}),
]
LONG = (
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
        Case("2+2", {"encoder": ZERO3, "backbone": ZERO3}, "32-true", freeze=True),
        Case("1+1", {"encoder": ZERO3, "backbone": ZERO3}, "32-true"),
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
