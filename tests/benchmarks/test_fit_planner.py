"""Predicted step times stay as near to published ones as they were, and fall off with scale as they do."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.fit_planner import PRIOR, HeldOut, report, scaling_errors
from benchmarks.published_steps import log_errors, read_steps
from flowtrain_lightning.allocator.coefficients import COEFFICIENTS, FITTED, ROW_BAND


@pytest.fixture(scope="module")
def steps(real_data):
    if not (path := real_data / "plan_rows.csv").exists():
        pytest.skip("there are no published rows here")
    return read_steps(path)


def test_the_median_error_and_the_bias_are_small(steps):
    errors = log_errors(steps)
    assert np.median(np.abs(np.expm1(errors))) < 0.05
    assert abs(np.median(np.expm1(errors))) < 0.03


def test_throughput_falls_with_scale_as_published(steps):
    of = {(step.model, step.devices): step for step in steps if step.device == "h100" and step.devices >= 128}
    models = {model for model, _ in of}
    missed = [
        of[model, 128].predicted() / of[model, 512].predicted() - of[model, 128].seconds / of[model, 512].seconds
        for model in models
    ]
    assert np.abs(missed).max() <= 0.05
    assert sorted(scaling_errors(steps, log_errors(steps))) == pytest.approx(sorted(missed))


def test_the_committed_band_holds_four_rows_of_five_or_more(steps):
    errors = log_errors(steps)
    assert np.mean((errors >= ROW_BAND[0]) & (errors <= ROW_BAND[1])) >= 0.8


def test_every_coefficient_is_where_physics_allows_it():
    assert set(PRIOR) == set(FITTED)
    for name, (_, _, lowest, highest) in PRIOR.items():
        assert lowest <= getattr(COEFFICIENTS, name) <= highest


def test_a_bands_coverage_is_by_the_residuals_of_other_models(steps):
    assert 0 <= HeldOut(steps, log_errors(steps)).coverage <= 1


def test_the_report_has_a_line_for_each_model_and_device(steps):
    text = report("rows", steps, log_errors(steps))
    for name in ("mpt-70b", "h100", "a100", "128 devices and more"):
        assert f"| {name}" in text
