"""Of a file at an address only what is read is asked for."""

from __future__ import annotations

import io
import os

import pyarrow
import pyarrow.parquet

from benchmarks.web import served
from flowtrain_lightning.data import ParquetFile
from flowtrain_lightning.data.data_path import data_path
from flowtrain_lightning.data.sources.parts_of_file import PartsOfFile
from flowtrain_lightning.data.sources.record_store import locations_of


def test_it_reads_as_a_local_file_does(tmp_path):
    (tmp_path / "f").write_bytes(bytes(range(100)))
    with served(tmp_path) as address:
        parts, whole = PartsOfFile(data_path(f"{address}/f"), 100), io.BytesIO(bytes(range(100)))
        for file in (parts, whole):
            file.seek(-10, os.SEEK_END)
        assert parts.read(4) == whole.read(4)
        assert parts.tell() == whole.tell() == 94
        assert parts.seek(2, os.SEEK_CUR) == whole.seek(2, os.SEEK_CUR)
        assert parts.read() == whole.read()
        assert parts.read(3) == b""


def test_row_groups_of_parquet_are_read_once_and_nothing_behind_them(tmp_path):
    image = {"path": "a.png"}
    turns = [{"user": "a", "assistant": "b"}]
    rows = [{"texts": turns, "images": [{**image, "bytes": os.urandom(1 << 20)}]} for _ in range(8)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "f.parquet", row_group_size=1)
    sent: list[int] = []
    with served(tmp_path, sent) as address:
        file = ParquetFile(data_path(f"{address}/f.parquet"))
        locations = locations_of(file)
        before = sum(sent)
        assert len(file.records(0, locations)) == 8
    assert sum(sent) - before < 1.1 * (tmp_path / "f.parquet").stat().st_size
