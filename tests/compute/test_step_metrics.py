"""What is logged in microbatches becomes one token-weighted mean per step, alike on all ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flowtrain_lightning.compute.step_metrics import MetricAccumulator, StepReport
from tests.waits import ReadingOnce

Microbatches = list[tuple[float, int, dict[str, float]]]
"""Summed loss, target tokens and logged values of each microbatch."""


class Meeting:
    """Sums and gathers over threads that stand for ranks."""

    def __init__(self, ranks: int) -> None:
        self._barrier = threading.Barrier(ranks, timeout=10)
        self._brought: list[Any] = [None] * ranks
        self.sums = 0
        self.gathers = 0

    def sum_over_ranks(self, rank: int, vector: Tensor) -> Tensor:
        self.sums += rank == 0
        return torch.stack(self._exchange(rank, vector)).sum(0)

    def gather_over_ranks(self, rank: int, value: Any) -> list[Any]:
        self.gathers += rank == 0
        return self._exchange(rank, value)

    def _exchange(self, rank: int, value: Any) -> list[Any]:
        self._brought[rank] = value
        self._barrier.wait()
        brought = list(self._brought)
        self._barrier.wait()
        return brought


def step(
    logbooks: list[MetricAccumulator], of_ranks: list[Microbatches], meeting: Meeting, stop: bool = False
) -> StepReport:
    """Each rank takes its microbatches, then all agree; they must agree on the same."""
    reports: list[StepReport | None] = [None] * len(logbooks)

    def run(rank: int) -> None:
        for loss, tokens, values in of_ranks[rank]:
            for name, value in values.items():
                logbooks[rank].record(name, value, {"prog_bar": rank == 0})
            logbooks[rank].close_microbatch(torch.tensor(loss), tokens)
        reports[rank] = logbooks[rank].agree(
            stop and rank == 1,
            lambda vector: meeting.sum_over_ranks(rank, vector),
            lambda value: meeting.gather_over_ranks(rank, value),
        )

    on_all_ranks(run, len(logbooks))
    assert reports[0] is not None
    assert all(report == reports[0] for report in reports)
    return reports[0]


def on_all_ranks(run: Callable[[int], None], ranks: int) -> None:
    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_loss_and_values_are_means_over_target_tokens():
    report = step([MetricAccumulator()], [[(6.0, 3, {"accuracy": 0.5}), (4.0, 1, {"accuracy": 0.1})]], Meeting(1))
    assert report.loss == pytest.approx(10 / 4)
    assert report.tokens == 4
    assert report.values == pytest.approx({"accuracy": (3 * 0.5 + 1 * 0.1) / 4})


def test_ranks_with_unequal_microbatches_agree_on_the_mean_over_all_tokens():
    first: Microbatches = [(6.0, 3, {"accuracy": 0.5}), (1.0, 5, {"accuracy": 1.0})]
    second: Microbatches = [(2.0, 2, {"accuracy": 0.25})]
    report = step([MetricAccumulator(), MetricAccumulator()], [first, second], Meeting(2))
    assert report.loss == pytest.approx(9 / 10)
    assert report.values == pytest.approx({"accuracy": (3 * 0.5 + 5 * 1.0 + 2 * 0.25) / 10})


def test_a_name_that_occurs_on_one_rank_only_reaches_all_weighted_by_its_own_tokens():
    first: Microbatches = [(6.0, 3, {})]
    second: Microbatches = [(2.0, 2, {"pictures": 1.0}), (2.0, 4, {"pictures": 4.0})]
    report = step([MetricAccumulator(), MetricAccumulator()], [first, second], Meeting(2))
    assert report.values == pytest.approx({"pictures": (2 * 1.0 + 4 * 4.0) / 6})


def test_names_are_exchanged_once_and_then_one_sum_carries_a_step():
    logbooks, meeting = [MetricAccumulator(), MetricAccumulator()], Meeting(2)
    microbatch: Microbatches = [(1.0, 1, {"a": 1.0, "b": 2.0})]
    step(logbooks, [microbatch, microbatch], meeting)
    assert (meeting.sums, meeting.gathers) == (2, 1)
    step(logbooks, [microbatch, []], meeting)
    assert (meeting.sums, meeting.gathers) == (3, 1)


def test_ranks_that_log_one_name_with_different_options_take_those_of_the_first():
    microbatch: Microbatches = [(1.0, 1, {"a": 1.0})]
    report = step([MetricAccumulator(), MetricAccumulator()], [microbatch, microbatch], Meeting(2))
    assert report.options == {"a": {"prog_bar": True}}


def test_a_name_that_does_not_occur_in_a_step_is_not_reported():
    logbooks, meeting = [MetricAccumulator()], Meeting(1)
    step(logbooks, [[(1.0, 1, {"a": 1.0})]], meeting)
    assert step(logbooks, [[(1.0, 1, {})]], meeting).values == {}


def test_a_step_starts_with_an_empty_page():
    logbooks, meeting = [MetricAccumulator()], Meeting(1)
    step(logbooks, [[(8.0, 2, {"a": 1.0})]], meeting)
    report = step(logbooks, [[(1.0, 1, {"a": 3.0})]], meeting)
    assert (report.loss, report.tokens, report.values) == (1.0, 1.0, {"a": 3.0})


def test_a_step_without_target_tokens_has_no_loss():
    report = step([MetricAccumulator()], [[(0.0, 0, {"a": 1.0})]], Meeting(1))
    assert (report.loss, report.tokens, report.values) == (0.0, 0.0, {})


@pytest.mark.parametrize("count", [-3, float("nan"), float("inf")])
@pytest.mark.parametrize("kind", [float, torch.tensor])
def test_an_invalid_number_of_target_tokens_is_refused_even_where_the_sum_hides_it(count, kind):
    logbook = MetricAccumulator()
    for tokens in (5, kind(count), 7):
        logbook.close_microbatch(torch.tensor(1.0), tokens)
    with pytest.raises(ValueError, match=rf"returned {count:g} as its number of target tokens.* 0 or more\."):
        logbook.agree(False, lambda vector: vector, lambda value: [value])


def test_a_microbatch_without_target_tokens_takes_no_part_whatever_its_mean_is():
    report = step([MetricAccumulator()], [[(6.0, 3, {"a": 0.5}), (0.0, 0, {"a": float("nan")})]], Meeting(1))
    assert report.values == {"a": 0.5}


def test_options_that_are_not_needed_are_not_sent_to_other_ranks():
    logbook = MetricAccumulator()
    logbook.record("a", 1.0, {"prog_bar": True, "batch_size": torch.tensor(3), "sync_dist": True})
    logbook.close_microbatch(torch.tensor(1.0), 3)
    report = logbook.agree(False, lambda vector: vector, lambda value: [value])
    assert report.options == {"a": {"prog_bar": True}}


def test_that_one_rank_was_asked_to_stop_reaches_all():
    microbatch: Microbatches = [(1.0, 1, {})]
    assert step([MetricAccumulator(), MetricAccumulator()], [microbatch, microbatch], Meeting(2), stop=True).stop
    assert not step([MetricAccumulator(), MetricAccumulator()], [microbatch, microbatch], Meeting(2)).stop


def test_numbers_of_numpy_can_be_logged():
    report = step([MetricAccumulator()], [[(1.0, 1, {"a": np.float32(0.5), "b": np.int64(2)})]], Meeting(1))
    assert report.values == {"a": 0.5, "b": 2.0}


def test_only_single_numbers_can_be_logged():
    with pytest.raises(TypeError, match=r"log\('histogram', ...\).*one element"):
        MetricAccumulator().record("histogram", torch.zeros(3), {})


def test_only_the_mean_is_reduced_to():
    with pytest.raises(ValueError, match=r"log\('most', reduce_fx=...\).*token-weighted mean"):
        MetricAccumulator().record("most", 1.0, {"reduce_fx": "max"})


def test_all_that_a_step_has_left_on_a_device_is_read_in_one_wait():
    there = torch.ones((), device="meta")
    logbook = MetricAccumulator()
    for step in range(2):
        with ReadingOnce() as device:
            for tokens in (3, there):
                logbook.record("on the device", there, {})
                logbook.record("on the host", 0.5, {})
                logbook.close_microbatch(there, tokens)
            report = logbook.agree(False, lambda vector: vector, lambda value: [value])
        assert device.reads == (2 if step == 0 else 1), "once more where names are new"
        assert report.values == {"on the device": 1.0, "on the host": 0.5}
        assert (report.loss, report.tokens) == (2 / 4, 4)
