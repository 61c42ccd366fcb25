"""Videos are found beside a record in a tar shard, and in every form in which a table holds them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flowtrain_lightning.data import DataError, Record, TarShard
from flowtrain_lightning.data.media.media_files import EncodedMedia
from flowtrain_lightning.data.sources.measurers import measure_store, this_process
from flowtrain_lightning.data.sources.naming import open_stores
from flowtrain_lightning.data.sources.record_store import locations_of
from tests.data.shards import write_tar
from tests.data.support import MEASURE


def asked(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}, {"role": "assistant", "content": "This."}]


def in_shard(folder: Path, fields: Any, *endings: str) -> Record:
    """A record whose shard has beside it files of these endings, each with its ending as content."""
    members = {"a.json": json.dumps(fields).encode()} | {f"a.{ending}": ending.encode() for ending in endings}
    store = TarShard(write_tar(folder / "d.tar", members))
    (record,) = store.records(0, locations_of(store))
    return record


def contents(record: Record) -> list[bytes]:
    """Of the record's videos."""
    assert all(isinstance(video.file, EncodedMedia) for video in record.videos)
    return [video.file.content for video in record.videos]


def test_a_video_beside_a_text_in_a_shard_is_what_the_text_is_about(tmp_path):
    store = TarShard(write_tar(tmp_path / "d.tar", {"a.mp4": b"video", "a.png": b"image", "a.txt": b"A cat."}))
    (record,) = store.records(0, locations_of(store))
    assert [(turn.role, turn.text) for turn in record.turns] == [("user", "<image><video>"), ("assistant", "A cat.")]
    assert contents(record) == [b"video"]
    assert str(record.videos[0]) == "a.mp4"


@pytest.mark.parametrize(
    "ending", ["asf", "avi", "flv", "m4v", "mkv", "MOV", "mp4", "mpeg", "mpg", "ogv", "webm", "wmv"]
)
def test_videos_beside_a_record_that_names_none_are_taken_in_order(tmp_path, ending):
    fields = {"messages": asked("<video>Then<video>?")}
    endings = [f"{number}.{ending}" for number in range(2)]
    assert contents(in_shard(tmp_path, fields, *endings)) == [ending.encode() for ending in endings]


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": asked("<video><video>"), "videos": ["1.mp4", "a.0.mp4"]},
        {"conversations": [{"from": "human", "value": "<video><video>"}], "video": ["1.mp4", {"path": "0.mp4"}]},
        {
            "messages": [
                {"role": "user", "content": [{"type": "video", "video": "1.mp4"}, {"type": "video", "path": "0.mp4"}]}
            ]
        },
    ],
)
def test_a_record_in_a_shard_names_its_videos_in_every_form(tmp_path, fields):
    assert contents(in_shard(tmp_path, fields, "0.mp4", "1.mp4")) == [b"1.mp4", b"0.mp4"]


def test_a_record_in_a_shard_may_name_a_video_of_any_ending(tmp_path):
    assert contents(in_shard(tmp_path, {"messages": asked("<video>"), "videos": ["ts"]}, "ts")) == [b"ts"]
    for name in ("other.mp4", "json"):
        with pytest.raises(DataError, match=rf"d\.tar, record 1 \(a\): '{name}', which it names, is not in the shard"):
            in_shard(tmp_path, {"messages": asked("<video>"), "videos": [name]}, "mp4")


def test_a_table_holds_videos_as_bytes_or_names_them(tmp_path):
    pytest.importorskip("pyarrow")
    import pyarrow.parquet

    both = {"bytes": b"video", "path": "a.mp4"}
    columns: dict[str, list[Any]] = {
        "video": [b"video", both, {"bytes": b"video", "path": None}, {"bytes": b"", "path": "a.mp4"}],
        "videos": [[b"video"], [both], [{"bytes": b"video"}], [{"bytes": b"", "path": "a.mp4"}]],
    }
    for column, values in columns.items():
        for value, content in zip(values, [b"video", b"video", b"video", b""], strict=True):
            table = pyarrow.Table.from_pylist([{column: value, "messages": asked("<video>"), "images": None}])
            pyarrow.parquet.write_table(table, tmp_path / "d.parquet")
            (store,) = open_stores(tmp_path / "d.parquet")
            (record,) = store.records(0, locations_of(store))
            assert contents(record) == [content]
    named = [{"video": {"bytes": None, "path": "a.mp4"}, "messages": asked("<video>")}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(named), tmp_path / "d.parquet")
    (store,) = open_stores(tmp_path / "d.parquet")
    assert store.records(0, locations_of(store))[0].videos[0].file == tmp_path / "a.mp4"


class Counted(TarShard):
    """Writes down how many records are read at once."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.at_once: list[int] = []

    def records(self, first: int, locations: Any) -> list[Record]:
        self.at_once.append(len(locations))
        return super().records(first, locations)


@pytest.mark.parametrize(("mebibytes", "at_once"), [(0, [3]), (30, [2, 1]), (70, [1, 1, 1])])
def test_few_large_records_are_measured_at_once(tmp_path, mebibytes, at_once):
    members = {}
    for name in "abc":
        members |= {f"{name}.txt": b"text", f"{name}.other": bytes(mebibytes << 20)}
    store = Counted(write_tar(tmp_path / "d.tar", members))
    measured = measure_store(store, locations_of(store), MEASURE, this_process, lambda count: None)
    assert store.at_once == at_once
    assert len(measured.usable) == 3


def test_every_store_says_about_how_long_its_records_are(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = [{"text": "t", "video": bytes(1000 * number)} for number in range(1, 5)]
    (tmp_path / "d.jsonl").write_text('{"text": "a"}\n' * 4)
    members = {f"{number}.{ending}": content for number in range(4) for ending, content in (("txt", b"t"), ("b", b"1"))}
    dataset = datasets.Dataset.from_list(rows)
    dataset.to_parquet(tmp_path / "d.parquet", batch_size=2)
    for given, least in (
        (tmp_path / "d.jsonl", 4 * 14),
        (write_tar(tmp_path / "d.tar", members), 4 * 2048),
        (tmp_path / "d.parquet", 10_000 // 10),
        (dataset, 10_000),
    ):
        (store,) = open_stores(given)
        lengths = store.lengths(locations_of(store))
        assert len(lengths) == 4
        assert lengths.sum() >= least
