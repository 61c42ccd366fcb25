"""How many producers a rank needs is told once, by the first of like ranks."""

import logging
import time

import pytest

from flowtrain_lightning.data import RankShard
from flowtrain_lightning.data.producer_pace import ProducerPace


def told(caplog, rank, seconds, producers=2, steps=12):
    pace = ProducerPace(RankShard.plain(rank, 2), producers)
    with caplog.at_level(logging.INFO, logger="lightning.pytorch"):
        for _ in range(steps):
            pace.given(seconds, 4)
            time.sleep(0.01)
            pace.asked()
    return [record.message for record in caplog.records]


def test_a_rank_that_waits_is_told_how_many_producers_it_needs(caplog):
    (message,) = told(caplog, 0, 0.4)
    needed = int(message.split("num_workers=")[1].split()[0])
    assert 10 <= needed <= 40
    assert "part of a step in 0.4 s (100 ms for each sample of the step)" in message


def test_enough_producers_are_enough(caplog):
    (message,) = told(caplog, 0, 0.001)
    assert message.endswith("it needs 1 producers. It has 2, which is enough.")


@pytest.mark.parametrize(("rank", "seconds", "steps"), [(1, 0.4, 12), (0, None, 12), (0, 0.4, 9)])
def test_nothing_is_told_by_others_of_local_loaders_or_too_early(caplog, rank, seconds, steps):
    assert told(caplog, rank, seconds, steps=steps) == []
