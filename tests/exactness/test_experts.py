"""Roles whose ranks share the experts of a mixture: training is that of a plain PyTorch loop."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.exactness.compare import Run, error
from tests.exactness.test_layouts import LIMIT
from tests.exactness.test_sharded import Case, check_against_plain_loop, run  # noqa: F401

WHOLE = {"expert": 2}
ACROSS = {"expert": 2, "shard": "fsdp"}
GROUPS = {"expert": 2, "shard": "fsdp", "replicas": 2}
TENSOR = {"tensor": 2}
TENSOR_ACROSS = {**TENSOR, "shard": "fsdp"}
BOTH = {**WHOLE, **TENSOR}
BOTH_ACROSS = {**ACROSS, **TENSOR}
CUT = {"encoder_budget": 40}
"""Patches that most positions' media have more of on a rank: several encoder batches each, unlike in number."""


def divided(layout: str, encoder: dict, backbone: dict, precision: str = "64-true", kept: int = 1, **more) -> Case:
    """A case of halves that have experts."""
    roles = {"encoder": encoder, "backbone": backbone}
    return Case(layout, roles, precision, {"encoder_activations": kept}, **{"kind": "mixture", **more})


QUICK = [
    divided("colocated 2", ACROSS, WHOLE, kind="crowded", kernel="fused"),
    divided("colocated 2", TENSOR, {**TENSOR_ACROSS, "recompute": "full"}, kind="divided tokens mixture", clip=0.2),
]
LONG = [
    divided(
        "colocated 4", BOTH, {**BOTH_ACROSS, "recompute": "full"}, kind="divided tokens mixture", clip=0.2, data=CUT
    ),
    divided("1+2", {}, ACROSS, clip=0.2, kind="balanced"),
    divided("2+4", WHOLE, {**WHOLE, "recompute": "full"}, "32-true", 0, clip=0.2, data=CUT, kernel="foreach"),
    divided("1+2", {}, ACROSS, clip=0.2),
    divided("2+4", WHOLE, {**WHOLE, "recompute": "full"}, kept=0, data=CUT, kind="balanced"),
    divided("mixed 2+2", GROUPS, {**ACROSS, "recompute": "selective"}, data=CUT, kind="balanced"),
    divided("colocated 4", {}, {"shard": "fsdp", "context": 2}, kind="balanced"),
    divided("1+2", {}, WHOLE, freeze=True, data=CUT),
    divided("1+2", {}, {**WHOLE, "recompute": "full"}, kind="only experts", clip=0.2),
    divided("colocated 2", {}, {**ACROSS, "recompute": "full"}, kind="only experts", clip=0.2),
    divided("4+4", GROUPS, {"expert": 4, "shard": "fsdp"}, clip=0.2, data=CUT),
    divided("mixed 2+2", {"expert": 2}, {**ACROSS, "recompute": "selective"}, clip=0.2),
    divided("mixed 2+2", GROUPS, WHOLE, "32-true", clip=0.2, kernel="foreach"),
    divided("4+4", {"expert": 4}, {"expert": 4, "shard": "fsdp"}, kind="crowded"),
    divided("2+4", {"shard": "fsdp"}, {**WHOLE, "context": 2}, clip=0.2),
    divided("colocated 4", {}, {**ACROSS, "context": 2}, "32-true", clip=0.2),
]
ADAPTED, ADAPTED_IN_FLOAT32 = (
    [
        divided(layout, {}, {**backbone, "recompute": "full"}, precision, kind=kind, clip=0.2)
        for kind in ("adapted", "adapted by peft")
        for layout, backbone in (("1+2", WHOLE), ("colocated 2", ACROSS), ("2+4", GROUPS))
    ]
    for precision in LIMIT
)
LONG += ADAPTED
LONG += [
    divided(layout, encoder, backbone, precision, kept, kind=kind)
    for precision in LIMIT
    for kind in ("mixture", "crowded")
    for layout in ("4+4", "colocated 4")
    for encoder, backbone in (
        (WHOLE, ACROSS),
        (ACROSS, WHOLE),
        (GROUPS, GROUPS),
        ({**WHOLE, "recompute": "full"}, {**GROUPS, "recompute": "full"}),
    )
    for kept in (0, 2)
]
LONG += [
    divided(layout, encoder, backbone, precision, kept, kind=kind, clip=0.2, kernel=kernel)
    for layout, encoder, backbone, precision, kept, kind, kernel in (
        ("colocated 4", BOTH, BOTH_ACROSS, "64-true", 1, "divided mixture", "foreach"),
        ("1+4", {}, {**BOTH_ACROSS, "recompute": "selective"}, "64-true", 1, "divided mixture", ""),
        ("4+4", BOTH, {**TENSOR_ACROSS, "recompute": "full"}, "64-true", 0, "divided tokens mixture", ""),
        ("2+2", TENSOR, TENSOR, "64-true", 1, "divided mixture", ""),
        ("1+8", {}, {**GROUPS, **TENSOR, "recompute": "full"}, "64-true", 1, "divided tokens mixture", ""),
        ("1+8", {}, {**BOTH_ACROSS, "context": 2}, "64-true", 1, "divided mixture", ""),
        ("1+8", {}, {**BOTH, "context": 2}, "64-true", 1, "divided tokens mixture", ""),
        ("mixed 4+4", {}, {**BOTH_ACROSS, "recompute": "full"}, "64-true", 1, "divided mixture", ""),
    )
]
IN_FLOAT32 = [
    *ADAPTED_IN_FLOAT32,
    *(
        divided("colocated 4", BOTH_ACROSS, backbone, "32-true", kept, kind=kind, clip=0.2, kernel=kernel)
        for backbone, kept, kind, kernel in (
            ({**BOTH, "recompute": "full"}, 0, "divided mixture", "fused"),
            (BOTH, 2, "divided tokens mixture", ""),
        )
    ),
]
CASES = [pytest.param(case, id=str(case)) for case in QUICK] + [
    pytest.param(case, id=str(case), marks=pytest.mark.full) for case in LONG
]


@pytest.mark.parametrize("case", CASES)
def test_training_on_divided_experts_is_that_of_the_plain_loop(run: Callable[..., Run], case: Case):  # noqa: F811
    check_against_plain_loop(run, case)


@pytest.mark.full
@pytest.mark.parametrize("case", IN_FLOAT32, ids=str)
def test_gradients_in_float32_are_those_of_the_plain_loop_in_every_step(run: Callable[..., Run], case: Case):  # noqa: F811
    """In every step, at the weights with which the run began it: AdamW makes steps of rounding, which add up."""
    found = run(case)
    expected = run(case, reference=True, follows=True)
    assert error(found.initial, expected.initial) == 0.0
    limit = LIMIT[case.precision]
    assert found.losses == pytest.approx(expected.losses, rel=limit)
    errors = [error(*pair) for pair in zip(found.gradients, expected.gradients, strict=True)]
    assert max(errors) <= limit, errors
