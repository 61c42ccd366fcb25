"""What a record holds beside roles, texts and images is obeyed, handed to the template, or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flowtrain_lightning.data import DataError, Record
from flowtrain_lightning.data.records.formats import parse
from tests.data.support import TEMPLATE, Letters

USER = {"role": "user", "content": "a"}
ANSWER = {"role": "assistant", "content": "b"}
NO_ROWS = np.empty(0, np.int64)


def read(fields: dict[str, Any]) -> Record:
    return parse(fields, "/d.jsonl", 0, Path("/").joinpath)


@pytest.mark.parametrize("key", ["image", "images"])
@pytest.mark.parametrize("form", ["messages", "conversations"])
def test_images_may_be_named_by_either_key(key, form):
    turn = {"role": "user", "content": "<image>"} if form == "messages" else {"from": "human", "value": "<image>"}
    assert read({form: [turn], key: ["a.png"]}).images == (Path("/a.png"),)


def test_llavas_conversations_mark_each_image():
    with pytest.raises(DataError, match="0 <image> markers, but it names 1 images"):
        read({"conversations": [{"from": "human", "value": "a"}], "image": "a.png"})


def test_what_is_null_or_empty_in_a_table_is_not_there():
    nothing = dict.fromkeys(("id", "image", "images", "messages", "input_ids", "system", "prompt"))
    assert read({**nothing, "text": "a"}).written == "a"
    assert read({"conversations": [{"from": "human", "value": "a"}], "image": ""}).images == ()
    parts = [
        {"type": "text", "text": "a", "image": None, "cached": None},
        {"type": "image", "image": "b", "text": None},
    ]
    record = read({"messages": [{"role": "user", "content": parts}]})
    assert (record.turns[0].text, record.images, record.id) == ("a<image>", (Path("/b"),), "1")


def test_a_detail_that_says_nothing_is_no_matter():
    part = {"type": "image_url", "image_url": {"url": "a.png", "detail": "auto"}}
    assert read({"messages": [{"role": "user", "content": [part]}]}).images == (Path("/a.png"),)


@pytest.mark.parametrize("fields", [{"messages": [USER, ANSWER]}, {"text": "a"}, {"input_ids": [1]}])
def test_what_may_name_an_image_is_no_other_data_where_there_is_no_image(fields):
    for name in ("image_path", "image_urls", "video_file"):
        with pytest.raises(DataError, match=f"holds '{name}', which is not read; name {name[:5]}s as '{name[:5]}s'"):
            read({**fields, name: "a.png"})
    part = {"type": "image", "image": "a.png"}
    for named in (
        {"messages": [USER | {"content": [part]}]},
        {"messages": [USER | {"content": "<image>"}], "image": "a"},
    ):
        assert len(read({**named, "image_url": "https://a.org/a.png"}).images) == 1


def test_a_system_beside_the_turns_is_the_first_turn():
    turns = read({"messages": [USER], "system": "Be short."}).turns
    assert [(turn.role, turn.text) for turn in turns] == [("system", "Be short."), ("user", "a")]


def test_tools_and_tool_calls_are_for_the_template():
    record = read({"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [1]}], "tools": [2]})
    assert record.others == {"tools": [2]}
    assert record.turns[1].others == {"tool_calls": [1]}
    assert record.turns[1].text == ""
    with pytest.raises(DataError, match="it holds 'tool_calls', 'tools', which ChatTemplate cannot write"):
        TEMPLATE.sequence(record, Letters(), NO_ROWS)


@pytest.mark.parametrize("mark", [{"weight": 0}, {"loss": False}])
def test_an_answer_that_shall_not_be_learned_is_not(mark):
    learned = TEMPLATE.sequence(read({"messages": [USER, ANSWER]}), Letters(), NO_ROWS)
    left_out = TEMPLATE.sequence(read({"messages": [USER, {**ANSWER, **mark}]}), Letters(), NO_ROWS)
    assert left_out.tokens.tolist() == learned.tokens.tolist()
    assert learned.targets > left_out.targets == 0


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"input_features": [1.0]}, "holds 'input_features', which is not supported"),
        ({"rejected_response": "c"}, "holds 'rejected_response'"),
        ({"max_pixels": 9}, "holds 'max_pixels'"),
        ({"system": 3}, "'system' must be a string, but is a int"),
        ({"messages": [{"role": "system", "content": "a"}], "system": "b"}, "keep one"),
        ({"messages": [{**ANSWER, "weight": 0.5}]}, "a turn has weight=0.5; only 0 "),
        ({"messages": [{**ANSWER, "weight": []}]}, r"a turn has weight=\[\]; only 0 "),
        ({"images": ["a"], "image": ["b"]}, "has 'images' and 'image'"),
        ({"images": [{"path": "a", "resized_height": 9}]}, "an image has 'resized_height' of its own"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"detail": "low"}}]}]},
            "an image has 'detail' of its own",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "cached": 1}]}]}, "has 'cached'"),
    ],
)
def test_what_is_not_obeyed_is_refused_by_name(fields, words):
    with pytest.raises(DataError, match=rf"d\.jsonl, record 1: .*{words}"):
        read({"messages": [USER, ANSWER], **fields})


def test_notes_about_a_record_are_no_matter():
    read({"messages": [USER, ANSWER], "source": "web", "score": 3, "videos": [], "tools": None})
