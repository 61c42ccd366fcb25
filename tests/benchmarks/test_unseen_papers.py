"""Papers that nothing was fitted to are predicted by what a plan assumes."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.unseen_papers import own_attention, papers, report, share_in_bands
from flowtrain_lightning.allocator.coefficients import COEFFICIENTS, PLANNED


@pytest.fixture(scope="module")
def found():
    return papers()


def test_times_of_unseen_papers_are_within_15_percent_and_their_bias_within_10(found):
    for times in found.values():
        errors = np.array([one.error for one in times])
        assert np.median(np.abs(errors)) < 0.15
        assert abs(np.median(errors)) < 0.10


def test_with_the_attention_of_its_own_code_a_papers_times_are_nearer_and_unbiased(found):
    as_planned, own = (np.array([one.error for one in times]) for times in (found["HetPar"], own_attention()))
    assert np.median(np.abs(own)) < np.median(np.abs(as_planned))
    assert abs(np.median(own)) < 0.02


def test_bands_of_80_percent_hold_75_percent_of_a_paper_and_do_not_hold_all():
    assert 0.75 <= share_in_bands() <= 0.95


def test_attention_of_the_rows_is_slower_than_in_training_by_the_measured_factor():
    assert 1.3 <= PLANNED.attention_reached / COEFFICIENTS.attention_reached <= 2.5


@pytest.mark.full
def test_the_report_has_a_line_for_each_paper(found):
    text = report(found)
    for name in ("Optimus", "DIP", "HetPar", "all", "HetPar, its own attention"):
        assert f"| {name}" in text
