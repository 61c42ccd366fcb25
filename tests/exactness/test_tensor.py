"""Roles whose ranks share layers (tensor) or sequences (context): training is that of a plain PyTorch loop."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.exactness.compare import Run
from tests.exactness.test_layouts import LIMIT
from tests.exactness.test_sharded import Case, check_against_plain_loop, run  # noqa: F401

FSDP = {"shard": "fsdp"}
TENSOR = {"tensor": 2}
CONTEXT = {"context": 2}
RECOMPUTED = {"tensor": 2, "recompute": "full"}
TENSOR_ACROSS = {"tensor": 2, "shard": "fsdp"}
CONTEXT_ACROSS = {"context": 2, "shard": "fsdp"}


def divided(
    layout: str,
    encoder: dict,
    backbone: dict,
    precision: str = "64-true",
    kept: int = 1,
    *,
    tokens: bool = False,
    **more,
) -> Case:
    """A case of halves whose layers can be divided, and between them ``tokens``."""
    strategy = {"encoder_activations": kept}
    kind = "divided tokens" if tokens else "divided"
    return Case(layout, {"encoder": encoder, "backbone": backbone}, precision, strategy, kind=kind, **more)


QUICK = [
    divided("1+4", {}, {**CONTEXT, "recompute": "full"}, clip=0.2),
    divided("colocated 2", TENSOR, {**TENSOR, "recompute": "full"}, "32-true", tokens=True, clip=0.2, kernel="fused"),
]
LONG = [
    divided(
        "colocated 4", TENSOR, {**TENSOR_ACROSS, "recompute": "full"}, "32-true", tokens=True, clip=0.2, kernel="fused"
    ),
    divided("colocated 4", FSDP, {**TENSOR, "recompute": "full"}, kept=0, kernel="foreach"),
    divided("1+4", {}, {"context": 4}, freeze=True),
    divided("2+2", TENSOR, TENSOR, "32-true", clip=0.2),
    divided("colocated 4", TENSOR, CONTEXT_ACROSS, "32-true"),
    divided("1+4", {}, TENSOR_ACROSS, clip=0.2),
    divided("2+2", RECOMPUTED, TENSOR, kept=2, tokens=True, clip=0.2),
]
LONG += [
    divided(layout, encoder, backbone, precision, kept)
    for precision in LIMIT
    for layout in ("4+4", "colocated 4", "mixed 4+4")
    for encoder, backbone in (
        (TENSOR, TENSOR),
        ({}, TENSOR_ACROSS),
        (TENSOR_ACROSS, CONTEXT),
        (FSDP, {**TENSOR, **CONTEXT}),
        (FSDP, CONTEXT_ACROSS),
    )
    for kept in (0, 2)
    if layout != "mixed 4+4" or encoder in ({}, TENSOR)  # else ranks of both kinds would share weights
]
LONG += [
    divided(layout, encoder, backbone, precision, kept, tokens=True)
    for precision in LIMIT
    for layout in ("4+4", "colocated 4")
    for encoder, backbone in (
        (TENSOR, TENSOR),
        (RECOMPUTED, {**TENSOR_ACROSS, "recompute": "selective"}),
        (TENSOR_ACROSS, {**TENSOR, **CONTEXT}),
    )
    for kept in (0, 2)
]
LONG += [
    divided(layout, encoder, backbone, kernel=kernel)
    for kernel in ("foreach", "fused")
    for layout, encoder, backbone in (
        ("colocated 2", {}, TENSOR),
        ("1+2", {}, TENSOR),
        ("2+2", TENSOR, TENSOR),
        ("colocated 4", FSDP, TENSOR),
        ("colocated 4", {}, TENSOR_ACROSS),
        ("colocated 4", TENSOR, {**TENSOR, **CONTEXT}),
        ("mixed 4+4", {}, TENSOR_ACROSS),
        ("mixed 4+4", TENSOR, TENSOR),
    )
]
CASES = [pytest.param(case, id=str(case)) for case in QUICK] + [
    pytest.param(case, id=str(case), marks=pytest.mark.full) for case in LONG
]


@pytest.mark.parametrize("case", CASES)
def test_training_on_shared_layers_and_sequences_is_that_of_the_plain_loop(
    run: Callable[..., Run],  # noqa: F811
    case: Case,
):
    check_against_plain_loop(run, case)
