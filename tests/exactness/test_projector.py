"""A module of one's own may have its projector in the backbone half: exact, whether its tower trains or not."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.exactness.compare import Run
from tests.exactness.test_sharded import FSDP, Case, check_against_plain_loop, run

__all__ = ["run"]  # a fixture

QUICK = [
    Case("1+2", {}, kind="projecting"),
]
LONG = [Case("1+2", {"backbone": FSDP}, freeze=True, kind="projecting")]
LONG += [
    Case(layout, {"backbone": backbone}, freeze=freeze, kind="projecting")
    for layout in ("colocated 2", "mixed 1+2")
    for backbone in ({}, FSDP)
    for freeze in (False, True)
]
LONG += [
    Case("1+2", {"backbone": shared}, freeze=freeze, kind="projecting")
    for shared in ({"context": 2}, {"tensor": 2})
    for freeze in (False, True)
]
CASES = [pytest.param(case, id=str(case)) for case in QUICK] + [
    pytest.param(case, id=str(case), marks=pytest.mark.full) for case in LONG
]


@pytest.mark.parametrize("case", CASES)
def test_a_projector_beside_the_decoder_trains_as_in_the_plain_loop(run: Callable[..., Run], case: Case):
    check_against_plain_loop(run, case)
