"""Records are the same in every kind of store, and so is what is trained on."""

import base64
import importlib
import io
import json
import pickle
import sys
import tarfile
import warnings
from dataclasses import replace

import fsspec
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from benchmarks.web import served
from flowtrain_lightning.data import DataError, HubDataset, JsonFile, Mixture, ParquetFile, TarShard
from flowtrain_lightning.data.media.media_files import EncodedMedia
from flowtrain_lightning.data.sources.naming import mixture_of, open_stores
from flowtrain_lightning.data.sources.record_store import locations_of
from tests.data.shards import write_tar
from tests.data.support import MEASURE, data_module, records_in, trained, write_set
from tests.processes import assert_all_good, run_ranks

datasets = pytest.importorskip("datasets")

KINDS = ["json", "parquet", "tar", "datasets", "address"]


@pytest.fixture
def file(tmp_path):
    return write_set(tmp_path / "d.jsonl", 18)


def embedded(record) -> dict:
    """The record with its images inside, in bytes."""
    images = [{"bytes": path.read_bytes(), "path": path.name} for path in record.images]
    return {**record.fields, "images": images}


def as_parquet(file):
    rows = [embedded(record) for record in records_in(file)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file.with_suffix(".parquet"), row_group_size=5)
    return file.with_suffix(".parquet")


def as_tar(file):
    with tarfile.open(file.with_suffix(".tar"), "w") as tar:
        for number, record in enumerate(records_in(file)):
            fields = {name: value for name, value in record.fields.items() if name != "images"}
            members = [("json", json.dumps(fields).encode())]
            members += [(f"{index}.png", path.read_bytes()) for index, path in enumerate(record.images)]
            for ending, content in members:
                info = tarfile.TarInfo(f"a/{number:05}.{ending}")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    return file.with_suffix(".tar")


def as_dataset(file):
    images = [{"bytes": datasets.Value("binary"), "path": datasets.Value("string")}]
    turns = [{"role": datasets.Value("string"), "content": datasets.Value("string")}]
    rows = [embedded(record) for record in records_in(file)]
    features = datasets.Features({"id": datasets.Value("string"), "images": images, "messages": turns})
    return datasets.Dataset.from_list(rows, features=features).cast_column("images", [datasets.Image()])


def at_address(file):
    memory = fsspec.filesystem("memory")
    for path in (file, *(file.parent / "images").iterdir()):
        memory.pipe_file(f"/set/{path.relative_to(file.parent)}", path.read_bytes())
    return "memory://set/d.jsonl"


def naming_addresses(file):
    """The records of the file, as rows whose images are named by addresses and lie there."""
    at_address(file)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return [{**row, "images": [f"memory://set/{image['path']}" for image in row["images"]]} for row in rows]


FORMS = {"json": lambda file: file, "parquet": as_parquet, "tar": as_tar, "datasets": as_dataset, "address": at_address}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_store_has_the_records_and_images_of_the_file(file, kind):
    (store,) = open_stores(FORMS[kind](file))
    locations = locations_of(store)
    for expected, found in zip(records_in(file), store.records(0, locations), strict=True):
        assert (found.id, found.turns) == (expected.id, expected.turns)
        contents = [image.content if isinstance(image, EncodedMedia) else image.read_bytes() for image in found.images]
        assert contents == [path.read_bytes() for path in expected.images]
    assert store.records(7, locations[7:9])[1].id == "r8"


@pytest.mark.parametrize("kind", KINDS)
def test_a_training_is_the_same_from_every_kind_of_store(file, tmp_path, kind):
    cached = {"cache_dir": tmp_path / "index"}
    expected = trained(tmp_path, data_module(file, **cached), max_epochs=2)
    assert trained(tmp_path, data_module(FORMS[kind](file), **cached), max_epochs=2) == expected
    data = data_module(FORMS[kind](file), **cached)
    data.setup("fit")
    plain = data_module(file, **cached)
    plain.setup("fit")
    for batch, other in zip(data.train_dataloader(), plain.train_dataloader(), strict=True):
        for packed, same in zip(batch.media["encoder"], other.media["encoder"], strict=True):
            assert (packed is None and same is None) or packed.patches.equal(same.patches)


def test_records_of_every_store_may_name_images_at_addresses(file, tmp_path):
    rows = naming_addresses(file)
    (tmp_path / "named.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "named.parquet")
    expected = [path.read_bytes() for record in records_in(file) for path in record.images]
    for source in (tmp_path / "named.jsonl", tmp_path / "named.parquet", datasets.Dataset.from_list(rows)):
        (store,) = open_stores(source)
        records = store.records(0, locations_of(store))
        reached = [replace(MEASURE, protocols=frozenset({"memory"})).reaching(record) for record in records]
        assert [image.path().read_bytes() for record in reached for image in record.images] == expected


def test_a_dataset_that_changes_a_row_has_another_content_and_identity(file):
    first, second = as_dataset(file), as_dataset(file)
    changed = second.map(lambda row, number: {"id": f"{row['id']}{'!' * (number == 3)}"}, with_indices=True)
    stores = [open_stores(dataset)[0] for dataset in (first, first.select(range(18)), changed)]
    assert stores[0].content() == stores[1].content() != stores[2].content()
    assert stores[0].status() != stores[2].status()


def test_a_pattern_names_all_files_that_it_matches_in_order(tmp_path):
    for name in ("b", "a", "c"):
        write_set(tmp_path / f"part-{name}.jsonl", 3)
    names = [store.name for store in open_stores(str(tmp_path / "part-*.jsonl"))]
    assert names == ["part-a.jsonl", "part-b.jsonl", "part-c.jsonl"]
    with pytest.raises(DataError, match="no file matches this pattern"):
        open_stores(tmp_path / "other-*.jsonl")


def test_weights_of_a_mixture_are_shared_out_within_a_source_by_length():
    lengths = [[30, 10], [160]]
    assert mixture_of("train", {"a": 1, "b": 3}).shares(lengths) == (0.75, 0.25, 3.0)
    assert Mixture(["a", "b"], temperature=1.0).shares(lengths) == (30.0, 10.0, 160.0)
    np.testing.assert_allclose(
        Mixture(["a", "b"], temperature=2.0).shares(lengths), [0.75 * 40**0.5, 0.25 * 40**0.5, 160**0.5]
    )
    assert mixture_of("train", ["a", "b"]).shares(lengths) is None


def test_a_mixture_that_cannot_be_is_refused():
    for settings, words in (
        ({"weights": [1.0]}, "1 weights for 2 sources"),
        ({"weights": [1.0, 1.0], "temperature": 2.0}, "give one of them"),
        ({"temperature": 0.0}, "it must be a number above 0"),
        ({"temperature": float("inf")}, "it must be a number above 0"),
        ({"weights": [1.0, float("nan")]}, "got the weight nan; give each source a number"),
        ({"weights": ["much", 1.0]}, "got the weight 'much'; give each source a number"),
    ):
        with pytest.raises(DataError, match=words):
            Mixture(["a", "b"], **settings)
    with pytest.raises(DataError, match="val gives files weights"):
        mixture_of("val", {"a": 1.0})


def test_a_mixture_of_kinds_with_a_temperature_gives_small_sources_more_often(file, tmp_path):
    small = as_parquet(write_set(tmp_path / "small/d.jsonl", 2))
    data = data_module(Mixture([file, small], temperature=4.0), global_batch_size=5)
    counts = np.bincount(
        [sample >= 18 for _, _, samples in trained(tmp_path, data, max_epochs=1) for sample in samples]
    )
    assert counts.tolist() == [13, 7]  # of 20 samples as 18 ** 0.25 to 2 ** 0.25


def test_an_image_beside_a_text_in_a_shard_is_what_the_text_is_about(tmp_path):
    picture = io.BytesIO()
    Image.new("RGB", (8, 8)).save(picture, "PNG")
    with tarfile.open(tmp_path / "d.tar", "w") as tar:
        for name, content in (("a.png", picture.getvalue()), ("a.txt", b"A square."), ("b.txt", b"alone")):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    store = TarShard(tmp_path / "d.tar")
    captioned, alone = store.records(0, locations_of(store))
    assert [(turn.role, turn.text) for turn in captioned.turns] == [("user", "<image>"), ("assistant", "A square.")]
    assert (captioned.id, captioned.images[0].content) == ("a", picture.getvalue())
    assert (alone.written, alone.turns) == ("alone", ())


def test_hidden_files_of_a_shard_are_no_part_of_it(tmp_path):
    members = {
        "._a.txt": b"junk",
        "a.txt": b"first",
        "x/._b.txt": b"junk",
        "x/.DS_Store": b"junk",
        "x/b.txt": b"second",
    }
    store = TarShard(write_tar(tmp_path / "d.tar", members))
    assert [record.written for record in store.records(0, locations_of(store))] == ["first", "second"]


def test_how_a_shard_tells_its_records_apart_is_said_where_none_is_whole(tmp_path):
    store = TarShard(write_tar(tmp_path / "d.tar", dict.fromkeys(("a.v1.jpg", "a.v1.txt"), b"")))
    with pytest.raises(DataError, match=r"neither \.json nor \.txt, only .*\. The files of a record follow each other"):
        store.records(0, locations_of(store))


def test_an_image_may_stand_in_the_record_itself(tmp_path):
    (tmp_path / "p.png").write_bytes(b"content")
    address = "data:image/png;base64," + base64.b64encode(b"content").decode()
    parts = [{"type": "image_url", "image_url": {"url": address}}]
    (tmp_path / "d.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": parts}]}))
    (record,) = records_in(tmp_path / "d.jsonl")
    assert record.images[0].content == b"content"


@pytest.mark.parametrize("kind", KINDS)
def test_a_store_that_was_read_may_be_sent_to_another_process(file, kind):
    (store,) = open_stores(FORMS[kind](file))
    locations = locations_of(store)
    assert store.records(3, locations[3:4])[0].id == "r3"
    assert pickle.loads(pickle.dumps(store)).records(3, locations[3:4])[0].id == "r3"


def test_a_server_that_gives_no_parts_of_files_is_named(file):
    with served(file.parent, gives_parts=False) as address:
        (store,) = open_stores(f"{address}/{file.name}")
        with pytest.raises(DataError, match=r"d\.jsonl: it cannot be read \(its server gives whole files only"):
            store.records(3, locations_of(store)[3:4])


def test_parquet_of_large_row_groups_is_said_to_be_slow(file, monkeypatch):
    path = as_parquet(file)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        locations_of(ParquetFile(path))
    monkeypatch.setattr("flowtrain_lightning.data.sources.parquet_file.LARGE_GROUP", 10)
    with pytest.warns(UserWarning, match=r"row groups of up to .* MiB.*row_group_size=100.*datasets\.load_dataset"):
        locations_of(ParquetFile(path))


def test_a_data_set_that_was_saved_is_given_by_its_folder(file, tmp_path):
    rows = as_dataset(file)
    rows.save_to_disk(tmp_path / "one")
    datasets.DatasetDict(train=rows, other=rows.select([0])).save_to_disk(tmp_path / "several")
    for given in (tmp_path / "one", str(tmp_path / "several"), HubDataset(str(tmp_path / "several"))):
        (store,) = open_stores(given)
        assert [record.id for record in store.records(0, locations_of(store))] == [f"r{number}" for number in range(18)]
    (store,) = open_stores(HubDataset(str(tmp_path / "several"), split="other"))
    assert len(locations_of(store)) == 1
    with pytest.raises(DataError, match=r"several: it cannot be loaded .*no split 'val', but train, other"):
        open_stores(HubDataset(str(tmp_path / "several"), split="val"))


def test_what_would_be_passed_over_of_a_data_set_is_refused(file):
    rows = as_dataset(file)
    with pytest.raises(DataError, match=r"has a transform of its own .with_transform., which is not called here"):
        open_stores(rows.with_transform(lambda batch: batch))
    with pytest.raises(DataError, match="train is a DatasetDict of several splits; give one of them: a, b"):
        mixture_of("train", datasets.DatasetDict(a=rows, b=rows))
    with pytest.raises(DataError, match=r"A record is no data by itself\..* datasets\.Dataset\.from_list\(records\)"):
        open_stores({"text": "a"})


def refused(tmp_path):
    """What is given, and what is said of it."""
    (tmp_path / "a.parquet").write_text("no table")
    (tmp_path / "a.tar").write_bytes(b"\x1f\x8b" + b"\0" * 2000)
    write_set(tmp_path / "whole.jsonl", 6)
    whole = as_tar(tmp_path / "whole.jsonl").read_bytes()
    (tmp_path / "cut.tar").write_bytes(whole[:5000])
    yield lambda: locations_of(ParquetFile(tmp_path / "a.parquet")), r"a\.parquet: it is no Parquet file"
    yield (
        lambda: locations_of(TarShard(tmp_path / "a.tar")),
        r"a\.tar: it is no tar file .*unpack a compressed one first",
    )
    yield lambda: locations_of(TarShard(tmp_path / "cut.tar")), r"cut\.tar: it is no tar file .*unexpected end of data"
    yield lambda: JsonFile(tmp_path), "this is a folder"
    for name, words in {"a.jsonl.gz": "is compressed, .*; unpack it first", "a.csv": r"load_dataset\('csv'"}.items():
        (tmp_path / name).write_bytes(b"\x1f\x8b")
        yield lambda name=name: open_stores(tmp_path / name), words
    yield lambda: open_stores("nowhere://a/b.jsonl"), "nowhere://a/b.jsonl: this kind of address cannot be read"
    yield lambda: open_stores(7), "int is no data that can be read"
    yield lambda: open_stores(HubDataset(str(tmp_path / "none"))), "none: it cannot be loaded"


def test_what_is_no_store_of_records_is_refused_in_a_sentence(tmp_path):
    for opening, words in refused(tmp_path):
        with pytest.raises(DataError, match=words):
            opening()


def open_without_libraries(rank, ranks, file):
    """Imports the room of data anew where the libraries cannot be imported, and opens what needs them and what not."""
    lacking = ("datasets", "pyarrow", "upath")
    for name in list(sys.modules):
        if name.partition(".")[0] in lacking or name.startswith("flowtrain_lightning.data"):
            del sys.modules[name]
    sys.modules.update(dict.fromkeys(lacking))
    data = importlib.import_module("flowtrain_lightning.data")
    naming = importlib.import_module("flowtrain_lightning.data.sources.naming")
    assert len(list(naming.open_stores(str(file))[0].locate())) == 3
    for given in ("s3://a/b.jsonl", file.rename(f"{file}.parquet")):
        with pytest.raises(data.DataError, match=r"flowtrain-lightning\[data\]"):
            naming.open_stores(given)


def test_the_package_and_json_files_need_none_of_the_libraries_of_other_stores(tmp_path):
    assert_all_good(run_ranks(open_without_libraries, 1, arguments=[write_set(tmp_path / "d.jsonl", 3)]))
