"""Predictions beside printed figures stay as good as they were."""

from __future__ import annotations

from dataclasses import replace
from statistics import median

from benchmarks.published import EXPOSED, compare_hetpar, dip, hetpar, optimus, report
from benchmarks.published_figures import hetpar_results


def middle(predictions):
    return median(abs(one.error) for one in predictions)


def test_step_times_are_predicted_within_15_percent_by_the_median():
    known, assumed = [*optimus(), *dip()], compare_hetpar()[0]
    assert middle([*known, *assumed]) <= 0.10
    assert middle(known) <= 0.16


def test_four_of_five_winners_are_right():
    _, signs = compare_hetpar()
    assert sum(one.right for one in signs) / len(signs) >= 0.8


def test_megatron_overlaps_nothing_in_hetpars_runs():
    assert EXPOSED.contention == 1.0
    result = next(one for one in hetpar_results() if one.mode == "NC")
    assert hetpar(result)[0] == hetpar(replace(result, mode="C"))[0]  # what is compared with it leaves H as it is


def test_the_report_shows_every_figure_with_its_error():
    text = report()
    assert text.count(" over H ") == 51
    assert text.count("| HetPar |") == 2 * 43
