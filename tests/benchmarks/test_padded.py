"""The padded peer computes the same as the packed module: what differs in the benchmark is padding alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks.modules import Work, packed_module
from benchmarks.padded import PaddedDataset, PaddedVLM, RankSampler, pad
from flowtrain_lightning.data import ImageProcessor
from flowtrain_lightning.data.loading.sample_loader import SampleLoader
from tests.tiny import write_records


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_records(folder, 24)
    data = Work(folder / "train.jsonl", folder / "index", global_batch_size=8).data()
    data.setup("fit")
    return data.train_dataloader().steps


def test_padded_batches_give_the_loss_and_the_gradients_of_packed_ones(steps):
    packed, padded = packed_module("tiny"), PaddedVLM("tiny")
    packed.configure_model()
    padded.load_state_dict(packed.state_dict())
    batch = steps.load(0, 0)
    microbatch, media = batch.microbatches[0], batch.media["encoder"][0]
    loss, tokens = packed.loss(packed.backbone(**packed.merge(microbatch, {"image": packed.encode(media)})), microbatch)
    loss.backward()
    dataset = PaddedDataset(steps.samples)
    padded_loss, padded_tokens = padded.summed_loss(pad([dataset[sample] for sample in microbatch.samples]))
    padded_loss.backward()
    assert padded_tokens == tokens
    torch.testing.assert_close(padded_loss, loss)
    for (name, expected), found in zip(packed.named_parameters(), padded.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, msg=lambda text, name=name: f"{name}: {text}")


def test_ranks_share_the_samples_of_each_step(steps):
    halves = [list(RankSampler(steps.sampling, rank, 2)) for rank in range(2)]
    for step in range(steps.sampling.steps):
        together = [sample for half in halves for sample in half[4 * step : 4 * step + 4]]
        assert sorted(together) == sorted(steps.sampling.step(0, step).tolist())


def test_samples_are_read_as_the_packed_variants_read_them(steps):
    assert isinstance(steps.samples, SampleLoader)
    assert isinstance(steps.samples.images, ImageProcessor)
    sample = int(np.flatnonzero(np.diff(steps.samples.source.sizes(np.arange(20)).media_start))[0])
    read = PaddedDataset(steps.samples)[sample]
    rows = sum(count for _, _, count in read["pictures"])
    assert int(read["is_media"].sum()) == rows > 0
