"""A step travels from a worker to its rank unchanged, in one block."""

import pickle

import numpy as np
import torch

from flowtrain_lightning.data import PackedBatch, PackedMedia, RankShard, StepBatch
from flowtrain_lightning.data.parcel import SharedMemoryBatch
from flowtrain_lightning.packing import SampleSizes
from flowtrain_lightning.packing.step_planner import plan_step


def batch_of_one_step():
    one = np.array([3])
    sizes = SampleSizes(one, one, np.array([0, 1]), one, one)
    plan = plan_step(sizes, np.array([5]), backbone_ranks=1, encoder_ranks=1, token_budget=9)
    numbers = torch.arange(3)
    packed = PackedBatch(numbers, -numbers, numbers, numbers.int(), 3, {"image": numbers[1:]}, (5,))
    media = PackedMedia("image", torch.rand(5, 3), torch.tensor([0, 5], dtype=torch.int32), numbers[None], 5, (1,))
    return StepBatch(plan, RankShard.plain(0, 1), (packed, None), (media, None), epoch=2, step=4)


def test_a_parcel_brings_the_batch_unchanged():
    batch = batch_of_one_step()
    opened = pickle.loads(pickle.dumps(SharedMemoryBatch.of(batch))).open()
    (packed, nothing), (media, none) = opened.microbatches, opened.encoder_batches
    assert nothing is none is None
    assert (opened.epoch, opened.step, opened.part) == (2, 4, batch.part)
    assert opened.plan.samples.tolist() == [5]
    assert opened.following(1) is None
    for name in ("tokens", "labels", "position_ids", "cu_seqlens"):
        assert torch.equal(getattr(packed, name), getattr(batch.microbatches[0], name))
        assert getattr(packed, name).dtype == getattr(batch.microbatches[0], name).dtype
    assert torch.equal(packed.media_positions["image"], batch.microbatches[0].media_positions["image"])
    assert torch.equal(media.patches, batch.encoder_batches[0].patches)
    assert (packed.samples, packed.max_seqlen, media.rows) == ((5,), 3, (1,))


def test_all_tensors_travel_in_one_block():
    opened = SharedMemoryBatch.of(batch_of_one_step()).open()
    packed, media = opened.microbatches[0], opened.encoder_batches[0]
    storages = {tensor.untyped_storage().data_ptr() for tensor in (packed.tokens, packed.labels, media.patches)}
    assert len(storages) == 1
    assert media.patches.data_ptr() % 64 == packed.labels.data_ptr() % 64
