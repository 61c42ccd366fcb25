"""The examples of the page about data that are about videos and other people's tables run."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

pytest.importorskip("transformers")
pytest.importorskip("av")
pytest.importorskip("datasets")

import datasets

from flowtrain_lightning.data import Columns, FlowDataModule, IndexConfig
from flowtrain_lightning.data.sources.naming import open_stores
from flowtrain_lightning.data.sources.record_store import locations_of
from flowtrain_lightning.data.sources.stream_source import StreamPosition, StreamSource
from flowtrain_lightning.models import template_of
from tests.data.shards import write_tar
from tests.data.support import MEASURE
from tests.models.clips import tokenizer_of, videos_for
from tests.models.processors import PUBLISHED
from tests.tiny import IMAGES
from tests.tiny_videos import write_clip

PAGE = (Path(__file__).parents[1] / "docs/data.md").read_text(encoding="utf-8")
VIDEOS = PAGE.partition("## Videos")[2].partition("\n## ")[0]
FAMILY = "qwen2_5_vl"


def test_a_table_of_questions_becomes_records_as_the_page_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (32, 24), "red").save("a.png")
    Path("questions.csv").write_text("question,answer,file\nWhich colour?,Red.,a.png\n")
    (example,) = re.findall(r"```python\n(rows = datasets.load_dataset\(\"csv\".*?)```", PAGE, flags=re.DOTALL)
    given: dict[str, Any] = {}
    flow = SimpleNamespace(Columns=Columns, FlowDataModule=lambda rows, **also: given.update(also, rows=rows))
    exec(example, {"datasets": datasets, "flow": flow})
    (store,) = open_stores(given["rows"], columns=given["columns"])
    (record,) = store.records(0, locations_of(store))
    assert [turn.text for turn in record.turns] == ["<image>Which colour?", "Red."]
    assert str(record.images[0]) == "a.png"


def test_rows_that_are_found_by_their_number_become_a_stream_as_the_page_says():
    (example,) = re.findall(r"```python\n(class Rows:.*?)```", PAGE, flags=re.DOTALL)
    turns = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "This."}]
    dataset = [{"id": f"r{number}", "messages": turns} for number in range(3)]  # as torch's and litdata's are asked
    given: list[Any] = []
    exec(example, {"dataset": dataset, "flow": SimpleNamespace(FlowDataModule=lambda rows, **_: given.append(rows))})
    source = StreamSource(given[0], MEASURE, 64, IndexConfig())
    source.begin(0, StreamPosition())
    assert [source.record(sample).id for sample in range(3)] == ["r0", "r1", "r2"]
    assert len(source.lengths(0, 9)) == 3


def test_videos_train_from_files_shards_tables_and_streams_as_the_page_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_clip(tmp_path / "cat.mp4", 9, 16, 16, 3, codec="mpeg4")
    (line,) = re.findall(r"```json\n(.*?)```", VIDEOS, flags=re.DOTALL)
    (tmp_path / "cats.jsonl").write_text(line)
    (in_shard,) = re.findall(r"000\.json +(.*)", VIDEOS)
    write_tar(tmp_path / "cats.tar", {"000.json": in_shard.encode(), "000.mp4": (tmp_path / "cat.mp4").read_bytes()})
    PUBLISHED[FAMILY].save(tmp_path / FAMILY)
    given = partial(
        FlowDataModule,
        tokenizer=tokenizer_of(FAMILY),
        template=template_of(tmp_path / FAMILY),
        images=IMAGES,
        videos=videos_for(FAMILY),
        index=IndexConfig(cache_dir=tmp_path / "index"),
    )
    named = {"token_budget": 8192, "global_batch_size": 1}  # the page has one record of each kind
    names = {"flow": SimpleNamespace(FlowDataModule=lambda rows, **_: given(rows, **named))}
    for block in re.findall(r"```python\n(.*?)```", VIDEOS, flags=re.DOTALL):
        exec(block, names)
    modules = [given(name, **named) for name in ("cats.jsonl", "cats.tar", "cats.parquet")]
    batches = []
    for data in (*modules, names["data"]):
        data.setup("fit")
        batches += data.train_dataloader()
    assert len(batches) == 4
    for batch in batches[1:]:
        assert batch.microbatches[0].tokens.equal(batches[0].microbatches[0].tokens)
        assert batch.media["encoder"][0].pixels.equal(batches[0].media["encoder"][0].pixels)
