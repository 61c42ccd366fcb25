"""One process reads for all ranks of a node: to the same bits as each for itself, and each row and record once."""

import re

import psutil
import pytest

from benchmarks.web import served
from flowtrain_lightning.data import DataError, RankShard
from tests.data.node_ranks import Rows, all_steps, count_bytes, counted_bytes, loaded_by_ranks
from tests.data.ray_runs import are_equal, epoch_of
from tests.data.sources.test_resuming import Lines
from tests.data.sources.test_stores import as_parquet, as_tar
from tests.data.support import TOKEN_STEPS, data_module, message_record, read, write_set

ROWS = [message_record(number, "ask", "a" * (1 + number % 9), []) for number in range(150)]
MANY = pytest.mark.parametrize(
    "ranks", [2, pytest.param(4, marks=pytest.mark.full), pytest.param(8, marks=pytest.mark.full)]
)


def alone(given, ranks, rank, **changes):
    """Steps as a rank loads them for itself."""
    data = data_module(given, shard=RankShard.plain(rank, ranks), **changes)
    data.setup("fit")
    return all_steps(data.train_dataloader())


@MANY
@pytest.mark.parametrize("form", [as_tar, as_parquet])
def test_records_are_read_once_for_all_ranks_of_a_node(tmp_path, monkeypatch, form, ranks):
    given, counted = form(write_set(tmp_path / "d.jsonl", 40)), tmp_path / "counted"
    data_module(given, global_batch_size=8).setup("fit")  # which measures it
    count_bytes(monkeypatch, counted)
    data_module(given, global_batch_size=8).setup("fit")
    assert counted_bytes(counted) == 0, "its index says all that planning needs"
    alone(given, 1, 0, global_batch_size=8)
    of_one_rank = counted_bytes(counted)
    found = loaded_by_ranks(
        tmp_path / "ranks",
        ranks,
        lambda: data_module(given, global_batch_size=8),
        lambda data, rank: all_steps(data.train_dataloader()),
    )
    of_all = counted_bytes(counted)
    assert 0 < of_all == of_one_rank
    for rank, theirs in enumerate(found):
        assert are_equal(alone(given, ranks, rank, global_batch_size=8), theirs)


@MANY
@pytest.mark.parametrize("form", [lambda file: file, as_tar, as_parquet], ids=["json", "tar", "parquet"])
def test_as_many_bytes_of_an_address_are_read_for_many_ranks_as_for_one(tmp_path, form, ranks):
    file, sent = form(write_set(tmp_path / "d.jsonl", 40)), []
    with served(tmp_path, sent) as address:
        given = f"{address}/{file.name}"
        data_module(given, global_batch_size=8).setup("fit")  # which measures it
        of_some = []
        for readers in (1, ranks):
            sent.clear()
            found = loaded_by_ranks(
                tmp_path / f"of {readers}",
                readers,
                lambda: data_module(given, global_batch_size=8),
                lambda data, rank: all_steps(data.train_dataloader()),
            )
            of_some.append(sum(sent))
        for rank, theirs in enumerate(found):
            assert are_equal(alone(given, ranks, rank, global_batch_size=8), theirs)
    assert of_some[0] == of_some[1]
    if form is as_tar:  # of Parquet groups are read from their beginning, and JSON names pictures beside it
        assert of_some[0] <= 2 * file.stat().st_size, "in two epochs, each record alone"


@MANY
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_is_read_once_for_all_ranks_and_workers_of_a_node(tmp_path, ranks, workers):
    changes = {"token_steps": TOKEN_STEPS}
    found = loaded_by_ranks(
        tmp_path / "ranks",
        ranks,
        lambda: data_module(Rows(ROWS, tmp_path / "counted"), num_workers=workers, **changes),
        lambda data, rank: all_steps(data.train_dataloader()),
    )
    for rank, theirs in enumerate(found):
        assert are_equal(alone(Lines(ROWS), ranks, rank, **changes), theirs)
    assert (tmp_path / "counted").stat().st_size == 2 * len(ROWS)


@pytest.mark.parametrize("steps", [None, TOKEN_STEPS])
def test_a_stream_that_workers_load_goes_on_where_it_was_left(steps):
    whole = alone(Lines(ROWS), 1, 0, token_steps=steps)
    data, others = data_module(Lines(ROWS), num_workers=2, token_steps=steps), set(psutil.Process().children())
    data.setup("fit")
    loader, (reader,) = data.train_dataloader(), set(psutil.Process().children()) - others
    read(loader, epoch=1, count=6)
    state = data.state_dict()
    data.teardown()
    assert not reader.is_running()
    resumed = data_module(Lines(ROWS), num_workers=2, token_steps=steps)
    resumed.setup("fit")
    resumed.load_state_dict(state)
    step = state["train"]["step"]
    expected = [batch for batch in whole if batch.epoch == 1][step:]
    assert step == 5  # of a stream the next step is asked for before one was trained on
    assert are_equal(expected, epoch_of(resumed.train_dataloader(), 1))
    resumed.teardown()


def test_a_reader_that_dies_ends_every_rank_with_its_name(tmp_path):
    def read_on(data, rank):
        steps = epoch_of(data.train_dataloader(), 0)
        next(steps)
        data.trainer.strategy.barrier("both have begun")
        if rank == 0:
            (reader,) = psutil.Process().children()
            reader.kill()
            reader.wait(10)
        data.trainer.strategy.barrier("it is dead")
        return list(steps)

    found = loaded_by_ranks(tmp_path / "ranks", 2, lambda: data_module(Lines(ROWS)), read_on)
    for error in found:
        assert isinstance(error, DataError)
        assert re.match(r"The process that reads stream Lines for the ranks of this node has ended", str(error))


class Failing(Lines):
    """Gives no row from the fortieth one on."""

    def __iter__(self):
        for number, row in enumerate(super().__iter__()):
            if number == 40:
                raise OSError("the bucket is gone")
            yield row


def test_a_stream_that_fails_is_named_in_every_rank(tmp_path):
    found = loaded_by_ranks(
        tmp_path / "ranks",
        2,
        lambda: data_module(Failing(ROWS)),
        lambda data, rank: all_steps(data.train_dataloader()),
    )
    for error in found:
        assert isinstance(error, DataError)
        assert "stream Failing: its row 41 cannot be read: OSError('the bucket is gone')" in str(error)


@pytest.mark.parametrize("form", [lambda file: file, as_tar, as_parquet], ids=["json", "tar", "parquet"])
def test_files_at_addresses_of_the_web_are_read_by_processes_that_are_forked(tmp_path, form):
    file = form(write_set(tmp_path / "d.jsonl", 12))
    with served(tmp_path) as address:
        given = f"{address}/{file.name}"
        helped = data_module(given, num_workers=2)
        helped.setup("fit")
        try:
            assert are_equal(all_steps(helped.train_dataloader()), alone(given, 1, 0))
        finally:
            helped.teardown("fit")
