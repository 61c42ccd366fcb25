"""Idle time that no plan can avoid."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowtrain_lightning.packing import CostModel
from flowtrain_lightning.packing.bound import idle_bound, rank_bound
from flowtrain_lightning.packing.microbatches import pack_microbatches

COST = CostModel(linear=1.0, quadratic=0.01, constant=0.0)


def bound(tokens, step, reach=0, width=4):
    return idle_bound(np.array(tokens), np.array(step, dtype=float), COST, width=width, budget=100, reach=reach)


def test_short_samples_alone_need_not_idle():
    assert bound([5] * 100, [0] * 100) == 0


def test_a_dear_sample_alone_makes_its_row_wait():
    # One microbatch of 100 tokens costs 200; the three beside it, filled with samples of 10, cost 110 each.
    assert bound([100] + [10] * 100, [0] * 101) == pytest.approx(3 * 90 / (3 * 90 + 200 + 100 * 11), rel=0.02)


def test_dear_samples_that_can_meet_need_not_wait():
    tokens, step = [100, *[10] * 50] * 4, [number for number in range(4) for _ in range(51)]
    assert bound(tokens, step) > 0.1
    assert bound(tokens, step, reach=3) == 0


def test_dear_samples_too_far_apart_each_need_long_ones_near_them():
    tokens, step = [100, 100, 100, *[10] * 50, 100, *[10] * 50], [*[0] * 53, *[9] * 51]
    idle = (1 + 3) * 90
    assert bound(tokens, step, reach=3) == pytest.approx(idle / (idle + COST.of_each(np.array(tokens)).sum()), rel=0.03)
    assert bound(tokens, step, reach=9) == 0


def least_idle(tokens, step, width, reach):
    """By trying every row of every bin for every sample; a row may hold samples of ``reach + 1`` steps."""
    costs = COST.of_each(np.array(tokens)).tolist()
    best = np.inf
    rows: list[list[list[int]]] = []

    def place(item):
        nonlocal best
        if item == len(tokens):
            loads = [[sum(costs[i] for i in members) for members in row] for row in rows]
            best = min(best, sum(width * max(row) - sum(row) for row in loads))
            return
        for row in [*rows, None]:
            if row is None:
                rows.append([[] for _ in range(width)])
            elif any(step[item] - step[i] > reach for members in row for i in members):
                continue
            chosen = rows[-1] if row is None else row
            for column, members in enumerate(chosen):
                if sum(tokens[i] for i in members) + tokens[item] <= 100:
                    members.append(item)
                    place(item + 1)
                    members.pop()
                if not members and column:
                    break
            if row is None:
                rows.pop()

    place(0)
    return best / (best + sum(costs))


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.sampled_from([5, 20, 30, 45, 60, 80, 90, 100]), st.integers(0, 5)), min_size=1, max_size=6),
    st.integers(2, 3),
    st.integers(0, 4),
)
def test_no_way_to_make_rows_is_better_than_the_bound(samples, width, reach):
    samples = sorted(samples, key=lambda sample: sample[1])
    tokens, step = [tokens for tokens, _ in samples], [step for _, step in samples]
    assert bound(tokens, step, reach, width) <= least_idle(tokens, step, width, reach) + 1e-9


@settings(deadline=None)
@given(st.lists(st.integers(1, 100), min_size=1, max_size=40), st.integers(1, 4))
def test_no_plan_is_better_than_the_bound(tokens, width):
    packed = pack_microbatches(np.array(tokens), ranks=width, token_budget=100, cost=COST)
    loads = np.array([[COST.of_set(np.array(tokens)[m]) for m in rank] for rank in packed])
    idle = 1 - loads.mean(axis=0).sum() / loads.max(axis=0).sum()
    assert bound(tokens, [0] * len(tokens), width=width) <= idle + 1e-9


def test_once_a_step_only_a_sample_dearer_than_a_rank_s_share_makes_others_wait():
    assert rank_bound([np.array([1.0] * 8)], 4) == 0
    assert rank_bound([np.array([5.0, 1.0, 1.0, 1.0])], 4) == pytest.approx(1 - 2 / 5)
