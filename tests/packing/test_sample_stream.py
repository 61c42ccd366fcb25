"""How a stream of samples is cut where nobody says how."""

from __future__ import annotations

import math

import pytest

from flowtrain_lightning.packing.sample_stream import usual_microbatches


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (10, 1),
        (8e3, 2),
        (16e3, 4),
        (32e3, 8),
        (1e6, 8),
        (3e6, 16),
        (1e9, 64),
        (math.inf, 32),
    ],
)
def test_a_step_suits_the_data(tokens, expected):
    assert usual_microbatches(tokens, token_budget=1000) == expected
