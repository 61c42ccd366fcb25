"""The types of a plan."""

from __future__ import annotations

import numpy as np

from flowtrain_lightning.packing import StepPlan
from tests.packing.sizes import make_sizes


def test_every_media_item_knows_its_sample():
    assert make_sizes((1, [2, 3]), (1, []), (1, [4])).media_sample.tolist() == [0, 0, 2]


def test_selected_sizes_follow_the_given_order_and_may_repeat():
    chosen = make_sizes((1, [2, 3]), (5, []), (7, [4])).select(np.array([2, 0, 2, 1]))
    assert chosen.tokens.tolist() == [11, 6, 11, 5]
    assert chosen.media_start.tolist() == [0, 1, 3, 4, 4]
    assert chosen.media_rows.tolist() == [4, 2, 3, 4]
    assert chosen.media_patches.tolist() == [16, 8, 12, 16]


def test_nothing_can_be_selected():
    chosen = make_sizes((1, [2])).select(np.array([], dtype=np.int64))
    assert len(chosen) == 0
    assert chosen.media_start.tolist() == [0]


def test_an_entry_is_what_one_batch_hands_to_one_microbatch():
    microbatches = ((np.array([0]),), (np.array([1]),))
    plan = StepPlan(
        np.arange(2),
        make_sizes((10, [5, 6]), (10, [7])),
        {"backbone": microbatches, "encoder": ((np.array([0, 1, 2]),),)},
    )
    found = [(entry.maker, entry.readers, entry.media.tolist(), entry.rows) for entry in plan.entries]
    maker = ("encoder", 0, 0)
    assert found == [(maker, (("backbone", 0, 0),), [0, 1], 11), (maker, (("backbone", 1, 0),), [2], 7)]
