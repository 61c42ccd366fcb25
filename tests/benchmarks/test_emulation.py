"""Emulated computing takes the time it says, and notices what was changed on the way."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch

from benchmarks.emulated_records import emulated_data, write_records
from benchmarks.emulation import (
    Clock,
    EmulatedCost,
    EmulatedVLM,
    bear,
    check,
    numbers_of,
    pattern,
)
from tests.packing.sizes import meeting_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("data")
    write_records(path, 12)
    return path


@pytest.fixture(scope="module")
def batch(folder):
    data = emulated_data(folder, global_batch_size=12, token_budget=8192)
    data.setup("fit")
    return data.train_dataloader().steps.load(0, 0)


@pytest.fixture
def module(folder):
    module = EmulatedVLM(EmulatedCost(1e-9, 1e-9), str(folder / "pictures.json"))
    module.configure_model()
    return module


def test_features_and_gradients_pass_their_checks_where_nothing_changes_them(module, batch):
    features = module.encode(batch.media["encoder"][0])
    leaf = features.detach().requires_grad_()
    loss, _ = module.backbone_step(batch.microbatches[0], {"image": leaf}, "train")
    loss.backward()
    features.backward(leaf.grad)
    assert module.encoder.weight.grad is not None


def test_features_with_one_changed_number_are_refused(module, batch):
    features = module.encode(batch.media["encoder"][0]).detach()
    features[5, 7] += 1
    with pytest.raises(RuntimeError, match="features of"):
        module.backbone_step(batch.microbatches[0], {"image": features}, "train")


def test_gradients_in_another_order_are_refused(module, batch):
    features = module.encode(batch.media["encoder"][0])
    media = batch.media["encoder"][0]
    gradients = bear(pattern(numbers_of(media), torch.tensor(media.rows), 2))
    with pytest.raises(RuntimeError, match="gradients of"):
        features.backward(gradients.flip(0))


def test_one_picture_that_nobody_reads_may_have_no_gradient(folder, module):
    data = emulated_data(folder, global_batch_size=12, token_budget=8192)
    data.setup("fit")
    steps = data.train_dataloader().steps
    members = replace(steps.shard.members, meets={"encoder": meeting_of(2)})
    padding = replace(steps, shard=replace(steps.shard, members=members)).load(0, 0).padding_media["encoder"]
    features = module.encode(padding)
    features.backward(torch.zeros_like(features))
    with pytest.raises(RuntimeError, match="gradients of"):
        module.encode(padding).backward(torch.ones_like(features))


def test_a_picture_says_its_number_by_its_colour(folder, batch, module):
    media = batch.media["encoder"][0]
    samples = batch.microbatches[0].samples
    expected = [picture for sample in samples for picture in module.pictures[sample]]
    assert sorted(zip(numbers_of(media).tolist(), media.rows, strict=True)) == sorted(map(tuple, expected))


def test_what_one_spell_takes_too_long_is_taken_off_the_next():
    clock = Clock()
    start = time.monotonic()
    clock.spend(start, 0.01)
    time.sleep(0.3)
    clock.spend(start, 0.02)  # it began in the past: 280 ms and more are owed
    clock.spend(time.monotonic(), 0.5)
    assert time.monotonic() - start == pytest.approx(0.01 + 0.02 + 0.5, abs=0.2)


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_a_pattern_that_fits_passes(rows):
    check(bear(torch.arange(rows)), torch.arange(rows), "features")
