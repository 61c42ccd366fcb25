"""Media to encoder batches."""

from __future__ import annotations

import numpy as np
import pytest

from flowtrain_lightning.packing import plan_step
from flowtrain_lightning.packing.encoder_batches import local_encoder_batches, moved_rows, pack_encoder_batches
from tests.packing.sizes import make_sizes


def pack(patches, backbone_rank, microbatch, encoder_ranks=1, patch_budget=None):
    batches = pack_encoder_batches(
        np.array(patches, dtype=np.int64),
        np.array(backbone_rank, dtype=np.int64),
        np.array(microbatch, dtype=np.int64),
        encoder_ranks=encoder_ranks,
        patch_budget=patch_budget,
    )
    return [[batch.tolist() for batch in of_rank] for of_rank in batches]


def test_one_batch_per_rank_and_position_by_default():
    assert pack([8, 8, 8, 8], [0, 0, 0, 0], [1, 0, 1, 0], encoder_ranks=2) == [[[1], [0]], [[3], [2]]]


def test_inside_a_batch_the_media_of_one_reader_are_adjacent():
    assert pack([1, 1, 1, 1, 1], [1, 0, 1, 0, 1], [0] * 5) == [[[1, 3, 0, 2, 4]]]


def test_the_next_media_goes_to_the_rank_with_the_fewest_patches_of_the_whole_step():
    assert pack([90, 10, 20, 30], [0] * 4, [0, 0, 1, 1], encoder_ranks=2) == [[[0]], [[1], [2, 3]]]


def test_a_patch_budget_splits_a_position_and_each_batch_is_as_full_as_it_can_be():
    assert pack([4, 4, 4, 6, 4], [0] * 5, [0] * 5, patch_budget=10) == [[[0, 1], [2, 3], [4]]]


def test_a_patch_budget_never_joins_positions():
    assert pack([1, 1], [0, 0], [0, 1], patch_budget=100) == [[[0], [1]]]


def test_a_rank_without_media_has_no_batch():
    assert pack([5], [0], [0], encoder_ranks=3) == [[[0]], [], []]
    assert pack([], [], [], encoder_ranks=2) == [[], []]


def test_local_batches_hold_just_what_their_microbatch_reads():
    batches = local_encoder_batches(np.array([0, 1, 1, 1]), np.array([1, 0, 0, 1]), ranks=2, microbatches=2)
    assert [[batch.tolist() for batch in of_rank] for of_rank in batches] == [[[], [0]], [[1, 2], [3]]]
    assert all(batch.dtype == np.int64 for of_rank in batches for batch in of_rank)


def test_ranks_are_even_to_a_thousandth_over_a_step_of_pictures():
    generator = np.random.default_rng(0)
    patches = generator.integers(16, 5000, 700)
    batches = pack(patches, generator.integers(0, 8, 700), generator.integers(0, 4, 700), encoder_ranks=2)
    totals = [sum(patches[m] for batch in of_rank for m in batch) for of_rank in batches]
    assert 1 - np.mean(totals) / max(totals) < 0.001


def test_media_are_encoded_where_they_are_read_unless_balance_moves_them():
    settings = {"encoder_ranks": 2, "patch_budget": None, "colocated_encoder_ranks": (0, 1)}
    even = pack_encoder_batches(np.full(8, 10), np.repeat([0, 1], 4), np.zeros(8, int), **settings)
    assert [[batch.tolist() for batch in of_rank] for of_rank in even] == [[[0, 1, 2, 3]], [[4, 5, 6, 7]]]
    uneven = pack_encoder_batches(np.full(8, 10), np.repeat([0, 1], [6, 2]), np.zeros(8, int), **settings)
    assert [sum(len(batch) for batch in of_rank) for of_rank in uneven] == [4, 4]
    assert {6, 7} <= set(uneven[1][0].tolist())


def test_media_whose_readers_have_no_encoder_go_to_the_ranks_with_least_to_do():
    # Backbone rank 1 shares a rank with encoder rank 0; backbone rank 0 only reads, encoder rank 1 only encodes.
    batches = pack_encoder_batches(
        np.full(4, 10),
        np.array([1, 1, 0, 0]),
        np.zeros(4, int),
        encoder_ranks=2,
        patch_budget=None,
        colocated_encoder_ranks=(-1, 0),
    )
    assert [[batch.tolist() for batch in of_rank] for of_rank in batches] == [[[0, 1]], [[2, 3]]]


@pytest.mark.parametrize("seed", range(3))
def test_of_a_colocated_step_little_moves_and_ranks_are_even(seed):
    draw = np.random.default_rng(seed)
    patches, colocated_encoder_ranks = draw.integers(100, 2000, 400), tuple(range(4))
    sizes = make_sizes(*[(10, [int(rows)]) for rows in patches])
    step = plan_step(
        sizes,
        np.arange(400),
        backbone_ranks=4,
        encoder_ranks=4,
        token_budget=8192,
        colocated_encoder_ranks=colocated_encoder_ranks,
    )
    loads = [sum(int(sizes.media_patches[batch].sum()) for batch in of_rank) for of_rank in step.encoder_batches]
    assert max(loads) <= 1.001 * np.mean(loads)
    apart = plan_step(sizes, np.arange(400), backbone_ranks=4, encoder_ranks=4, token_budget=8192)
    assert moved_rows(step, colocated_encoder_ranks) < 0.15 * moved_rows(apart, colocated_encoder_ranks)
    assert moved_rows(apart) == int(patches.sum())


def test_costs_may_differ_from_patches():
    batches = pack_encoder_batches(
        np.array([10, 10, 10]),
        np.zeros(3, int),
        np.zeros(3, int),
        encoder_ranks=2,
        patch_budget=None,
        costs=np.array([9.0, 4.0, 5.0]),
    )
    assert [[batch.tolist() for batch in of_rank] for of_rank in batches] == [[[0]], [[1, 2]]]
