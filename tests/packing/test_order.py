"""The order of the positions within a step, with samples swapped between them."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain_lightning.packing.order import fastest_order, media_order, order_step
from flowtrain_lightning.packing.simulator import closed_form_time


def test_positions_poor_in_media_go_first_and_last():
    media = np.array([50, 0, 30, 10, 40])
    assert media[media_order(media)].tolist() == [0, 30, 50, 40, 10]


@pytest.mark.parametrize(("media", "order"), [([], []), ([3], [0]), ([9, 1], [1, 0]), ([0, 0, 0], [0, 2, 1])])
def test_short_and_equal_steps_have_an_order_too(media, order):
    assert media_order(np.array(media, dtype=np.int64)).tolist() == order


@given(st.lists(st.integers(0, 100), max_size=20))
def test_media_rise_to_one_summit_and_fall(media):
    order = media_order(np.array(media, dtype=np.int64))
    assert sorted(order.tolist()) == list(range(len(media)))
    ordered = [media[position] for position in order]
    summit = ordered.index(max(ordered)) if ordered else 0
    assert ordered[: summit + 1] == sorted(ordered[: summit + 1])
    assert ordered[summit:] == sorted(ordered[summit:], reverse=True)


@given(st.lists(st.tuples(st.floats(0.5, 2), st.floats(0, 2)), min_size=1, max_size=6))
def test_the_fastest_order_is_near_the_best_and_never_slower_than_by_media(positions):
    cost, media = np.array(positions).T
    order = fastest_order(cost[:, None], media)
    assert sorted(order.tolist()) == list(range(len(cost)))
    found = closed_form_time(order, cost[:, None], media)
    best = min(closed_form_time(np.array(other), cost[:, None], media) for other in permutations(range(len(cost))))
    assert found <= closed_form_time(media_order(media), cost[:, None], media)
    assert found <= best * 1.02


BUDGET = 4000
POSITIONS, RANKS = 6, 4


def texts_and_pictures(seed: int):
    """Microbatches of samples of 100 to 400 tokens, a third of them text, dealt at random; nearly full."""
    draw = np.random.default_rng(seed)
    tokens, bins = [], []
    for number in range(POSITIONS * RANKS):
        filled = 0
        while filled < BUDGET - 500:
            tokens.append(int(draw.integers(100, 400)))
            bins.append(number)
            filled += tokens[-1]
    lengths = np.array(tokens)
    encoder = np.where(draw.random(len(lengths)) < 0.35, 0.0, 0.9 * lengths)
    return np.array(bins), lengths, lengths.astype(np.float64), encoder


def ordered(bin_of, tokens, costs, encoder, sync_every="microbatch"):
    settings = {"positions": POSITIONS, "ranks": RANKS, "encoder_ranks": RANKS, "budget": BUDGET}
    return order_step(bin_of, tokens, costs, encoder, sync_every=sync_every, **settings)


def step_of(bin_of, costs, encoder):
    """Its time, ``[positions, ranks]`` the backbone's costs, and ``[positions]`` those of each encoder rank."""
    grid = np.bincount(bin_of, costs, minlength=POSITIONS * RANKS).reshape(POSITIONS, RANKS)
    media = np.bincount(bin_of // RANKS, encoder, minlength=POSITIONS) / RANKS
    return closed_form_time(np.arange(POSITIONS), grid.max(axis=1, keepdims=True), media), grid, media


@pytest.mark.parametrize("seed", range(5))
def test_the_first_and_last_positions_read_little_and_the_step_gets_much_shorter(seed):
    before, tokens, costs, encoder = texts_and_pictures(seed)
    after = ordered(before, tokens, costs, encoder)
    (usual, _, _), (found, grid, media) = step_of(before, costs, encoder), step_of(after, costs, encoder)
    work = max(grid.max(axis=1).sum(), media.sum())
    assert media[0] + media[-1] < 0.15 * media.sum()
    assert found / work - 1 < 0.3 * (usual / work - 1)
    assert np.bincount(after, tokens).max() <= BUDGET


@pytest.mark.parametrize("seed", range(5))
def test_positions_stay_even(seed):
    before, tokens, costs, encoder = texts_and_pictures(seed)
    after = ordered(before, tokens, costs, encoder)
    (_, grid, _), (_, new_grid, _) = step_of(before, costs, encoder), step_of(after, costs, encoder)
    assert new_grid.max(axis=1).sum() <= grid.max(axis=1).sum() * 1.0002


@pytest.mark.parametrize("seed", range(3))
def test_ranks_that_synchronise_once_a_step_keep_what_they_have_to_do(seed):
    before, tokens, costs, encoder = texts_and_pictures(seed)
    after = ordered(before, tokens, costs, encoder, "step")
    totals = [np.bincount(bin_of % RANKS, costs) for bin_of in (before, after)]
    assert totals[0].tolist() == pytest.approx(totals[1].tolist())


def test_ranks_that_synchronise_once_a_step_read_little_first_each_on_its_own():
    # Rank 0 has its picture at the first position, rank 1 at the second: no order of whole positions serves both.
    bin_of, encoder = np.array([0, 2, 1, 3]), np.array([90.0, 0.0, 0.0, 90.0])
    settings = {"positions": 2, "ranks": 2, "encoder_ranks": 2, "budget": 100}
    found = order_step(bin_of, np.full(4, 100), np.full(4, 100.0), encoder, sync_every="step", **settings)
    assert len(set((found[encoder > 0] // 2).tolist())) == 1


def test_without_media_no_sample_leaves_its_microbatch():
    bin_of, tokens, costs, _ = texts_and_pictures(0)
    found = ordered(bin_of, tokens, costs, np.zeros(len(tokens)))
    assert len(set(zip(bin_of.tolist(), found.tolist(), strict=True))) == POSITIONS * RANKS
