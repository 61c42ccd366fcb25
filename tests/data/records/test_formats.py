"""Records are read in every form that people write, and a broken one is named."""

import json
from pathlib import Path

import pytest

from flowtrain_lightning.data import DataError, JsonFile, Turn
from flowtrain_lightning.data.records.formats import parse
from flowtrain_lightning.data.sources.record_store import locations_of
from tests.data.support import message_record, records_in, write_records

LLAVA = {
    "id": "x",
    "image": "a.png",
    "conversations": [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "Äh – this."}],
}


def test_messages_are_read(tmp_path):
    file = write_records(tmp_path / "d.jsonl", [message_record(7, "What?", "This.", ["p/1.png", "p/2.png"])])
    (found,) = records_in(file)
    assert found.id == "r7"
    assert found.turns == (Turn("user", "<image><image>What?"), Turn("assistant", "This."))
    assert found.images == (tmp_path / "p/1.png", tmp_path / "p/2.png")
    assert found.fields["images"] == [{"path": "p/1.png"}, {"path": "p/2.png"}]


@pytest.mark.parametrize("image", ["a.png", ["a.png"]])
@pytest.mark.parametrize("write", [lambda records: json.dumps(records, indent=1), lambda records: json.dumps(*records)])
def test_llava_records_are_read_from_an_array_and_from_lines(tmp_path, image, write):
    (tmp_path / "d.json").write_text(write([{**LLAVA, "image": image}]))
    (found,) = records_in(tmp_path / "d.json")
    assert [turn.role for turn in found.turns] == ["user", "assistant"]
    assert found.images == (tmp_path / "a.png",)


@pytest.mark.parametrize("write", [lambda records: json.dumps(records, indent=1), lambda records: json.dumps(*records)])
def test_a_byte_order_mark_and_the_line_ends_of_windows_are_no_part_of_the_records(tmp_path, write):
    file = tmp_path / "d.json"
    file.write_bytes(b"\xef\xbb\xbf" + write([LLAVA]).replace("\n", "\r\n").encode() + b"\r\n")
    (found,) = records_in(file)
    assert found.id == "x"


def test_text_that_is_not_utf_8_is_told(tmp_path):
    (tmp_path / "d.jsonl").write_bytes(json.dumps(LLAVA).encode("utf-16"))
    with pytest.raises(DataError, match=r"d.jsonl, record 1: not valid UTF-8 .*; save the file as UTF-8"):
        records_in(tmp_path / "d.jsonl")


def test_of_an_array_the_record_is_told_that_is_not_utf_8(tmp_path):
    records = [json.dumps(LLAVA).encode(), json.dumps({**LLAVA, "id": "?"}).encode().replace(b"?", b"\xe9")]
    (tmp_path / "d.json").write_bytes(b"[" + b",".join(records) + b"]")
    with pytest.raises(DataError, match=r"d.json, record 2: not valid UTF-8 .*; save the file as UTF-8"):
        records_in(tmp_path / "d.json")


def test_a_key_that_stands_twice_is_refused_by_name(tmp_path):
    (tmp_path / "d.jsonl").write_text('{"text": "a"}\n{"text": "a", "text": "b"}\n')
    with pytest.raises(DataError, match=r"d.jsonl, record 2: it has 'text' twice in one object; keep one"):
        records_in(tmp_path / "d.jsonl")


def test_what_is_said_of_a_record_is_short_and_can_be_written_into_any_log(tmp_path):
    (tmp_path / "d.jsonl").write_text(json.dumps({"id": "long" * 1000, "text": "a", "image": "\ud83d.png"}) + "\n")
    with pytest.raises(DataError, match=r"d.jsonl, record 1 \(id 'longlong") as raised:
        records_in(tmp_path / "d.jsonl")
    assert len(str(raised.value).encode()) < 500
    with pytest.raises(DataError, match=r"\\ud83d"):
        raise DataError("image \ud83d.png cannot be used")


def as_parts(*images):
    """A conversation whose contents are lists."""
    question = [*images, {"type": "text", "text": "What"}, {"type": "text", "text": "?"}]
    answer = [{"type": "text", "text": "This."}]
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


@pytest.mark.parametrize(
    "record",
    [
        {**as_parts({"type": "image"}, {"type": "image"}), "images": ["1.png", {"path": "2.png"}]},
        as_parts({"type": "image", "path": "1.png"}, {"type": "image", "image": "2.png"}),
        as_parts({"type": "image", "url": "1.png"}, {"type": "image_url", "image_url": {"url": "2.png"}}),
    ],
)
def test_content_may_be_a_list_of_text_and_images(tmp_path, record):
    (found,) = records_in(write_records(tmp_path / "d.jsonl", [record]))
    assert found.turns == (Turn("user", "<image><image>What?"), Turn("assistant", "This."))
    assert found.images == (tmp_path / "1.png", tmp_path / "2.png")


USER, ANSWER = {"role": "user", "content": "What?"}, {"role": "assistant", "content": "This."}


@pytest.mark.parametrize("name", ["messages", "conversations", "prompt"])
@pytest.mark.parametrize("keys", [("role", "content"), ("from", "value")])
def test_every_list_of_turns_may_be_written_in_either_way(tmp_path, name, keys):
    turns = [dict(zip(keys, turn.values(), strict=True)) for turn in (USER, ANSWER)]
    record = {"prompt": turns[:1], "completion": turns[1:]} if name == "prompt" else {name: turns}
    (found,) = records_in(write_records(tmp_path / "d.jsonl", [record]))
    assert [(turn.role, turn.text) for turn in found.turns] == [("user", "What?"), ("assistant", "This.")]


def test_of_a_prompt_and_its_completion_the_completion_is_learned(tmp_path):
    record = {"prompt": [USER, ANSWER, USER], "completion": [ANSWER], "system": "Be short."}
    (found,) = records_in(write_records(tmp_path / "d.jsonl", [record]))
    assert [turn.learned for turn in found.turns if turn.role == "assistant"] == [False, True]
    assert found.turns[0] == Turn("system", "Be short.")


@pytest.mark.parametrize(
    ("record", "question", "answer"),
    [
        ({"messages": [USER, ANSWER]}, "user: What?", "This."),
        ({"messages": [USER]}, "user: What?", None),
        ({"prompt": "What?", "completion": " This."}, "What?", " This."),
        ({"text": "alone"}, "alone", None),
        ({"input_ids": [1]}, "", None),
    ],
)
def test_what_is_asked_and_what_should_be_answered_is_told(tmp_path, record, question, answer):
    (found,) = records_in(write_records(tmp_path / "d.jsonl", [record]))
    assert (found.question, found.answer) == (question, answer)


def test_questions_and_answers_may_be_pairs(tmp_path):
    pairs = [{"user": "What?", "assistant": "This.", "source": "book"}, {"user": "And?", "assistant": "That."}]
    (found,) = records_in(write_records(tmp_path / "d.jsonl", [{"texts": pairs}]))
    said = [("user", "What?"), ("assistant", "This."), ("user", "And?"), ("assistant", "That.")]
    assert [(turn.role, turn.text) for turn in found.turns] == said


@pytest.mark.parametrize(
    "record",
    [
        {"texts": [{"user": "What?", "assistant": "This."}]},
        {"prompt": [{"role": "system", "content": "Be short."}, USER], "completion": [ANSWER]},
        {"messages": [{"role": "system", "content": "Be short."}, USER, ANSWER]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "What?"}]}, ANSWER]},
    ],
)
def test_images_without_a_marker_stand_before_the_first_question(tmp_path, record):
    (found,) = records_in(write_records(tmp_path / "d.jsonl", [{**record, "images": ["1.png", "2.png"]}]))
    assert [turn.text for turn in found.turns if turn.role == "user"] == ["<image><image>What?"]
    marked = json.loads(json.dumps(record).replace("What?", "What<image>?"))
    (found,) = records_in(write_records(tmp_path / "d.jsonl", [{**marked, "images": ["1.png"]}]))
    assert [turn.text for turn in found.turns if turn.role == "user"] == ["What<image>?"]


@pytest.mark.parametrize(
    ("record", "two"),
    [
        ({"messages": [USER, ANSWER], "conversations": [USER, ANSWER]}, ("messages", "conversations")),
        ({"messages": [USER, ANSWER], "text": "a"}, ("messages", "text")),
        ({"input_ids": [1, 2], "prompt": "a", "completion": "b"}, ("input_ids", "prompt")),
        ({"text": "ab", "prompt": "a", "completion": "b"}, ("prompt", "text")),
    ],
)
def test_a_record_of_two_forms_is_refused_unless_one_is_ignored(record, two):
    with pytest.raises(DataError, match=rf"'{two[0]}' and '{two[1]}', .*ignore_columns=\['{two[1]}'\]"):
        parse(record, "d.jsonl", 0, Path)
    parse(record, "d.jsonl", 0, Path, ignored=[two[1]])
    parse({**record, two[1]: None}, "d.jsonl", 0, Path)


def test_a_record_without_images_needs_no_entry_for_them(tmp_path):
    turns = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    records = [{"messages": [{"role": "user", "content": "hi"}]}, {"conversations": turns}]
    located = records_in(write_records(tmp_path / "d.jsonl", records))
    assert [found.images for found in located] == [(), ()]
    assert [found.id for found in located] == ["1", "2"]


@pytest.mark.parametrize("ascii_only", [True, False])
@pytest.mark.parametrize("form", ["lines", "lines with gaps", "array", "pretty array"])
def test_every_record_is_found_again_by_its_offset(tmp_path, form, ascii_only):
    records = [{**LLAVA, "id": f"ü{number}"} for number in range(5)]
    if "array" in form:
        text = json.dumps(records, indent=3 if "pretty" in form else None, ensure_ascii=ascii_only)
    else:
        join = "\n \n\n" if "gaps" in form else "\n"
        text = join + join.join(json.dumps(record, ensure_ascii=ascii_only) for record in records)
    file = tmp_path / "d.json"
    file.write_text(text, encoding="utf-8")
    located = records_in(file)
    assert [found.id for found in located] == [f"ü{number}" for number in range(5)]
    store = JsonFile(file)
    locations = locations_of(store)
    for number in (3, 0, 4, 2, 1):
        assert store.records(number, locations[number : number + 1]) == located[number : number + 1]


BROKEN = {
    "not json": ('{"id": 1,', r"record 2.*not valid JSON"),
    "no object": ("[1]", "record 2.*expected a JSON object, got list"),
    "no known form": ('{"id": "a", "caption": ""}', r"record 2 \(id 'a'\).*found none of them but 'id', 'caption';"),
    "no text": ('{"text": ""}', "'text' must be a string with something in it"),
    "text with images": ('{"text": "a", "images": ["b"]}', "text alone has no images"),
    "no token": ('{"input_ids": []}', "'input_ids' must be a list with at least one token id"),
    "no token id": ('{"input_ids": [1, -5]}', "'input_ids' holds -5, which is no token id"),
    "token of another kind": ('{"input_ids": [1, true]}', "'input_ids' must be a list of whole numbers"),
    "shifted labels": ('{"input_ids": [1, 2], "labels": [2, -100]}', "'labels' must have, .* not shifted"),
    "padded tokens": ('{"input_ids": [1, 2], "attention_mask": [1, 0]}', "'attention_mask' leaves tokens out"),
    "nested too deep": ("[" * 50_000, "record 2: its JSON is nested too deep"),
    "a record nested too deep": ('{"messages": ' + "[" * 700 + "]" * 700 + "}", "record 2"),
    "a number of too many digits": ('{"id": ' + "7" * 5000 + "}", "record 2: it holds a number of too many digits"),
    "prompt of another kind": ('{"prompt": "a", "completion": []}', "must both be lists of turns, or both plain text"),
    "nothing to complete": ('{"prompt": "", "completion": ""}', "'prompt' and its 'completion' are both empty"),
    "completion with an image": ('{"prompt": "a", "completion": "b", "image": "c.png"}', "text have no 'image'"),
    "completion with a system": ('{"prompt": "a", "completion": "b", "system": "c"}', "text have no 'system'"),
    "half of a character to complete": (
        '{"prompt": "a \\ud83d", "completion": "b"}',
        r"holds half of a character, '\\ud83d'",
    ),
    "no question for images": (
        '{"images": ["a"], "messages": [{"role": "assistant", "content": "b"}]}',
        "its text has 0 <image> markers, but it names 1 images",
    ),
    "images that are not all marked": (
        '{"images": ["a", "b"], "messages": [{"role": "user", "content": "<image>"}]}',
        "its text has 1 <image> markers, but it names 2 images",
    ),
    "prompt without turns": ('{"prompt": [], "completion": []}', "'prompt' must be a list with at least one turn"),
    "no pairs": ('{"texts": []}', "'texts' must be a list with at least one pair"),
    "half of a pair": ('{"texts": [{"user": "a"}]}', "every pair in 'texts' needs 'user' and 'assistant'"),
    "more than a pair": (
        '{"texts": [{"user": "a", "assistant": "b", "audio": "c"}]}',
        "a pair in 'texts' has 'audio', which is not understood",
    ),
    "a list of images": ('{"file_name": "a.png", "text": "b"}', "it names a file .'file_name'."),
    "no turns": ('{"id": "a", "messages": []}', "'messages' must be a list with at least one turn"),
    "turn without text": ('{"messages": [{"role": "user"}]}', "needs 'role' and 'content'"),
    "more markers": (
        '{"id": 5, "messages": [{"role": "user", "content": "<image>"}]}',
        r"id '5'.*1 <image> markers",
    ),
    "more images": (
        '{"image": "a", "conversations": [{"from": "human", "value": "b"}]}',
        "0 <image> .*1 images",
    ),
    "path": ('{"image": [1], "conversations": [{"from": "human", "value": "<image>"}]}', "every image needs a path"),
    "unknown part": (
        '{"messages": [{"role": "user", "content": [{"type": "smell"}]}]}',
        "content that is a list holds .* here it has .*smell",
    ),
    "images in two ways": (
        '{"images": ["a"], "messages": [{"role": "user", "content": [{"type": "image", "path": "b"}]}]}',
        "within its turns and beside them",
    ),
    "broken bytes": (
        '{"messages": [{"role": "user", "content": [{"type": "image", "url": "data:image/png;base64,A"}]}]}',
        "image 'data:image/png;base64,A' cannot be read",
    ),
    "half of a character": (
        '{"messages": [{"role": "user", "content": "a \\ud83d b"}]}',
        r"holds half of a character, '\\ud83d'",
    ),
    "half of a character in a list": (
        '{"messages": [{"role": "user", "content": [{"type": "text", "text": "\\udc00"}]}]}',
        r"holds half of a character, '\\udc00'",
    ),
    "an image of another kind": (
        '{"images": [5], "messages": [{"role": "user", "content": "<image>"}]}',
        "the bytes of an image file, but one is a int",
    ),
    "bytes that say not what they are": (
        '{"images": ["/9j/' + "A" * 5000 + '"], "messages": [{"role": "user", "content": "<image>"}]}',
        r"the image '/9j/A{36}'\.\.\. has 5004 characters, .* Write bytes in base64 as 'data:image/",
    ),
    "no path": ('{"images": [{}], "messages": [{"role": "user", "content": "<image>"}]}', "every image needs a path"),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_record_is_named_with_its_file(tmp_path, broken):
    line, words = BROKEN[broken]
    file = tmp_path / "d.jsonl"
    file.write_text(json.dumps(LLAVA) + "\n" + line + "\n")
    with pytest.raises(DataError, match=words) as caught:
        records_in(file)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize(
    ("tail", "words"),
    [
        (', {"id": 2,]', "record 2: not valid JSON"),
        (" {}]", "after record 1"),
        ("", "after record 1"),
        ('] [{"id": 2}]', "more follows after the JSON array, which ends with record 1"),
    ],
)
def test_a_broken_array_says_where(tmp_path, tail, words):
    (tmp_path / "d.json").write_text("[" + json.dumps(LLAVA) + tail)
    with pytest.raises(DataError, match=words):
        records_in(tmp_path / "d.json")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(DataError, match=r"none\.jsonl: there is no such file") as raised:
        records_in(tmp_path / "none.jsonl")
    assert str(raised.value).count("none.jsonl") == 1
