"""A whole data set packed at once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowtrain_lightning.packing import SYNC_EVERY, CostModel, PackingError
from flowtrain_lightning.packing.offline import OfflineSettings, pack_offline

COST = CostModel(1.0, 0.01, 0.0)


def packed(tokens, media=None, content=None, **changes):
    tokens = np.array(tokens, dtype=np.int64)
    media = media or [[]] * len(tokens)
    media_start = np.cumsum([0, *map(len, media)])
    media_cost = np.concatenate([[], *media])
    given = {"token_budget": 100, "ranks": 2, "cost": COST}
    changes = changes if "microbatches" in changes else {"global_batch_size": 8, **changes}
    content = None if content is None else np.array(content)
    return pack_offline(tokens, media_start, media_cost, OfflineSettings(**{**given, **changes}), content)


@settings(deadline=None, max_examples=30)
@given(
    st.lists(st.tuples(st.integers(1, 100), st.lists(st.floats(0, 50), max_size=2)), max_size=60),
    st.sampled_from([{"microbatches": 2}, {"global_batch_size": 8}]),
    st.sampled_from(SYNC_EVERY),
)
def test_every_sample_and_its_media_are_in_one_step_or_left(samples, of_steps, sync_every):
    tokens, media = [tokens for tokens, _ in samples], [media for _, media in samples]
    plan = packed(tokens, media, sync_every=sync_every, encoder_ranks=2, **of_steps)
    start = np.cumsum([0, *map(len, media)])
    in_steps = [sample for step in plan.steps for sample in step.samples.tolist()]
    assert sorted(in_steps + plan.left.tolist()) == list(range(len(tokens)))
    for step in plan.steps:
        encoded = sorted(item for of_rank in step.encoder_batches for batch in of_rank for item in batch.tolist())
        assert encoded == [item for sample in step.samples for item in range(start[sample], start[sample + 1])]
        assert np.bincount(step.bin_of, np.array(tokens)[step.samples]).max() <= 100


def test_what_samples_of_a_step_share_is_encoded_once_and_read_by_all_of_them():
    pictures = [sample // 4 for sample in range(16)]  # steps of eight samples have two
    often = packed([10] * 16, [[5.0]] * 16, encoder_ranks=2)
    once = packed([10] * 16, [[5.0]] * 16, pictures, encoder_ranks=2)
    for step, plain in zip(once.steps, often.steps, strict=True):
        encoded = [item for of_rank in step.encoder_batches for batch in of_rank for item in batch.tolist()]
        assert len({pictures[item] for item in encoded}) == len(encoded) == 2
        assert sum(len(batch) for of_rank in plain.encoder_batches for batch in of_rank) == 8
        assert {pictures[item] == pictures[source] for item, source in step.encoded_as.items()} == {True}
        assert sorted([*encoded, *step.encoded_as]) == step.samples.tolist()


def test_media_items_whose_content_is_not_known_are_each_encoded():
    plan = packed([10] * 8, [[5.0]] * 8, [-1] * 8)
    assert sum(len(batch) for of_rank in plan.steps[0].encoder_batches for batch in of_rank) == 8


def test_a_step_of_samples_takes_them_in_order():
    plan = packed([10] * 20)
    assert [step.samples.tolist() for step in plan.steps] == [list(range(8)), list(range(8, 16))]
    assert plan.left.tolist() == [16, 17, 18, 19]


@pytest.mark.parametrize(
    ("tokens", "media", "changes", "words"),
    [
        ([5, 0], None, {}, "Sample 1 has 0 tokens; every sample needs at least 1"),
        ([5, 101], None, {}, "Sample 1 has 101 tokens, more than the token budget of 100"),
        ([5], [[float("nan")]], {}, "The cost of media item 0 is nan"),
        ([5], None, {"ranks": 0}, "ranks is 0; it must be at least 1"),
        ([5], None, {"sync_every": "never"}, "sync_every is 'never'; choose 'microbatch' or 'step'"),
        ([5], None, {"global_batch_size": None}, "microbatches is None and global_batch_size is None; .* set one of"),
        (
            [5],
            None,
            {"microbatches": 2, "global_batch_size": 8},
            "is 2 and global_batch_size is 8; .* set one",
        ),
        ([5], None, {"microbatches": 2, "balance_group": 3}, "choose a balance_group that divides 4"),
    ],
)
def test_what_cannot_be_packed_is_refused(tokens, media, changes, words):
    with pytest.raises(PackingError, match=words):
        packed(tokens, media, **changes)
