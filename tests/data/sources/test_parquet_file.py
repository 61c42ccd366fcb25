"""Rows of Parquet files are found in any order, in any process, and with little memory."""

import os
import random

import pytest

from flowtrain_lightning.data.sources import parquet_file
from flowtrain_lightning.data.sources.parquet_file import RowPieces

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


def pieces_of(file, rows, **settings) -> RowPieces:
    parquet.write_table(pyarrow.Table.from_pylist(rows), file, **settings)
    return RowPieces(lambda: file.open("rb"), parquet.read_metadata(file))


@pytest.fixture
def small_pieces(monkeypatch):
    """Of about ten rows, a few of which are kept."""
    monkeypatch.setattr(parquet_file, "PIECE_BYTES", 1000)
    monkeypatch.setattr(parquet_file, "KEPT_BYTES", 4000)


ROWS = [{"text": f"{number:03}" * 30, "images": [{"bytes": bytes([number % 256]) * number}]} for number in range(90)]


def test_rows_are_found_in_any_order(tmp_path, small_pieces):
    found = pieces_of(tmp_path / "d.parquet", ROWS, row_group_size=40)
    wanted = [(number // 40, number % 40) for number in range(90)]
    shuffled = random.Random(0).choices(wanted, k=300)
    for group, row in [*wanted, *reversed(wanted), *shuffled]:
        assert found.row(group, row) == ROWS[group * 40 + row]


def test_batches_that_end_before_their_length_are_joined(tmp_path, small_pieces, monkeypatch):
    iter_batches = parquet.ParquetFile.iter_batches
    cut = (1, 5, 2, 7, 3, 4)

    def split(file, **settings):
        whole = pyarrow.Table.from_batches(iter_batches(file, **settings)).combine_chunks()
        starts = [sum(cut[:number]) for number in range(len(cut))] + list(range(sum(cut), whole.num_rows))
        ends = [*starts[1:], whole.num_rows]
        parts = (whole.slice(start, end - start) for start, end in zip(starts, ends, strict=True))
        return (part.to_batches()[0] for part in parts)

    monkeypatch.setattr(parquet.ParquetFile, "iter_batches", split)
    found = pieces_of(tmp_path / "d.parquet", ROWS)
    assert [found.row(0, row) for row in range(90)] == ROWS


def test_a_fork_reads_on_beside_its_parent(tmp_path, small_pieces):
    found = pieces_of(tmp_path / "d.parquet", ROWS)
    assert found.row(0, 20) == ROWS[20]
    if (child := os.fork()) == 0:
        os._exit(0 if all(found.row(0, row) == ROWS[row] for row in range(30, 90)) else 1)
    assert all(found.row(0, row) == ROWS[row] for row in range(30, 90))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_row_group_that_is_large_is_never_in_memory_as_a_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet_file, "PIECE_BYTES", 1 << 18)
    monkeypatch.setattr(parquet_file, "KEPT_BYTES", 1 << 20)
    rows = [{"images": [{"bytes": os.urandom(1 << 15)}]} for _ in range(512)]
    found = pieces_of(tmp_path / "d.parquet", rows, write_batch_size=8, use_dictionary=False)
    assert parquet.read_metadata(tmp_path / "d.parquet").num_row_groups == 1
    before, most = pyarrow.total_allocated_bytes(), 0
    for row in range(0, 512, 7):
        assert found.row(0, row) == rows[row]
        most = max(most, pyarrow.total_allocated_bytes() - before)
    assert most < 3 << 20, f"{most / 2**20:.1f} MiB of a group of 16 MiB"


def test_a_file_that_lies_about_its_rows_is_told(tmp_path):
    found = pieces_of(tmp_path / "d.parquet", ROWS)
    with pytest.raises(ValueError, match="row group 0 has fewer rows than the file says"):
        found.row(0, 5000)
