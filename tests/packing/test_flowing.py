"""The rows of a step in their order, with samples exchanged between them."""

from __future__ import annotations

import numpy as np
import pytest

from flowtrain_lightning.packing.flowing import flow_rows
from flowtrain_lightning.packing.order import rows_time

BUDGET = 4000
ROWS, RANKS = 6, 4


def step_of_texts_and_pictures(seed: int):
    """Microbatches of samples of 100 to 400 tokens, a third of them text, dealt at random; nearly full."""
    draw = np.random.default_rng(seed)
    tokens, bins = [], []
    for number in range(ROWS * RANKS):
        filled = 0
        while filled < BUDGET - 500:
            tokens.append(int(draw.integers(100, 400)))
            bins.append(number)
            filled += tokens[-1]
    lengths = np.array(tokens)
    encoder = np.where(draw.random(len(lengths)) < 0.35, 0.0, 0.9 * lengths)
    return np.array(bins), lengths, lengths.astype(np.float64), encoder


def flow(seed: int, sync_every="microbatch"):
    bin_of, tokens, costs, encoder = step_of_texts_and_pictures(seed)
    found = flow_rows(
        bin_of,
        tokens,
        costs,
        encoder,
        rows=ROWS,
        ranks=RANKS,
        encoder_ranks=RANKS,
        budget=BUDGET,
        sync_every=sync_every,
    )
    return bin_of, found, tokens, costs, encoder


def time_of(bin_of, costs, encoder):
    grid = np.bincount(bin_of, costs, minlength=ROWS * RANKS).reshape(ROWS, RANKS)
    media = np.bincount(bin_of // RANKS, encoder, minlength=ROWS) / RANKS
    return rows_time(np.arange(ROWS), grid.max(axis=1, keepdims=True), media), grid, media


@pytest.mark.parametrize("seed", range(5))
def test_rows_at_the_begin_and_the_end_become_poor_in_media_and_the_step_much_shorter(seed):
    before, after, tokens, costs, encoder = flow(seed)
    usual, _, _ = time_of(before, costs, encoder)
    found, grid, media = time_of(after, costs, encoder)
    work = max(grid.max(axis=1).sum(), media.sum())
    assert media[0] + media[-1] < 0.15 * media.sum()
    assert found / work - 1 < 0.3 * (usual / work - 1)
    assert np.bincount(after, tokens).max() <= BUDGET


@pytest.mark.parametrize("seed", range(5))
def test_rows_do_not_become_uneven(seed):
    before, after, _, costs, encoder = flow(seed)
    (_, grid, _), (_, new_grid, _) = time_of(before, costs, encoder), time_of(after, costs, encoder)
    assert new_grid.max(axis=1).sum() <= grid.max(axis=1).sum() * 1.0002


@pytest.mark.parametrize("seed", range(3))
def test_where_ranks_meet_once_a_step_each_keeps_what_it_has_to_do(seed):
    before, after, _, costs, _ = flow(seed, "step")
    totals = [np.bincount(bin_of % RANKS, costs) for bin_of in (before, after)]
    assert totals[0].tolist() == pytest.approx(totals[1].tolist())


def test_ranks_that_need_not_meet_each_read_their_poorest_microbatch_first():
    # Rank 0 has its picture in the first row, rank 1 in the second: no order of whole rows serves both.
    bin_of, encoder = np.array([0, 2, 1, 3]), np.array([90.0, 0.0, 0.0, 90.0])
    settings = {"rows": 2, "ranks": 2, "encoder_ranks": 2, "budget": 100}
    tokens, costs = np.full(4, 100), np.full(4, 100.0)
    apart = flow_rows(bin_of, tokens, costs, encoder, sync_every="step", **settings)
    assert len(set((apart[encoder > 0] // 2).tolist())) == 1


def test_without_media_only_nothing_changes_places():
    bin_of, tokens, costs, _ = step_of_texts_and_pictures(0)
    found = flow_rows(
        bin_of,
        tokens,
        costs,
        np.zeros(len(tokens)),
        rows=ROWS,
        ranks=RANKS,
        encoder_ranks=1,
        budget=BUDGET,
        sync_every="microbatch",
    )
    assert len({(old, new) for old, new in zip(bin_of.tolist(), found.tolist(), strict=True)}) == ROWS * RANKS
