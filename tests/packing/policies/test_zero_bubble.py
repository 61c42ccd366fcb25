"""Stages that split their backwards: each does all of its passes once, waits little, and blocks for no number."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain_lightning.packing.policies.zero_bubble import zero_bubble_orders
from flowtrain_lightning.packing.stage_schedule import StageSchedule

SCHEDULES = ["zb-h1", "zb-v"]
SHAPE = st.sampled_from(SCHEDULES)


def pipeline_of(stages: int, schedule: str) -> StageSchedule:
    return StageSchedule(stages, 1 + (schedule == "zb-v"), schedule)


def played(orders, pipeline: StageSchedule) -> int:
    """Units of time that the orders take, where each pass takes one."""
    left, done, now = [list(order) for order in orders], {}, 0
    while any(left):
        begun = []
        for stage, order in enumerate(left):
            if order and is_ready(order[0], stage, done, pipeline):
                begun.append((stage, order.pop(0)))
        assert begun, left
        now += 1
        done |= {(each.kind, pipeline.number(stage, each.chunk), each.position): now for stage, each in begun}
    return now


def is_ready(each, stage: int, done, pipeline: StageSchedule) -> bool:
    kind, number = each.kind, pipeline.number(stage, each.chunk)
    if kind == "forward":
        return number == 0 or (kind, number - 1, each.position) in done
    if kind == "weights":
        return ("backward", number, each.position) in done
    own = ("forward", number, each.position) in done
    return own and (number == pipeline.runs - 1 or (kind, number + 1, each.position) in done)


@given(st.integers(0, 13), st.integers(2, 5), SHAPE)
def test_all_passes_are_done_once_and_none_waits_for_what_comes_later(positions, stages, schedule):
    pipeline = pipeline_of(stages, schedule)
    orders = zero_bubble_orders(positions, pipeline)
    assert all(len({*order}) == len(order) == 3 * positions * pipeline.chunks for order in orders)
    played(orders, pipeline)


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
def test_a_step_waits_a_third_as_long_as_1f1b_and_a_quarter_in_a_v(stages):
    positions = 2 * stages
    waits = 3 * (stages - 1)  # of 1F1B, whose backward takes two units
    for schedule, share in zip(SCHEDULES, (1 / 3, 1 / 4), strict=True):
        pipeline = pipeline_of(stages, schedule)
        time = played(zero_bubble_orders(positions, pipeline), pipeline) / pipeline.chunks
        assert time - 3 * positions <= share * waits + 0.5


@given(st.integers(1, 20), st.integers(2, 5), SHAPE)
def test_no_stage_keeps_more_than_the_first_one_of_1f1b(positions, stages, schedule):
    pipeline = pipeline_of(stages, schedule)
    for order in zero_bubble_orders(positions, pipeline):
        kept = most = 0
        for each in order:
            kept += {"forward": 1, "backward": 0, "weights": -1}[each.kind]
            most = max(most, kept)
        assert most <= pipeline.runs


@given(st.integers(0, 13), st.integers(2, 5), SHAPE)
def test_positions_of_a_chunk_never_fall(positions, stages, schedule):
    pipeline = pipeline_of(stages, schedule)
    for order in zero_bubble_orders(positions, pipeline):
        for kind in ("forward", "backward", "weights"):
            for chunk in range(pipeline.chunks):
                own = [each.position for each in order if (each.kind, each.chunk) == (kind, chunk)]
                assert own == [*range(positions)]
