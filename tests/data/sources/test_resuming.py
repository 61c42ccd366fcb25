"""A run that is killed goes on to the sample, from every kind of source and on another number of ranks."""

import os
import signal
from itertools import product

import pytest

from flowtrain_lightning.data import Mixture
from tests.data.sources.test_stores import FORMS, as_dataset, as_parquet
from tests.data.support import TOKEN_STEPS, Recorder, SaveAlways, data_module, quiet_trainer, trained, write_set
from tests.packing.sizes import shard_of

SETTINGS = {"max_epochs": 2, "num_sanity_val_steps": 0}


class Killed(SaveAlways):
    """Kills its process after some steps."""

    def __init__(self, folder, steps):
        super().__init__(folder)
        self.steps = steps

    def on_train_batch_end(self, trainer, *_):
        super().on_train_batch_end(trainer)
        if trainer.global_step == self.steps:
            os.kill(os.getpid(), signal.SIGKILL)


class Lines:
    """An endless way to read lines: as some loader of a user's own does."""

    def __init__(self, rows):
        self.rows = rows
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        turn = self.epoch % len(self.rows)
        yield from (dict(row) for row in self.rows[turn:] + self.rows[:turn])


def stream(file):
    """Rows with images inside, shuffled in a buffer anew each epoch."""
    return as_dataset(file).to_iterable_dataset(num_shards=3).shuffle(seed=5, buffer_size=7)


def tokens(file):
    del file
    return Lines([{"input_ids": [9] * (4 + number % 7), "id": f"t{number}"} for number in range(21)])


def text(file):
    path = file.with_name("text.jsonl")
    path.write_text("".join(f'{{"text": "{"word " * (1 + number % 5)}"}}\n' for number in range(18)))
    return path


def mixture(file):
    return Mixture([file, as_parquet(write_set(file.parent / "small/d.jsonl", 5)), text(file)], temperature=2.0)


SOURCES = FORMS | {"stream": stream, "tokens": tokens, "text": text, "mixture": mixture}


def cases():
    """Every source with steps of samples and with steps of tokens; one of each way to read where time is short."""
    quick = ("json", "tar", "mixture", "stream in token steps")
    for source, steps in product(SOURCES, ("samples", "tokens")):
        name = source if steps == "samples" else f"{source} in token steps"
        yield pytest.param(source, steps, id=name, marks=() if name in quick else pytest.mark.full)


@pytest.mark.parametrize("limit", [{"limit_train_batches": 3}, {"overfit_batches": 2}], ids=str)
def test_a_stream_of_which_only_some_steps_are_taken_goes_on_with_the_next(tmp_path, limit):
    settings = {**SETTINGS, "limit_val_batches": 0, **limit}

    def build():
        return data_module(stream(tmp_path / "d.jsonl"), cache_dir=tmp_path / "index")

    write_set(tmp_path / "d.jsonl", 18)
    whole = trained(tmp_path, build(), callbacks=[SaveAlways(tmp_path)], **settings)
    for done in range(1, len(whole)):
        assert trained(tmp_path, build(), tmp_path / f"batch-{done}.ckpt", **settings) == whole[done:], done


@pytest.mark.parametrize(("source", "steps"), cases())
def test_a_run_that_was_killed_reads_exactly_the_rest_on_other_ranks(tmp_path, source, steps):
    given = SOURCES[source](write_set(tmp_path / "d.jsonl", 18))
    cut = {"token_steps": TOKEN_STEPS} if steps == "tokens" else {}

    def build(**changes):
        return data_module(given, cache_dir=tmp_path / "index", **(cut | changes))

    whole = trained(tmp_path, build(), **SETTINGS)
    assert len({epoch for epoch, _, _ in whole}) == 2
    for done in (3,) if steps == "samples" else (2, len(whole) - 1):
        if (child := os.fork()) == 0:
            try:
                trained(tmp_path, build(), callbacks=[Killed(tmp_path, done)], **SETTINGS)
            finally:
                os._exit(1)  # it was not killed
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        data, model = build(), Recorder()
        trainer = quiet_trainer(tmp_path, **SETTINGS)
        trainer.strategy.rank_shard = shard_of(1, 2, backbone=1)
        trainer.fit(model, data, ckpt_path=tmp_path / f"batch-{done}.ckpt", weights_only=True)
        assert model.trained == whole[done:], done
