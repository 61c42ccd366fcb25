"""How long a rank waits for its loader, and how many more producers would do, follow from measured seconds."""

import logging

import pytest

from flowtrain_lightning.data import RankShard
from flowtrain_lightning.data.producers import loading_pace
from flowtrain_lightning.data.producers.loading_pace import LoadingPace

TRAINING = 0.02
"""Seconds of a step; others are shares of it."""


class Clock:
    """Stands still but for what it is told."""

    now = 0.0

    def perf_counter(self):
        return self.now


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    monkeypatch.setattr(loading_pace, "time", clock := Clock())
    return clock


def measured(clock, caplog, rank=0, making=0.4, producers=2, steps=12, waiting=0.0):
    pace = LoadingPace(RankShard.plain(rank, 2), producers)
    with caplog.at_level(logging.INFO, logger="lightning.pytorch"):
        for _ in range(steps):
            pace.asked()
            clock.now += waiting
            pace.given(making, 4)
            clock.now += TRAINING
    return pace, [record.message for record in caplog.records]


def test_a_rank_that_waits_is_told_how_many_producers_it_needs(clock, caplog):
    _, (message,) = measured(clock, caplog)
    assert message.endswith("for its pace it needs 20 producers. It has 2, so it waits; num_workers=20 would do.")
    assert "part of a step in 0.4 s (100 ms for each sample of the step)" in message


def test_enough_producers_are_enough(clock, caplog):
    pace, (message,) = measured(clock, caplog, making=0.001)
    assert message.endswith("it needs 1 producers. It has 2, which is enough.")
    assert pace.missing == 0


@pytest.mark.parametrize(("rank", "producers", "steps"), [(1, 2, 12), (0, None, 12), (0, 2, 9)])
def test_nothing_is_told_by_others_of_local_loaders_or_too_early(clock, caplog, rank, producers, steps):
    assert measured(clock, caplog, rank, producers=producers, steps=steps)[1] == []


def test_the_bottleneck_is_named_with_its_share_and_the_producers_that_are_missing(clock, caplog):
    pace, _ = measured(clock, caplog, waiting=3 * TRAINING)
    assert pace.bottleneck == ("waits for producers", "75 %: 18 more would do")
    assert pace.metrics("encoder 0") == {
        "data/encoder 0 waiting": pytest.approx(0.75),
        "data/encoder 0 missing producers": 18,
    }


def test_of_a_rank_that_loads_for_itself_only_the_share_is_told(clock, caplog):
    pace, _ = measured(clock, caplog, making=None, producers=None, waiting=3 * TRAINING)
    assert pace.bottleneck == ("waits for data", "75 %")
    assert pace.metrics("rank 0") == {"data/rank 0 waiting": pace.waiting}


def test_where_hardly_anything_is_waited_for_there_is_no_bottleneck(clock, caplog):
    assert measured(clock, caplog)[0].bottleneck is None
    assert measured(clock, caplog, steps=3, waiting=TRAINING)[0].bottleneck is None, "after so few steps"
