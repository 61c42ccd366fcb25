"""What no packing can avoid."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.lower_bounds import bounds_of, least_idle_share, least_idle_share_of_ranks, least_step_time
from flowtrain_lightning.packing import SYNC_EVERY, CostModel
from flowtrain_lightning.packing.evaluation import evaluate
from flowtrain_lightning.packing.microbatches import pack_microbatches
from flowtrain_lightning.packing.offline import OfflineSettings, pack_offline
from flowtrain_lightning.packing.step_planner import plan_step
from tests.packing.sizes import TOKEN_BUDGET, members_of, simulated, sizes_strategy

COST = CostModel(linear=1.0, quadratic=0.01, constant=0.0)


def bound(tokens, step, reach=0, size=4):
    settings = {"group_size": size, "budget": 100, "reach": reach}
    return least_idle_share(np.array(tokens), np.array(step, dtype=float), COST, **settings)


def test_short_samples_alone_need_not_idle():
    assert bound([5] * 100, [0] * 100) == 0


def test_an_outlier_alone_makes_its_group_wait():
    # One microbatch of 100 tokens costs 200; the three beside it, filled with samples of 10, cost 110 each.
    assert bound([100] + [10] * 100, [0] * 101) == pytest.approx(3 * 90 / (3 * 90 + 200 + 100 * 11), rel=0.02)


def test_outliers_that_can_share_a_group_need_not_wait():
    tokens, step = [100, *[10] * 50] * 4, [number for number in range(4) for _ in range(51)]
    assert bound(tokens, step) > 0.1
    assert bound(tokens, step, reach=3) == 0


def test_outliers_too_far_apart_each_need_long_samples_near_them():
    tokens, step = [100, 100, 100, *[10] * 50, 100, *[10] * 50], [*[0] * 53, *[9] * 51]
    idle = (1 + 3) * 90
    assert bound(tokens, step, reach=3) == pytest.approx(idle / (idle + COST.of_each(np.array(tokens)).sum()), rel=0.03)
    assert bound(tokens, step, reach=9) == 0


def least_idle(tokens, step, size, reach):
    """By trying every bin of every group for every sample; a group may hold samples of ``reach + 1`` steps."""
    costs = COST.of_each(np.array(tokens)).tolist()
    best = np.inf
    groups: list[list[list[int]]] = []

    def pack(item):
        nonlocal best
        if item == len(tokens):
            loads = [[sum(costs[i] for i in members) for members in group] for group in groups]
            best = min(best, sum(size * max(group) - sum(group) for group in loads))
            return
        for group in [*groups, None]:
            if group is None:
                groups.append([[] for _ in range(size)])
            elif any(step[item] - step[i] > reach for members in group for i in members):
                continue
            chosen = groups[-1] if group is None else group
            for slot, members in enumerate(chosen):
                if sum(tokens[i] for i in members) + tokens[item] <= 100:
                    members.append(item)
                    pack(item + 1)
                    members.pop()
                if not members and slot:
                    break
            if group is None:
                groups.pop()

    pack(0)
    return best / (best + sum(costs))


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.sampled_from([5, 20, 30, 45, 60, 80, 90, 100]), st.integers(0, 5)), min_size=1, max_size=6),
    st.integers(2, 3),
    st.integers(0, 4),
)
def test_no_way_to_make_groups_is_better_than_the_bound(samples, size, reach):
    samples = sorted(samples, key=lambda sample: sample[1])
    tokens, step = [tokens for tokens, _ in samples], [step for _, step in samples]
    assert bound(tokens, step, reach, size) <= least_idle(tokens, step, size, reach) + 1e-9


@settings(deadline=None)
@given(st.lists(st.integers(1, 100), min_size=1, max_size=40), st.integers(1, 4))
def test_no_plan_is_better_than_the_bound(tokens, size):
    packed = pack_microbatches(np.array(tokens), ranks=size, token_budget=100, cost=COST)
    loads = np.array([[COST.of_set(np.array(tokens)[m]) for m in rank] for rank in packed])
    idle = 1 - loads.mean(axis=0).sum() / loads.max(axis=0).sum()
    assert bound(tokens, [0] * len(tokens), size=size) <= idle + 1e-9


def test_once_a_step_only_a_sample_above_a_rank_s_share_makes_others_wait():
    assert least_idle_share_of_ranks([np.array([1.0] * 8)], 4) == 0
    assert least_idle_share_of_ranks([np.array([5.0, 1.0, 1.0, 1.0])], 4) == pytest.approx(1 - 2 / 5)


def test_four_equal_positions_and_an_encoder_with_as_much_to_do_lose_a_twelfth():
    # Media at the first position delay the beginning by a third of their cost; media that are not there leave the
    # encoder without gradients to work on. A quarter of them at the first position is the best.
    costs = np.ones(40)
    encoder = np.where(np.arange(40) < 30, 0.0, 4.0)
    assert least_step_time(np.full((4, 1), 10.0), costs, encoder, encoder_ranks=1) == pytest.approx(40 * (1 + 1 / 12))


def test_eight_positions_with_text_enough_for_two_lose_nothing():
    costs = np.ones(80)
    encoder = np.where(np.arange(80) < 40, 0.0, 2.0)
    assert least_step_time(np.full((8, 1), 10.0), costs, encoder, encoder_ranks=1) == pytest.approx(80)


def test_without_text_the_first_forward_and_the_last_backward_are_waited_for():
    costs, encoder = np.ones(80), np.full(80, 0.1)
    # Each position has 1 of media: a third of it before the first begins, two thirds after the last ends.
    least = least_step_time(np.full((8, 1), 10.0), costs, encoder, encoder_ranks=1)
    assert least == pytest.approx(81)


def test_without_media_a_step_takes_what_its_positions_take():
    positions = np.array([[3.0, 4.0], [2.0, 1.0]])
    assert least_step_time(positions, np.full(10, 1.0), np.zeros(10), encoder_ranks=2) == pytest.approx(6)


@given(sizes_strategy(20), st.integers(1, 3), st.integers(1, 3), st.booleans())
def test_no_simulated_step_is_shorter_than_the_bound(sizes, backbone_ranks, encoder_ranks, ordered_by_cost):
    if len(sizes) == 0:
        return
    encoder_cost = CostModel(0.3, 0.001, 0.0)
    plan = plan_step(
        sizes,
        np.arange(len(sizes)),
        members_of(encoder_ranks, backbone_ranks),
        token_budget=TOKEN_BUDGET,
        cost=COST,
        media_costs={"encoder": encoder_cost} if ordered_by_cost else None,
    )
    costs, encoder = COST.of_each(sizes.tokens), np.zeros(len(sizes))
    np.add.at(encoder, sizes.media_sample, encoder_cost.of_each(sizes.media_patches))
    positions = np.array([[costs[members].sum() for members in of_rank] for of_rank in plan.microbatches]).T
    least = least_step_time(positions, costs, encoder, encoder_ranks=encoder_ranks)
    assert least <= simulated(plan, COST, encoder_cost, "microbatch").makespan * (1 + 1e-6)


@pytest.mark.parametrize("sync_every", SYNC_EVERY)
@pytest.mark.parametrize("of_steps", [{"global_batch_size": 40}, {"microbatches": 2, "max_delay": 4}])
def test_no_plan_idles_less_than_its_bounds(of_steps, sync_every):
    draw = np.random.default_rng(1)
    tokens = np.minimum(draw.lognormal(4, 1, 600).astype(np.int64) + 1, 1000)
    media_start = np.arange(601)
    settings = OfflineSettings(1000, 2, CostModel(1.0, 1 / 2000, 0.0), sync_every=sync_every, **of_steps)
    media_cost = 0.3 * tokens * (draw.random(600) < 0.6)
    given = (pack_offline(tokens, media_start, media_cost, settings), tokens, media_start, media_cost, settings)
    found, bounds = evaluate(*given), bounds_of(*given)
    assert bounds["bound"] <= found["idle_sync" if sync_every == "microbatch" else "idle_acc"] + 1e-9
    assert bounds.get("flow_bound", 0.0) <= found["flow_gap"] + 1e-6
