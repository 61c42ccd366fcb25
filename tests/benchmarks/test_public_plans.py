"""The page of plans for public models is what is planned today."""

from __future__ import annotations

from itertools import product

import pytest

from benchmarks.public_plans import PAGE, REVIEWS, SAMPLES, row


@pytest.mark.full
@pytest.mark.parametrize(("model", "devices"), product(REVIEWS, SAMPLES))
def test_a_public_model_gets_the_plan_that_was_reviewed(model, devices):
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    assert any(line.startswith(row(model, devices)) for line in lines)
