"""A record may name addresses of a few kinds only; others are refused by its name, or such records are left out."""

import json

import fsspec
import pytest

from flowtrain_lightning.data import DataError
from flowtrain_lightning.data.data_path import PROTOCOLS, named_protocols, protocols_of
from flowtrain_lightning.data.media.media_files import MediaAddress, MediaError
from flowtrain_lightning.data.sources.measurers import this_process
from tests.data.support import data_module, message_record, records_in, write_image, write_records

REFUSED = (
    "http://a.org/b.png",
    "https://a.org/b.png",
    "HTTPS://a.org/b.png",
    " http://a.org/b.png",
    "ftp://a.org/b.png",
    "github://org:repo@main/b.png",
    "zip://b.png::https://a.org/b.zip",
    "zip://b.png::file:///tmp/b.zip",
    "tar://b.png::s3://a/b.tar",
    "simplecache::https://a.org/b.png",
    "simplecache::s3://a/b.png",
    "reference://b.png",
    "memory://b.png",
    "file::http://a.org/b.png",
    "s3://a/b.png::http://a.org",
    "nowhere://b.png",
    "://b.png",
)


@pytest.mark.parametrize("address", REFUSED)
def test_an_address_that_a_record_may_not_name_is_refused_before_anything_is_opened(address, monkeypatch):
    monkeypatch.setattr(fsspec, "filesystem", lambda *_, **__: pytest.fail("it was opened"))
    with pytest.raises(
        MediaError, match=r"may not name addresses of the kind '.*', only of file, .*FlowDataModule.pro"
    ):
        MediaAddress(address).path()


def test_what_was_found_in_an_address_is_every_kind_in_it():
    assert protocols_of("zip://a.png::simplecache::S3://b/c.zip") == ["zip", "simplecache", "s3"]
    assert protocols_of(" s3://a") == [" s3"]
    assert {"file", "gs", "hf", "s3"} <= PROTOCOLS


@pytest.fixture
def file(tmp_path):
    """Six records, of which the third names an address."""
    images = [write_image(tmp_path / f"images/{number}.png", 4, 8, seed=number) for number in range(6)]
    images[2] = "memory://pictures/2.png"
    fsspec.filesystem("memory").pipe_file("/pictures/2.png", (tmp_path / "images/2.png").read_bytes())
    records = [message_record(number, "ask", "answer", [image]) for number, image in enumerate(images)]
    return write_records(tmp_path / "d.jsonl", records)


def test_the_record_that_names_such_an_address_is_named(file):
    with pytest.raises(
        DataError, match=r"d\.jsonl, record 3 \(id 'r2'\): image memory://pictures/2\.png cannot be used: "
    ):
        data_module(file).setup("fit")


def test_such_records_are_left_out_and_counted_where_unreadable_ones_are(file):
    told, _ = data_module(file, unreadable="drop", global_batch_size=1).index_ahead(this_process)
    assert told.startswith("d.jsonl: 5 of 6 records used, 1 dropped for a media item that cannot be used")


def test_what_the_user_names_is_read(file):
    data = data_module(file, protocols=["memory"], unreadable="drop", global_batch_size=6)
    data.setup("fit")
    (batch,) = data.train_dataloader()
    assert sorted(batch.plan.samples.tolist()) == list(range(6))
    # Without the permission an index that was made with it does not count.
    again = data_module(file, unreadable="drop", global_batch_size=1)
    again.setup("fit")
    assert len(again.train_dataloader()) == 5


def test_an_address_of_a_local_file_is_that_file(file):
    path = file.parent / "images/0.png"
    for given in (f"file://{path}", f"FILE://{path}", f"local://{path}"):
        assert MediaAddress(given).path() == path
    write_records(file, [message_record(0, "ask", "answer", [f"file://{path}"])])
    (record,) = records_in(file)
    assert record.images == (MediaAddress(f"file://{path}"),)


def test_a_missing_library_is_no_reason_to_leave_records_out(file, monkeypatch):
    def missing(protocol):
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec, "get_filesystem_class", missing)
    address = "gs://bucket/c.png"
    file.write_text(file.read_text() + json.dumps(message_record(6, "ask", "answer", [address])))
    with pytest.raises(
        DataError, match=r"record 7 \(id 'r6'\): its image 'gs://bucket/c\.png' cannot be opened: .*Install"
    ):
        data_module(file, unreadable="drop").setup("fit")


def test_kinds_that_nobody_reads_are_refused_in_the_constructor():
    with pytest.raises(DataError, match=r"kind 'nowhere' cannot be read"):
        data_module(protocols=["nowhere"])
    with pytest.raises(DataError, match=r"protocols is 'az'; give a list"):
        named_protocols("az")
