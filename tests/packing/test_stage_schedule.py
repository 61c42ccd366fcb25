"""Layers are divided so that no stage has more to do than it must, whatever follows the last of them."""

from __future__ import annotations

from itertools import product

import pytest

from flowtrain_lightning.packing.stage_schedule import StageSchedule


def busiest(pipeline: StageSchedule, layers: tuple[int, ...], behind: float) -> float:
    """What the stage has that has most to do."""
    load = [0.0] * pipeline.stages
    for number, own in enumerate(layers):
        load[pipeline.stage_of(number)] += own
    load[pipeline.last] += behind
    return max(load)


@pytest.mark.parametrize(
    "pipeline", [StageSchedule(2), StageSchedule(3), StageSchedule(2, 2), StageSchedule(2, 2, "zb-v")]
)
@pytest.mark.parametrize("behind", [0.0, 0.4, 1.0, 2.3, 9.0])
@pytest.mark.parametrize("count", [4, 7, 9])
def test_no_other_division_has_a_shorter_busiest_stage(pipeline, behind, count):
    found = pipeline.layers(count, behind)
    every = (each for each in product(range(1, count), repeat=pipeline.runs) if sum(each) == count)
    assert sum(found) == count
    assert min(found) >= 1
    assert busiest(pipeline, found, behind) == min(busiest(pipeline, each, behind) for each in every)


def test_a_head_takes_the_place_of_layers_and_what_is_left_over_goes_to_later_stages():
    assert StageSchedule(4).layers(28, 3.1) == (8, 8, 8, 4)
    assert StageSchedule(4).layers(30) == (7, 7, 8, 8)
    assert StageSchedule(2, 2).layers(10, 2.0) == (3, 2, 3, 2)
    assert StageSchedule(2, 2, "zb-v").layers(10, 2.0) == (2, 3, 3, 2)


def test_by_number_stages_have_as_many_layers_and_the_last_none_more():
    assert StageSchedule(4, cut="number").layers(28, 3.1) == (7, 7, 7, 7)
    assert StageSchedule(4, cut="number").layers(29, 3.1) == (7, 7, 8, 7)


def test_a_head_is_compared_to_a_tenth_so_that_biases_change_nothing():
    plain, biased = (545_259_520, 233_057_792), (545_263_104, 233_062_400)
    assert StageSchedule.head_in_layers(*plain) == StageSchedule.head_in_layers(*biased) == 3.1
