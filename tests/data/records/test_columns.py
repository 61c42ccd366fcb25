"""Questions and answers in columns of any names are the conversations that somebody would have written of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from flowtrain_lightning.data import Columns, DataError
from flowtrain_lightning.data.records.formats import parse
from tests.data.shards import write_tar
from tests.data.support import data_module, message_record, write_image, write_records

COLUMNS = Columns("query", "label", image="picture", system="role")
ASKED = {"query": "what?", "label": "a cat", "picture": "a.png", "question_id": 7}


def read(fields: dict[str, Any], columns: Columns = COLUMNS) -> Any:
    return parse(fields, "/d.jsonl", 0, Path("/").joinpath, columns=columns)


@pytest.mark.parametrize(
    ("record", "conversation"),
    [
        (ASKED, {"images": ["a.png"]}),
        ({**ASKED, "role": "Be brief."}, {"images": ["a.png"], "system": "Be brief."}),
        ({**ASKED, "picture": ["a.png", "b.png"]}, {"images": ["a.png", "b.png"]}),
        ({**ASKED, "picture": None}, {}),
        ({**ASKED, "query": "this <image>?"}, {"images": ["a.png"]}),
    ],
)
def test_a_record_is_read_as_the_conversation_that_it_is(record, conversation):
    said = [{"role": "user", "content": record["query"]}, {"role": "assistant", "content": record["label"]}]
    found, written = read(record), parse({**conversation, "messages": said}, "/d.jsonl", 0, Path("/").joinpath)
    assert (found.turns, found.media, found.answer) == (written.turns, written.media, "a cat")


def test_a_record_without_an_answer_has_nothing_to_learn():
    assert read({**ASKED, "label": None}).answer is None


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"question": "what?", "label": "a cat"}, "it has no 'query', in which columns says that the question is; it"),
        ({**ASKED, "label": 3}, "its 'label', which columns calls question or answer, must be a text, but is a int"),
        ({**ASKED, "label": ["a", "b"]}, "must be a text, but is a list"),
        ({**ASKED, "text": "all of it"}, r"it also holds 'text'; leave columns out, or .*ignore_columns=\['text'\]"),
        ({**ASKED, "images": ["b.png"]}, "it also holds 'images'"),
        ({**ASKED, "mask": "b.png"}, r"it holds 'mask' with the path 'b\.png', which is not read"),
        ({**ASKED, "weight": 0.5}, "it holds 'weight', which is not supported"),
    ],
)
def test_what_is_no_question_or_would_count_for_nothing_is_refused(record, words):
    with pytest.raises(DataError, match=f"record 1: .*{words}"):
        read(record)


def rows(folder: Path) -> list[dict[str, Any]]:
    pictures = [write_image(folder / f"images/{number}.png", 8, 8 + 4 * number, number) for number in range(4)]
    return [{"query": f"what {name}", "label": "a" * len(name), "picture": name} for name in pictures]


def holding(folder: Path) -> list[dict[str, Any]]:
    """The same with the picture's bytes in place of its path."""
    return [{**row, "picture": {"bytes": (folder / row["picture"]).read_bytes(), "path": None}} for row in rows(folder)]


def lines(folder: Path) -> Any:
    return write_records(folder / "d.jsonl", rows(folder))


def parquet(folder: Path) -> Any:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(holding(folder)), folder / "d.parquet")
    return folder / "d.parquet"


def data_set(folder: Path) -> Any:
    return datasets.Dataset.from_list(holding(folder)).cast_column("picture", datasets.Image())


def stream(folder: Path) -> Any:
    return data_set(folder).to_iterable_dataset()


def tar(folder: Path) -> Any:
    members = {}
    for number, row in enumerate(rows(folder)):
        members[f"{number}.json"] = json.dumps({**row, "picture": f"{number}.png"}).encode()
        members[f"{number}.png"] = (folder / row["picture"]).read_bytes()
    return write_tar(folder / "d.tar", members)


@pytest.mark.parametrize("source", [lines, parquet, data_set, stream, tar])
def test_every_source_reads_them(source, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    said = [message_record(n, row["query"], row["label"], [row["picture"]]) for n, row in enumerate(rows(tmp_path))]

    def first_batch(given: Any, **options: Any) -> Any:
        data = data_module(given, shuffle=False, **options)
        data.setup("fit")
        return next(iter(data.train_dataloader()))

    columns = Columns("query", "label", "picture")
    found, written = (
        first_batch(source(tmp_path), columns=columns),
        first_batch(write_records(tmp_path / "s.jsonl", said)),
    )
    assert [batch.tokens.tolist() for batch in found.microbatches] == [b.tokens.tolist() for b in written.microbatches]
    assert all(map(same_pixels, found.media["encoder"], written.media["encoder"]))
    with pytest.raises(DataError, match="record 1"):  # also where an index is kept that was made with columns
        first_batch(source(tmp_path))


def same_pixels(one: Any, other: Any) -> bool:
    return bool(one.patches.equal(other.patches))
