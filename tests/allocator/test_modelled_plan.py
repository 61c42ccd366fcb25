"""The band of a predicted step: narrow where rows cover it, wider by what they do not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flowtrain_lightning.allocator import Layout
from flowtrain_lightning.allocator.candidates import Candidate
from flowtrain_lightning.allocator.modelled_plan import step_band
from tests.allocator.problems import problems


def band(
    separate=False,
    device="h100",
    model="qwen2.5-vl-7b",
    calibrated=False,
    precision="bf16-mixed",
    roles=None,
    **degrees,
):
    given = problems(model, device=device, precision=precision)
    given = {role: given[role] for role in roles or given}
    if calibrated:
        given = {role: replace(p, efficiency=replace(p.efficiency, jitter=0.0)) for role, p in given.items()}
    chosen = {role: Candidate(role, Layout(**{"data": 8, **degrees}), "none", 1.0, 0.0, 0.0) for role in given}
    found = step_band(given, chosen, separate)
    assert found.low < 1 < found.high
    return found.high - found.low


def test_what_rows_do_not_cover_widens_the_band():
    plain = band()
    assert plain < band(device="b200")
    assert plain < band(separate=True)
    assert plain < band(tensor=2)
    assert plain < band(pipeline=2)
    assert plain < band(model="qwen3-vl-30b-a3b")


LANGUAGE = {"roles": ("backbone",)}
SPLIT = {"tensor": 2, "pipeline": 2}


@pytest.mark.parametrize(
    ("of", "most"),
    [
        ({**LANGUAGE, **SPLIT, "device": "b200"}, 0.30),
        ({**LANGUAGE, **SPLIT, "device": "b200", "precision": "transformer-engine"}, 0.30),
        ({**LANGUAGE, "model": "qwen3-vl-30b-a3b"}, 0.30),
        ({**SPLIT, "device": "b200"}, 0.45),
        ({**SPLIT, "device": "b200", "model": "qwen3-vl-30b-a3b", "precision": "transformer-engine"}, 0.45),
        ({"separate": True, "device": "b200", "model": "qwen3-vl-30b-a3b"}, 0.45),
    ],
)
def test_half_of_a_band_is_at_most_30_percent_and_45_with_pictures(of, most):
    assert band(**of) / 2 <= most


def test_a_runs_own_measurements_narrow_the_band():
    assert band(calibrated=True) < 0.7 * band()


def test_the_band_of_dense_language_models_holds_about_a_tenth_on_either_side():
    assert band(calibrated=True) == pytest.approx(0.2, abs=0.05)
