"""A stream is read in order within a window; its steps are the same wherever they are taken up again."""

import time

import pytest

from flowtrain_lightning.data import DataError, IndexConfig, TokenSteps
from flowtrain_lightning.data.sources import opening, slow_reading, stream_source
from flowtrain_lightning.data.sources.stream_of_samples import StreamPosition
from flowtrain_lightning.data.sources.stream_source import StreamSource
from tests.data.sources.test_resuming import Lines
from tests.data.support import MEASURE, TOKEN_STEPS, data_module, message_record, trained, write_image

ROWS = [message_record(number, "ask", "a" * (1 + number % 9), []) for number in range(150)]


class Counted(Lines):
    """Counts the rows that were read."""

    read = 0

    def __iter__(self):
        for row in super().__iter__():
            self.read += 1
            yield row


def source_of(rows, budget=64, too_long="error"):
    source = StreamSource(Lines(rows), MEASURE, budget, IndexConfig(too_long))
    source.begin(0, StreamPosition())
    return source


def test_samples_of_a_stream_are_its_rows_by_their_place():
    source = source_of(ROWS)
    assert source.lengths(3, 6).tolist() == [12, 13, 14]
    assert source.record(140).id == "r140"
    assert source.sizes(source.lengths(0, 2) * 0).tokens.tolist() == [9, 9]
    assert len(source.lengths(148, 200)) == 2
    assert len(source.lengths(150, 200)) == 0


def test_rows_that_hold_many_bytes_are_read_a_few_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(stream_source, "BYTES_AT_ONCE", 150)
    content = (tmp_path / write_image(tmp_path / "images/0.png", 4, 8)).read_bytes()
    assert 75 < len(content) < 300
    rows = Counted(
        [{**row, "images": [{"bytes": content}]} for row in (message_record(n, "", "", [""]) for n in range(9))]
    )
    source = StreamSource(rows, MEASURE, 64, IndexConfig())
    source.begin(0, StreamPosition())
    assert source.record(0).id == "r0"
    assert rows.read <= 2
    assert [source.record(sample).id for sample in range(9)] == [f"r{number}" for number in range(9)]
    assert len(source.lengths(0, 20)) == 9


def test_samples_that_are_forgotten_are_not_read_again():
    source = source_of(ROWS)
    source.record(20)
    source.forget(10)
    assert source.record(10).id == "r10"
    with pytest.raises(LookupError, match="Sample 9 is over"):
        source.record(9)


def test_a_stream_goes_on_from_a_position_although_rows_were_dropped_before_it():
    whole = source_of(ROWS, budget=13, too_long="drop")
    assert [whole.record(sample).id for sample in (4, 5, 6)] == ["r4", "r9", "r10"]
    position = whole.position(5)
    assert position == StreamPosition(5, 9)
    whole.begin(0, position)
    assert [whole.record(sample).id for sample in (5, 6)] == ["r9", "r10"]


def test_long_samples_of_a_stream_are_cut_or_named():
    assert source_of(ROWS, budget=13, too_long="truncate").lengths(0, 9).tolist() == [9, 10, 11, 12, 13, 13, 13, 13, 13]
    with pytest.raises(
        DataError, match=r"stream Lines, record 6 \(id 'r5'\): it has 14 tokens, more than token_budget=13"
    ):
        source_of(ROWS, budget=13).lengths(0, 9)


class Failing(Lines):
    """Gives no row from the fourth one on, and waits for each."""

    def __iter__(self):
        for number, row in enumerate(super().__iter__()):
            time.sleep(0.05)
            if number == 3:
                raise OSError("the bucket is gone")
            yield row


def test_a_stream_that_is_slow_or_fails_is_named_with_the_row(monkeypatch, caplog):
    monkeypatch.setattr(slow_reading, "SLOW_SECONDS", 0.01)
    source = StreamSource(Failing(ROWS), MEASURE, 64, IndexConfig())
    source.begin(0, StreamPosition())
    with pytest.raises(DataError, match=r"stream Failing: its row 4 cannot be read: OSError\('the bucket is gone'\)"):
        source.lengths(0, 3)
    assert "stream Failing has not given its row 1 within 0.01 s" in caplog.text


def test_what_cannot_be_a_stream_is_refused(monkeypatch):
    monkeypatch.setattr(opening, "can_read_for_others", lambda: False)
    with pytest.raises(DataError, match="generator can be read only once"):
        StreamSource((row for row in ROWS), MEASURE, 64, IndexConfig())
    for changes, words in (
        (
            {"num_workers": 1},
            "train is a stream, but num_workers=1: one process can read it for .* on Linux only",
        ),
        ({}, "train has a stream beside other data; mix streams by datasets.interleave_datasets"),
    ):
        given = Lines(ROWS) if changes else [Lines(ROWS), Lines(ROWS)]
        with pytest.raises(DataError, match=words):
            data_module(given, **changes).setup("fit")


@pytest.mark.parametrize("token_steps", [None, TOKEN_STEPS])
def test_at_the_end_of_a_stream_it_is_told_what_was_left_out(tmp_path, caplog, token_steps):
    rows = [*ROWS[:18], message_record(18, "ask", "a" * 99, []), message_record(19, "ask", "a", ["images/none.png"])]
    data = data_module(Lines(rows), too_long="drop", unreadable="drop", token_steps=token_steps)
    with caplog.at_level("INFO"), pytest.warns(UserWarning, match=r"record \d+ .*: dropped .* told at the end"):
        steps = trained(tmp_path, data, max_epochs=1, num_sanity_val_steps=0)
    (told,) = (record.message for record in caplog.records if "rows read" in record.message)
    left = 18 - sum(len(samples) for _, _, samples in steps)
    assert told.startswith("stream Lines: 20 rows read, 18 of them used, 1 dropped ")
    assert "1 dropped as longer than token_budget=64" in told
    assert "1 dropped for a media item that cannot be used" in told
    assert f"; {len(steps)} step{'' if len(steps) == 1 else 's'} of " in told
    assert f"{left} sample{'' if left == 1 else 's'} left out at the end of epoch 0." in told


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"global_batch_size": 200}, "150 rows read, 150 of them used. These are too few for one step of global_batch"),
        ({"token_steps": TokenSteps(microbatches=200)}, "too few for one step of microbatches=200 of token_budget=64"),
    ],
)
def test_a_stream_that_is_too_short_for_one_step_is_refused(tmp_path, changes, words):
    with pytest.raises(DataError, match=words):
        trained(tmp_path, data_module(Lines(ROWS), **changes), max_epochs=1)
