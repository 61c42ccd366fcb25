"""Predictions beside printed figures stay as good as they were."""

from __future__ import annotations

from statistics import median

from benchmarks.published import compare_hetpar, dip, optimus, report


def middle(predictions):
    return median(abs(one.error) for one in predictions)


def test_step_times_are_predicted_within_15_percent_by_the_median():
    known, assumed = [*optimus(), *dip()], compare_hetpar()[0]
    assert middle([*known, *assumed]) <= 0.10
    assert middle(known) <= 0.16


def test_four_of_five_winners_are_right():
    _, signs = compare_hetpar()
    assert sum(one.right for one in signs) / len(signs) >= 0.8


def test_the_report_shows_every_figure_with_its_error():
    text = report()
    assert text.count(" over H ") == 51
    assert text.count("| HetPar |") == 2 * 43
