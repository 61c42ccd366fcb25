"""The page of plans for public models is what is planned today."""

from __future__ import annotations

from itertools import product

import pytest

from benchmarks.public_plans import MODELS, PAGE, SAMPLES, row


@pytest.mark.full
@pytest.mark.parametrize(("model", "devices"), product(MODELS, SAMPLES))
def test_a_public_model_gets_the_plan_that_was_reviewed(model, devices):
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    assert row(model, devices) in lines
