"""A file that was cut or of which a stretch is zeros is refused, or has all of its records: wherever it is damaged."""

import io
import json

import pyarrow
import pyarrow.parquet
import pytest

from flowtrain_lightning.data import DataError
from flowtrain_lightning.data.sources.naming import open_stores
from flowtrain_lightning.data.sources.record_store import locations_of
from tests.data.support import message_record

datasets = pytest.importorskip("datasets")

ROWS = [message_record(number, f"ask {number}" * 9, "answer é" * 9, []) for number in range(6)]
PLACES = 40
"""At which a file is damaged."""


def as_lines():
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()


def as_array():
    return json.dumps(ROWS, ensure_ascii=False, indent=1).encode()


def as_parquet(**settings):
    file = io.BytesIO()
    rows = [{name: value for name, value in row.items() if name != "images"} for row in ROWS]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file, row_group_size=2, **settings)
    return file.getvalue()


KINDS = {
    "d.jsonl": as_lines(),
    "d.json": as_array(),
    "d.parquet": as_parquet(),
    "plain.parquet": as_parquet(compression="none", use_dictionary=False),
    "checked.parquet": as_parquet(
        compression="none", use_dictionary=False, write_page_checksum=True, write_statistics=False
    ),
}


def ids_in(source):
    """The names of the records that are read; None where they are refused."""
    try:
        (store,) = open_stores(source)
        return [record.id for record in store.records(0, locations_of(store))]
    except DataError as error:
        said = str(error)
        assert "d.jsonl" in said or ".json" in said or "parquet" in said or ".arrow" in said or "saved" in said, said
        return None


def damaged(content, places):
    """Files cut, and with a stretch of zeros, in many places."""
    step = max(1, len(content) // places)
    for place in range(0, len(content), step):
        yield "cut", place, content[:place]
        for length in (8, 64, len(content)):
            yield "zeros", place, content[:place] + bytes(min(length, len(content) - place)) + content[place + length :]


@pytest.mark.parametrize("name", KINDS)
def test_a_damaged_file_is_refused_or_has_all_records(tmp_path, name):
    content, path = KINDS[name], tmp_path / name
    ends_of_lines = {place + 1 for place, byte in enumerate(content) if byte == ord("\n")}
    refused = 0
    for way, place, changed in damaged(content, PLACES):
        path.write_bytes(changed)
        found = ids_in(path)
        refused += found is None
        if found is None or (name == "d.jsonl" and way == "cut" and place in ends_of_lines | {0}):
            continue
        if not found:  # told where the data are opened: there is no record in it
            assert not changed
            continue
        assert len(found) == len(ROWS), (way, place)
    assert refused > PLACES / 2


def test_pages_with_checksums_are_compared(tmp_path):
    content = KINDS["checked.parquet"]
    place = content.index(b"ask 3ask 3") + 3
    (tmp_path / "d.parquet").write_bytes(content[:place] + b"4" + content[place + 1 :])
    (store,) = open_stores(tmp_path / "d.parquet")
    with pytest.raises(DataError, match=r"d\.parquet: it is no Parquet file that can be read \(.*CRC"):
        store.records(0, locations_of(store))


def test_a_saved_data_set_of_which_a_file_was_damaged_is_refused_or_has_all_rows(tmp_path):
    rows = datasets.Dataset.from_list([{"text": f"words {number}" * 3} for number in range(2_500)])
    rows.save_to_disk(tmp_path / "saved")
    (file,) = (tmp_path / "saved").glob("*.arrow")
    content = file.read_bytes()
    (store,) = open_stores(tmp_path / "saved")
    assert len(locations_of(store)) == 2_500
    ends = []
    with pyarrow.memory_map(str(file)) as mapped:
        reader = pyarrow.ipc.open_stream(mapped)
        ends += [mapped.tell() for _ in reader]
    for end in ends:
        for changed in (content[:end], content[:end] + bytes(64) + content[end + 64 :], content[: end - 3]):
            file.write_bytes(changed)
            with pytest.raises(DataError, match=r"cut or damaged: behind \d+ rows|cannot be loaded|no Arrow file"):
                open_stores(tmp_path / "saved")


@pytest.mark.parametrize("name", ["d.jsonl.gz", "d.jsonl.zst", "d.tgz", "d.tar.bz2", "d.json.lz4", "d.ZIP"])
def test_compressed_files_are_refused_by_their_ending(tmp_path, name):
    (tmp_path / name).write_bytes(b"\x1f\x8b")
    with pytest.raises(DataError, match=r"is compressed, .*; unpack it first"):
        open_stores(tmp_path / name)
