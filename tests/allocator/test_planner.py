"""Which of the predictions is taken, and what is said about it, whatever they were predicted from."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from flowtrain_lightning.allocator import NoPlanError, Prediction, choose_placement


@dataclass(frozen=True)
class GivenCosts:
    """A source of costs that knows what steps take."""

    given: tuple[Prediction, ...]
    margin: float = 0.01

    def predictions(self):
        if not self.given:
            raise NoPlanError("nothing fits")
        return self.given


def prediction(name, seconds, idle=0.25):
    """A prediction of the kind with which the name begins; its encoder is idle for a share of the step."""
    return Prediction(name.split()[0], name, seconds, 8 / seconds, {"encoder": idle, "backbone": 0.0})


def choice(margin=0.01, idle=0.25, **seconds):
    """``colocated=1.0, separate_1=2.0`` and so on: what a step takes by name."""
    given = tuple(prediction(name.replace("_", " "), each, idle) for name, each in seconds.items())
    return choose_placement(GivenCosts(given, margin))


def test_the_fastest_is_taken():
    assert choice(colocated=2.0, separate_1=1.5, separate_2=1.0, separate_3=3.0).chosen.name == "separate 2"
    assert choice(colocated=1.0, separate_1=1.5, separate_2=1.2, separate_3=3.0).chosen.name == "colocated"


def test_what_is_not_faster_by_the_margin_gives_way_to_the_simpler_placement():
    assert choice(colocated=1.009, separate=1.0).chosen.name == "colocated"
    assert choice(colocated=1.011, separate=1.0).chosen.name == "separate"
    assert choice(colocated=1.011, separate=1.0, margin=0.03).chosen.name == "colocated"
    assert choice(uniform=1.02, colocated=1.01, mixed=1.0, margin=0.03).chosen.name == "uniform"


def test_of_equally_simple_placements_the_fastest_is_taken_however_close_they_are():
    assert choice(separate_1=1.002, separate_2=1.0, separate_3=1.001).chosen.name == "separate 2"


def test_nothing_that_is_possible_is_told_by_the_source():
    with pytest.raises(NoPlanError, match="nothing fits"):
        choice()


def test_a_separate_choice_is_compared_with_roles_on_the_same_ranks():
    assert choice(colocated=2.2, separate_1=2.1, separate_2=2.0).reason == (
        "separate 2 is predicted to be 10.0 % faster than colocated"
    )


def test_a_colocated_choice_is_compared_with_separate_roles_and_their_idle_time():
    assert choice(colocated=2.0, separate_1=2.4, separate_2=2.5).reason == (
        "colocated is predicted to be 20.0 % faster than separate 1, where encoder ranks would be idle for 25 % of a "
        "step and backbone ranks for 0 %"
    )
    assert choice(colocated=2.0, mixed=2.4, idle=0.0).reason == "colocated is predicted to be 20.0 % faster than mixed"


def test_a_choice_that_is_not_the_fastest_says_by_how_little():
    just = "colocated is the simplest within 1 % of the fastest (separate would save 0.5 %)"
    assert choice(colocated=2.0, separate=1.99).reason == just
    equal = "colocated is as fast as separate, and simpler"
    assert choice(colocated=2.0, separate=1.9995).reason == equal
    assert choice(uniform=2.0, colocated=1.98, separate=3.0, idle=0.0, margin=0.03).reason == (
        "uniform is the simplest within 3 % of the fastest (colocated would save 1.0 %); uniform is predicted to be "
        "50.0 % faster than separate"
    )


def test_where_only_one_way_is_possible_the_reason_says_so():
    assert choice(separate_2=2.0).reason == (
        "separate 2 is the fastest that is possible, and to have all roles on the same ranks is not"
    )
    assert choice(colocated=2.0).reason == (
        "colocated is the fastest that is possible, and to have roles on ranks of their own is not"
    )


def test_the_gain_of_separation_is_in_samples_per_second_of_the_best_of_both_ways():
    assert choice(uniform=3.0, colocated=2.0, separate=1.6, mixed=2.5).gain_of_separation == pytest.approx(0.25)
    assert choice(colocated=2.0).gain_of_separation is None


def test_the_table_shows_the_best_and_marks_the_chosen_one():
    head, lines = choice(colocated=1.0, **{f"separate_{n}": 2.0 + n for n in range(1, 8)}).rows()
    assert [line[0] for line in lines] == ["> colocated", "  separate 1", "  separate 2", "  separate 3"]
    assert head == ("", "s/step", "samples/s", "encoder idle", "backbone idle")
    assert lines[0][1:] == ("1", "8", "25 %", "0 %")
