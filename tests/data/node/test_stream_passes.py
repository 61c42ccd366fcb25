"""A stream is read once for all who begin it alike, each at its own pace; who comes too late reads it anew."""

import pytest

from flowtrain_lightning.data import IndexConfig
from flowtrain_lightning.data.node import stream_passes
from flowtrain_lightning.data.node.stream_passes import StreamPasses
from flowtrain_lightning.data.sources.stream_of_samples import StreamPosition
from flowtrain_lightning.data.sources.stream_source import StreamSource
from tests.data.node_ranks import Rows
from tests.data.support import MEASURE, message_record, write_image

ROWS = [message_record(number, "ask", "a" * (1 + number % 9), []) for number in range(150)]
START = StreamPosition()


@pytest.fixture
def counted(tmp_path):
    return tmp_path / "counted"


def passes_of(counted, rows=ROWS, readers=2):
    return StreamPasses(StreamSource(Rows(rows, counted), MEASURE, 64, IndexConfig()), readers)


def named(passes, reader, samples):
    return [record.id for record in passes.answer(reader, "records", (samples,))]


def test_samples_are_kept_until_all_have_let_go_of_them(counted):
    passes = passes_of(counted)
    passes.answer(0, "begin", (0, START))
    assert named(passes, 0, [0, 149]) == ["r0", "r149"]
    passes.answer(0, "forget", (100,))
    passes.answer(1, "begin", (0, START))
    assert named(passes, 1, [0, 99]) == ["r0", "r99"]
    passes.answer(1, "forget", (40,))
    with pytest.raises(LookupError, match="window of the stream begins at 40"):
        named(passes, 0, [39])
    passes.leave(1)
    with pytest.raises(LookupError, match="window of the stream begins at 100"):
        named(passes, 0, [99])
    assert counted.stat().st_size == 150


def test_who_begins_again_reads_again_and_others_go_on(counted):
    passes = passes_of(counted)
    for reader in (0, 1):
        passes.answer(reader, "begin", (0, START))
        assert named(passes, reader, [3]) == ["r3"]
    passes.answer(0, "begin", (0, START))
    passes.answer(0, "forget", (5,))
    assert named(passes, 0, [5]) == ["r5"]
    passes.answer(1, "begin", (0, START))  # of the second pass, too, it finds all
    assert named(passes, 1, [0]) == ["r0"]


def test_passes_of_two_epochs_at_once_have_each_its_own_order(counted):
    passes = passes_of(counted)
    passes.answer(0, "begin", (0, START))
    passes.answer(1, "begin", (0, START))
    assert named(passes, 0, [0]) == ["r0"]
    passes.answer(1, "begin", (7, START))
    assert named(passes, 1, [0, 1]) == ["r7", "r8"]
    assert named(passes, 0, [1, 70, 130]) == ["r1", "r70", "r130"]
    assert named(passes, 1, [100]) == ["r107"]


def test_who_comes_after_much_was_read_reads_for_itself(counted, tmp_path, monkeypatch):
    content = (tmp_path / write_image(tmp_path / "images/0.png", 4, 8)).read_bytes()
    monkeypatch.setattr(stream_passes, "KEPT_BYTES", 10 * len(content))
    rows = [{**message_record(n, "", "", [""]), "images": [{"bytes": content}]} for n in range(20)]
    passes = passes_of(counted, rows)
    passes.answer(0, "begin", (0, START))
    assert named(passes, 0, [12]) == ["r12"]
    passes.answer(0, "forget", (12,))
    passes.answer(1, "begin", (0, START))
    assert named(passes, 1, [0]) == ["r0"]
    assert counted.stat().st_size > 20
