"""Rows of tables are the records that were written: no object has keys that others of its column have."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from flowtrain_lightning.data.records.conversation import TokenSequence
from flowtrain_lightning.data.records.formats import Record
from flowtrain_lightning.data.sources.index import IndexConfig
from flowtrain_lightning.data.sources.naming import open_stores
from flowtrain_lightning.data.sources.record_store import locations_of
from flowtrain_lightning.data.sources.stream_of_samples import StreamPosition
from flowtrain_lightning.data.sources.stream_source import StreamSource
from flowtrain_lightning.data.sources.table_rows import row_as_record
from tests.data.support import MEASURE, TEMPLATE


def calling(name: str, **arguments: Any) -> dict[str, Any]:
    """A record whose answer is the call of a tool."""
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "tool_calls": [call]}]
    properties = {key: {"type": "string"} for key in arguments}
    return {"messages": turns, "tools": [{"function": {"name": name, "parameters": properties}}]}


RECORDS = [calling("weather", city="Paris"), calling("time", zone="CET"), calling("now")]


def in_lines(folder: Path) -> Any:
    (folder / "d.jsonl").write_text("\n".join(map(json.dumps, RECORDS)))
    return folder / "d.jsonl"


def in_parquet(folder: Path) -> Any:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(RECORDS), folder / "d.parquet")
    return folder / "d.parquet"


def in_a_data_set(folder: Path) -> Any:
    return datasets.Dataset.from_list(RECORDS)


def told(records: list[Record]) -> list[Any]:
    return [[*(dict(turn.others) for turn in record.turns), dict(record.others)] for record in records]


@pytest.mark.parametrize("write", [in_lines, in_parquet, in_a_data_set])
def test_a_call_of_a_tool_has_its_own_arguments_alone(write, tmp_path):
    (store,) = open_stores(write(tmp_path))
    found = told(store.records(0, locations_of(store)))
    assert found == [
        [{}, {"tool_calls": record["messages"][1]["tool_calls"]}, {"tools": record["tools"]}] for record in RECORDS
    ]


class WithoutTools:
    """Writes turns alone."""

    fingerprint = "without tools"

    def sequence(self, record: Record, *read: Any, **asked: Any) -> TokenSequence:
        turns = tuple(replace(turn, others={}) for turn in record.turns)
        return TEMPLATE.sequence(replace(record, turns=turns, others={}), *read, **asked)


def test_rows_of_a_stream_have_the_arguments_that_were_written():
    stream = datasets.Dataset.from_list(RECORDS).to_iterable_dataset()
    source = StreamSource(stream, replace(MEASURE, template=WithoutTools()), 100, IndexConfig())
    source.begin(0, StreamPosition())
    assert [record.turns[1].others["tool_calls"] for record in source.records(range(3))] == [
        record["messages"][1]["tool_calls"] for record in RECORDS
    ]


def test_what_a_media_item_has_not_and_what_lists_hold_stays():
    row = {"image": {"bytes": b"?", "path": None}, "ids": [1, None, 3], "many": [None, {"a": None, "b": [{"c": None}]}]}
    assert row_as_record(row) == {**row, "many": [None, {"b": [{}]}]}
