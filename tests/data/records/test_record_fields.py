"""A field that would count for nothing though it says something is refused by name; others are passed over."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from flowtrain_lightning.data import DataError, FlowDataModule
from flowtrain_lightning.data.records.formats import parse
from tests.data.support import data_module

TURNS = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
FORMS = {
    "messages": TURNS,
    "conversations": {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
    "completion of turns": {"prompt": TURNS["messages"][:1], "completion": TURNS["messages"][1:]},
    "completion of text": {"prompt": "a", "completion": "b"},
    "pairs": {"texts": [{"user": "a", "assistant": "b"}]},
    "text": {"text": "a"},
    "tokens": {"input_ids": [7, 8, 9]},
}


def encoded(kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (8, 8), "red").save(file, kind)
    return file.getvalue()


def read(fields: dict[str, Any], **options: Any) -> Any:
    return parse(fields, "/d.jsonl", 0, Path("/").joinpath, **options)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("label", False, "not supported"),
        ("negative", "c", "not supported"),
        ("loss_mask", [0, 1], "not supported"),
        ("weight", 0.5, "not supported"),
        ("chosen", "c", "pairs are not trained yet"),
        ("rejected", TURNS["messages"], "pairs are not trained yet"),
        ("second_try", TURNS["messages"], "turns which are not read"),
    ],
)
def test_what_says_something_of_training_is_refused_by_name(form, name, value, words):
    record = {**FORMS[form], name: value}
    with pytest.raises(DataError, match=rf"record 1: it holds '{name}'.*{words}.*ignore_columns=\['{name}'\]"):
        read(record)
    read(record, ignored=[name])


def test_labels_belong_to_tokens_and_other_numbers_for_each_of_them_are_refused():
    read({"input_ids": [7, 8, 9], "labels": [-100, 8, 9], "attention_mask": [1, 1, 1], "token_type_ids": [0, 0, 0]})
    with pytest.raises(DataError, match="holds 'labels', which is not supported"):
        read({**TURNS, "labels": [1]})
    with pytest.raises(DataError, match="holds 'learn', a number for each of the 'input_ids'"):
        read({"input_ids": [7, 8, 9], "learn": [0, 1, 1]})


PICTURES: dict[str, Any] = {
    "jpg": encoded("JPEG"),
    "img": "cat.png",
    "pictures": ["a/b c.JPG", "d.webp"],
    "media": {"kind": "photo", "file": "cat.jpeg"},
    "thumbnail": {"bytes": encoded(), "path": None},
    "clip": "clips/1.mp4",
    "in_base64": "/9j/" + "A" * 40,
    "decoded": Image.new("RGB", (2, 2)),
    "web": "https://a.org/cat.png",
    "sized": "https://a.org/cat.jpg?width=640#top",
    "version": {"file": "s3://photos/cat.png?versionId=3"},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_that_is_not_read_is_refused_unless_it_is_ignored(form, name):
    record = {**FORMS[form], name: PICTURES[name]}
    with pytest.raises(DataError, match=rf"record 1: it holds '{name}' with .*ignore_columns=\['{name}'\]"):
        read(record)
    read(record, ignored=[name])


@pytest.mark.parametrize("form", FORMS)
def test_what_means_nothing_is_passed_over(form):
    beside = {"source": "web", "score": 0.5, "url": "https://a.org/page", "tags": ["a", "b.c"], "embedding": [0.5] * 9}
    beside |= {"meta": {"size": [3, 4]}, "raw": b"\x00\x01", "label": None, "chosen": [], "prompt_id": "1", "jpg": b""}
    read({"id": "cat.jpg", **FORMS[form], **beside})


def test_a_field_that_names_the_image_that_is_read_is_no_other_image():
    record = {"conversations": [{"from": "human", "value": "<image>"}], "image": "coco/1.jpg"}
    read({**record, "file_name": "1.jpg", "coco_url": "http://images.org/train/000001.jpg?size=2"})
    read({**record, "source": "s3://coco/train/1.jpg?versionId=3"})
    with pytest.raises(DataError, match=r"it holds 'mask' with the path 'coco/1_mask\.png'"):
        read({**record, "mask": "coco/1_mask.png"})


def _in_lines(folder: Path, rows: list[dict[str, Any]]) -> Any:
    (folder / "d.jsonl").write_text("".join(json.dumps({**row, "jpg": "a.jpg"}) + "\n" for row in rows))
    return folder / "d.jsonl"


def _in_parquet(folder: Path, rows: list[dict[str, Any]]) -> Any:
    table = pyarrow.Table.from_pylist([{**row, "jpg": encoded("JPEG")} for row in rows])
    pyarrow.parquet.write_table(table, folder / "d.parquet")
    return folder / "d.parquet"


def _in_a_data_set(folder: Path, rows: list[dict[str, Any]]) -> Any:
    made = datasets.Dataset.from_list([{**row, "jpg": {"bytes": encoded(), "path": None}} for row in rows])
    return made.cast_column("jpg", datasets.Image())


def _in_a_stream(folder: Path, rows: list[dict[str, Any]]) -> Any:
    return _in_a_data_set(folder, rows).to_iterable_dataset()


def _in_a_tar(folder: Path, rows: list[dict[str, Any]]) -> Any:
    with tarfile.open(folder / "d.tar", "w") as tar:
        for number, row in enumerate(rows):
            for ending, content in (("json", json.dumps({"text": "a", **row}).encode()), ("jpg", encoded("JPEG"))):
                member = tarfile.TarInfo(f"{number}.{ending}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return folder / "d.tar"


@pytest.mark.parametrize("write", [_in_lines, _in_parquet, _in_a_data_set, _in_a_stream, _in_a_tar])
def test_every_source_refuses_a_picture_that_is_not_read_and_knows_what_is_ignored(write, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    given = write(tmp_path, [{"text": "ab"}] * 4)

    def first_batch(**options: Any) -> Any:
        data = data_module(given, global_batch_size=2, **options)
        data.setup("fit")
        return next(iter(data.train_dataloader()))

    with pytest.raises(DataError, match=r"jpg'.* is not read.*ignore_columns=\['jpg'\]"):
        first_batch()
    assert len(first_batch(ignore_columns=["jpg"]).plan.samples) == 2
    with pytest.raises(DataError, match="is not read"):  # also where an index is kept that was made without
        first_batch()


def test_names_to_ignore_are_a_list():
    with pytest.raises(DataError, match=r"ignore_columns is 'jpg'; give a list of names"):
        FlowDataModule("d.jsonl", token_budget=8, global_batch_size=1, ignore_columns="jpg")
