"""Steps where nothing is said of them: of microbatches in training, of as many samples as fill these elsewhere."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from flowtrain_lightning.data import RankShard, TokenSteps
from flowtrain_lightning.data.steps.token_stream import TokenStream
from tests.data.sources.test_resuming import Lines
from tests.data.support import data_module, message_record, read, trained, write_set

UNSAID = {"global_batch_size": None}


def test_training_fills_microbatches_and_every_sample_is_validated(file, tmp_path):
    data = data_module(file, val=write_set(tmp_path / "val" / "v.jsonl", 7), **UNSAID)
    data.setup("fit")
    steps = data.train_dataloader().steps.sampling
    assert isinstance(steps, TokenStream)
    plan = data.train_dataloader().steps.plan(0, 0)
    filled = plan.sizes.tokens.sum() / (64 * steps.microbatches)
    assert steps.microbatches == len(plan.microbatches[0])
    assert 0.8 < filled <= 1
    validated = [sample for batch in data.val_dataloader() for sample in batch.plan.samples.tolist()]
    assert validated == list(range(7))


def test_validation_takes_as_many_samples_as_fill_the_microbatches_of_training(file):
    data = data_module(file, val=file, token_steps=TokenSteps(2), **UNSAID)
    sizes = [len(batch.plan.samples) for batch in data.val_dataloader()]
    tokens = data.val_dataloader().steps.samples.source.sizes(np.arange(18)).tokens
    assert sizes[0] == round(0.986 * 2 * 64 / tokens.mean())
    assert len(set(sizes[:-1])) == 1
    assert sum(sizes) == 18


def test_records_that_fill_no_microbatch_train_in_four_steps_an_epoch(file):
    steps = list(data_module(file, token_budget=8192, **UNSAID).train_dataloader())
    assert [len(batch.plan.samples) for batch in steps] == [4] * 4


def test_a_number_of_samples_that_is_given_is_that_of_every_step(file):
    assert {len(batch.plan.samples) for batch in data_module(file, global_batch_size=3).train_dataloader()} == {3}


def test_streams_need_no_size_of_a_step_either(tmp_path):
    rows = [message_record(number, "ask", "a" * (1 + number % 9), []) for number in range(400)]
    data = data_module(Lines(rows), Lines(rows[:25]), **UNSAID)
    steps = trained(tmp_path, data, max_epochs=1, num_sanity_val_steps=0)
    assert len(steps) >= 2
    validated = [sample for batch in data.val_dataloader() for sample in batch.plan.samples.tolist()]
    assert validated == list(range(25))


def test_ranks_without_work_are_warned_of(file):
    with pytest.warns(UserWarning, match="Of 3 backbone ranks some have no work, as a step has microbatches=2"):
        data_module(file, shard=RankShard.plain(0, 3), token_steps=TokenSteps(2)).train_dataloader()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        loader = data_module(file, shard=RankShard.plain(0, 2), token_steps=TokenSteps(2)).train_dataloader()
    assert read(loader, count=1)
