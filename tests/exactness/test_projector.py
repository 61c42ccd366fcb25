"""A module of one's own may have its projector in the backbone half: exact, whether its tower trains or not."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.exactness.compare import Run
from tests.exactness.test_sharded import FSDP, Case, check_against_plain_loop, run

__all__ = ["run"]  # a fixture

LAYOUTS = [
    (layout, {"backbone": backbone}) for layout in ("1+2", "colocated 2", "mixed 1+2") for backbone in ({}, FSDP)
]
LAYOUTS += [("1+2", {"backbone": shared}) for shared in ({"context": 2}, {"tensor": 2})]
CASES = [Case(*layout, freeze=freeze, kind="projecting") for layout in LAYOUTS for freeze in (False, True)]


@pytest.mark.full  # `tests/models/test_projector.py` has its quick form
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_projector_beside_the_decoder_trains_as_in_the_plain_loop(run: Callable[..., Run], case: Case):
    check_against_plain_loop(run, case)
