"""The loader's steps: an epoch's worth, in order, with a look ahead, the same with workers and without."""

import gc
import threading

import pytest
import torch

from flowtrain_lightning.data import RankShard
from tests.data.support import TOKEN_STEPS, WORKERS, data_module, read


@WORKERS
def test_an_epoch_has_the_steps_that_the_length_promises(loader_of, workers):
    loader = loader_of(num_workers=workers)
    batches = read(loader)
    assert len(loader) == len(batches) == 5
    assert [step for _, step, _ in batches] == [0, 1, 2, 3, 4]
    assert sorted(sample for *_, samples in batches for sample in samples) == list(range(20))
    assert batches != read(loader, epoch=1)
    assert batches == read(loader, epoch=0)


def test_an_iterator_reads_the_epoch_that_is_set_when_its_first_batch_is_asked_for(loader_of):
    loader = loader_of()
    iterator = iter(loader)
    loader.sampler.set_epoch(2)
    assert next(iterator).epoch == 2


@WORKERS
def test_steps_of_microbatches_are_the_same_with_workers_and_without(loader_of, workers):
    loader = loader_of(num_workers=workers, token_steps=TOKEN_STEPS)
    epochs = [read(loader, epoch) for epoch in (0, 1, 0)]
    assert [len(epoch) for epoch in epochs] == [len(loader)] * 3
    assert epochs == [read(loader_of(token_steps=TOKEN_STEPS), epoch) for epoch in (0, 1, 0)]


@WORKERS
def test_what_was_loaded_ahead_does_not_count_as_delivered(loader_of, workers):
    loader = loader_of(num_workers=workers)
    iterator = iter(loader)
    batch = next(iterator)
    ahead = [batch.following(distance) for distance in (1, 3, 2)]
    assert [each.step for each in ahead] == [1, 3, 2]
    assert loader.state_dict()["step"] == 1
    assert next(iterator) is ahead[0]
    assert ahead[0].following(1) is ahead[2]
    assert batch.following(4).step == 4
    assert batch.following(5) is None
    with pytest.raises(LookupError, match="Step 1 was delivered already"):
        batch.following(1)
    assert [each.step for each in iterator] == [2, 3, 4]
    assert batch.following(9) is None


def test_a_batch_does_not_keep_its_loader_busy(loader_of):
    batch = next(iter(loader_of()))
    gc.collect()
    assert batch.following(1) is None


def test_of_two_iterators_the_later_one_is_in_use(loader_of):
    loader = loader_of(num_workers=1)
    first = iter(loader)
    next(first)
    second = iter(loader)
    assert next(second).step == 0
    with pytest.raises(RuntimeError, match="ended when another one"):
        next(first)
    assert [batch.step for batch in second] == [1, 2, 3, 4]


@WORKERS
def test_an_epoch_may_be_left_early(loader_of, workers):
    loader = loader_of(num_workers=workers)
    read(loader, epoch=0, count=2)
    assert read(loader, epoch=1) == read(loader_of(), epoch=1)


@WORKERS
def test_every_batch_is_prepared_while_the_one_before_runs_in_the_thread_that_loads(file, workers):
    prepared = []

    def prepare(batch):
        prepared.append((batch.step, threading.current_thread().name))
        return f"program of step {batch.step}"

    data = data_module(file, shard=RankShard.plain(0, 1), num_workers=workers)
    data.trainer.strategy.prepare_step = prepare
    iterator = iter(data.train_dataloader())
    first = next(iterator)
    second = first.following(1)
    assert (first.program, second.program) == ("program of step 0", "program of step 1")
    assert next(iterator) is second
    assert [batch.program for batch in iterator] == ["program of step 2", "program of step 3"]
    assert [step for step, _ in prepared] == [0, 1, 2, 3]
    assert all(thread.startswith("load the next step") for _, thread in prepared)
    data.teardown()


def test_an_error_of_preparing_is_raised_where_the_batch_is_asked_for(file):
    data = data_module(file, shard=RankShard.plain(0, 1))
    data.trainer.strategy.prepare_step = lambda batch: 1 // batch.step
    with pytest.raises(ZeroDivisionError):
        next(iter(data.train_dataloader()))


def test_without_a_strategy_that_prepares_steps_batches_have_no_program(loader_of):
    assert next(iter(loader_of())).program is None


@WORKERS
def test_loading_leaves_the_random_stream_of_the_model_alone(loader_of, workers):
    loader = loader_of(num_workers=workers)
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    read(loader)
    assert torch.rand(1) == expected
