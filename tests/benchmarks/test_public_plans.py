"""The page of plans for public models is what is planned today."""

from __future__ import annotations

from itertools import product

import pytest

from benchmarks.public_plans import PAGE, REVIEWS, SAMPLES, row

QUICK = (("smolvlm-2.2b", 8),)


@pytest.mark.parametrize(
    ("model", "devices"),
    [pair if pair in QUICK else pytest.param(*pair, marks=pytest.mark.full) for pair in product(REVIEWS, SAMPLES)],
)
def test_a_public_model_gets_the_plan_that_was_reviewed(model, devices):
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    assert any(line.startswith(row(model, devices)) for line in lines)
