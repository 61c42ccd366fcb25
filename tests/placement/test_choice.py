"""Which of the predictions is taken, and what is said about it."""

from __future__ import annotations

import pytest

from flowtrain_lightning.placement.choice import choose, split
from flowtrain_lightning.placement.prediction import Prediction


def chosen(ranks, **seconds):
    """``colocated=..., s1=...`` for one encoder rank, and so on; what is not named cannot be dealt."""

    def predict(allocation):
        separate = allocation.placement == "separate"
        name = f"s{len(allocation.ranks['encoder'])}" if separate else "colocated"
        if name not in seconds:
            return None
        return Prediction(allocation, seconds[name], 8 / seconds[name], {"encoder": 0.25, "backbone": 0.0})

    return choose(ranks, predict)


def test_the_fastest_is_taken():
    assert split(chosen(4, colocated=2.0, s1=1.5, s2=1.0, s3=3.0).chosen) == "separate 2 + 2"
    assert split(chosen(4, colocated=1.0, s1=1.5, s2=1.2, s3=3.0).chosen) == "colocated x4"


def test_what_is_not_1_percent_faster_gives_way_to_the_simpler_placement():
    assert split(chosen(2, colocated=1.009, s1=1.0).chosen) == "colocated x2"
    assert split(chosen(2, colocated=1.011, s1=1.0).chosen) == "separate 1 + 1"


def test_the_reason_compares_with_the_best_of_the_other_placement():
    assert chosen(4, colocated=2.2, s1=2.1, s2=2.0, s3=9.0).why == (
        "separate 2 + 2 is predicted to be 10.0 % faster than colocated x4"
    )
    assert chosen(4, colocated=2.0, s1=2.4, s2=2.5, s3=9.0).why == (
        "colocated x4 is predicted to be 20.0 % faster than separate 1 + 3, where encoder ranks would be idle for 25 % "
        "of a step and backbone ranks for 0 %"
    )
    assert chosen(2, colocated=2.0, s1=1.99).why == (
        "separate 1 + 1 is predicted to be just 0.5 % faster than colocated x2, and below 1 % the simpler placement is "
        "taken"
    )


def test_what_the_steps_cannot_be_dealt_to_is_left_out():
    assert split(chosen(3, s2=2.0).chosen) == "separate 2 + 1"
    assert "fastest of all that the steps and the devices allow" in chosen(3, s2=2.0).why
    with pytest.raises(ValueError, match="3 ranks in any way"):
        chosen(3)


@pytest.mark.parametrize("best", [1, 2, 137, 200, 512, 1022, 1023])
def test_of_a_thousand_ranks_the_best_split_is_found_by_trying_a_few(best):
    tried = []

    def predict(allocation):
        tried.append(allocation)
        encoders = len(allocation.ranks["encoder"])
        seconds = 9999.0 if allocation.placement == "colocated" else 100.0 + abs(encoders - best)
        return Prediction(allocation, seconds, 1.0, {"encoder": 0.0, "backbone": 0.0})

    choice = choose(1024, predict, nodes=128)
    assert split(choice.chosen) == f"separate {best} + {1024 - best}"
    assert len(tried) < 80


def test_few_splits_of_many_ranks_to_which_the_steps_can_be_dealt_are_all_found():
    found = chosen(256, s131=3.0, s192=2.0, s254=4.0)
    assert split(found.chosen) == "separate 192 + 64"
    assert len(found.predictions) == 3


def test_the_table_shows_the_best_and_marks_the_chosen_one():
    lines = chosen(8, colocated=1.0, **{f"s{n}": 2.0 + n for n in range(1, 8)}).table().splitlines()
    assert [line[:16].rstrip() for line in lines[1:]] == [
        "> colocated x8",
        "  separate 1 + 7",
        "  separate 2 + 6",
        "  separate 3 + 5",
    ]
    assert lines[0].split() == ["s/step", "samples/s", "encoder", "idle", "backbone", "idle"]
    assert lines[1].split()[3:] == ["1", "8", "25", "%", "0", "%"]
