"""A second loss in the backbone, divided by its own count: every layout trains as a plain PyTorch loop does."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.exactness.compare import Run
from tests.exactness.test_sharded import Case, check_against_plain_loop, run  # noqa: F401

FSDP = {"shard": "fsdp"}
TENSOR = {"tensor": 2}
CONTEXT = {"context": 2}
RECOMPUTED = {"shard": "fsdp", "recompute": "full"}


def telling(layout: str, encoder: dict | None = None, backbone: dict | None = None, **more) -> Case:
    return Case(layout, {"encoder": encoder or {}, "backbone": backbone or {}}, kind="two losses", **more)


QUICK = [telling("auto"), telling("1+2", clip=0.2)]
LONG = [
    *(telling(layout) for layout in ("ddp 2", "1+1", "2+3", "colocated 1", "colocated 2", "mixed 1+2")),
    telling("2+2", FSDP, FSDP),
    telling("colocated 2", FSDP, FSDP, clip=0.2),
    telling("colocated 2", RECOMPUTED, TENSOR),
    telling("1+2", {}, TENSOR, clip=0.2),
    telling("1+2", {}, CONTEXT),
    telling("colocated 2", {}, CONTEXT, clip=0.2),
    telling("1+2", {}, {"pipeline": 2}),
    telling("1+2", {}, FSDP, freeze=True),
    telling("2+2", FSDP, TENSOR, precision="32-true"),
]
CASES = [pytest.param(case, id=str(case)) for case in QUICK] + [
    pytest.param(case, id=str(case), marks=pytest.mark.full) for case in LONG
]


@pytest.mark.parametrize("case", CASES)
def test_two_losses_over_their_own_counts_train_as_in_the_plain_loop(
    run: Callable[..., Run],  # noqa: F811
    case: Case,
):
    check_against_plain_loop(run, case)
