"""Records that something has happened to, and what becomes of each. `make proofs` breaks 10,000 of them.

A third are real ones, where there are such (see ``real_data``); the others are made up, of every kind that is known.
"""

from __future__ import annotations

import base64
import copy
import io
import json
import os
import random
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

from PIL import Image

from flowtrain_lightning.data import DataError, JsonFile, Record
from flowtrain_lightning.data.media.media_files import EncodedMedia
from flowtrain_lightning.data.sources.measuring import measure_records
from flowtrain_lightning.data.sources.record_store import locations_of
from tests import trials
from tests.conftest import real_data_folder
from tests.data.reading import seen_in
from tests.data.support import MEASURE, write_image

VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 3.5, 2**31, 2**63, 10**400, float("nan"), float("inf"), -0.0, "", " ", "<image>",
    "<video>", "<image><image>", "\ud83d", "\ude00", "a\x7fb", "\x00", "a\nb", "../..", ".", "/dev/zero", "data:",
    "data:image/png;base64,", "data:image/png;base64,AAAA", "data:image/png,AAAA", "http://a.b/c.png", "user",
    "assistant", "system", "gpt", [], {}, [[]], [None], [1], ["a"], {"a": []}, {"type": "text"}, {"type": "image"},
    {"type": "text", "text": "more"}, {"path": "images/0.png"}, {"bytes": "AAAA"}, {"role": "user", "content": "b"},
)  # fmt: skip
NAMES = (
    "role", "from", "content", "value", "text", "type", "image", "images", "path", "url", "bytes", "video", "videos",
    "messages", "conversations", "system", "input_ids", "labels", "attention_mask", "weight", "loss", "tools",
    "tool_calls", "chosen", "audio", "id", "zzz", "",
)  # fmt: skip
ODD_FILES = ("pipe.png", "empty.png", "text.png", "half.png", "loop.png", "none.png", "", "0.png\0", "a" * 300)
"""What a record may name in the folder of the images beside images."""


def make_images(folder: Path) -> list[str]:
    """Writes images, and what only has the name of one; returns the names of the images."""
    images = [write_image(folder / f"images/{number}.png", 4 + number, 8, seed=number) for number in range(3)]
    os.mkfifo(folder / "images/pipe.png")
    (folder / "images/empty.png").touch()
    (folder / "images/text.png").write_text("no image")
    (folder / "images/half.png").write_bytes((folder / images[0]).read_bytes()[:20])
    (folder / "images/loop.png").symlink_to("loop.png")
    return images


# ---- whole ones -----------------------------------------------------------------------------------------------------


def whole_record(chance: random.Random, images: list[str]) -> dict[str, Any]:
    """A record of a kind drawn by chance."""
    kind = chance.randrange(7)
    image = chance.choice(images)
    if kind == 0:
        return {"text": "some words"}
    if kind == 1:
        return {"input_ids": [9, 6, 9, 8], "labels": [-100, -100, 9, 8], "images": [{"path": image}]}
    if kind == 2:
        turns = [{"from": "human", "value": "<image>What?"}, {"from": "gpt", "value": "This."}]
        return {"id": "x", "image": image, "conversations": turns}
    if kind == 3:
        parts = [
            {"type": "image", "path": image},
            {"type": "text", "text": "What?"},
            {"type": "image_url", "url": image},
        ]
        return {"id": 7, "messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": "This."}]}
    if kind == 4:
        turns = [{"role": "user", "content": "a<image>"}, {"role": "assistant", "content": "b", "weight": 0}]
        return {"messages": [*turns, *turns], "images": [_address(), {"path": image}], "system": "Be short."}
    turns = [{"role": "user", "content": "<image>What?"}, {"role": "assistant", "content": "This."}]
    turns += [{"role": "user", "content": "And <image> this <image>?"}, {"role": "assistant", "content": "Né 😀"}]
    return {"id": 7, "messages": turns, "images": [{"path": chance.choice(images)} for _ in range(3)]}


def _address() -> str:
    """An image within a record."""
    file = io.BytesIO()
    Image.new("RGB", (4, 2), "red").save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


@cache
def _real_lines() -> tuple[str, ...]:
    folder = real_data_folder()
    files = [] if folder is None else [folder / "mini_vl" / name for name in ("train.jsonl", "val.jsonl")]
    return tuple(line for file in files if file.is_file() for line in file.read_text(encoding="utf-8").splitlines())


# ---- what happens to them -------------------------------------------------------------------------------------------


def mutated_line(chance: random.Random, record: dict[str, Any]) -> bytes:
    """The line of a record of which a value, a name, the order, the writing or some bytes are others than before."""
    for _ in range(chance.choice((0, 1, 1, 2, 3))):
        place = _place(chance, record)
        if place is not None:
            _change(chance, *place)
    text = json.dumps(record, ensure_ascii=chance.random() < 0.7)
    if chance.random() < 0.1:
        text = _with_a_key_twice(chance, record)
    line = bytearray(text.encode(errors="surrogatepass"))
    for _ in range(chance.choice((0, 0, 0, 1, 3))):
        line[chance.randrange(len(line))] = chance.randrange(256)
    way = chance.randrange(40)
    if way == 0:
        line = line[: chance.randrange(1, len(line) + 1)]
    elif way == 1:
        depth = chance.choice((500, 990, 50_000))
        line = bytearray(b"[" * depth + b"]" * depth if chance.random() < 0.5 else b"[" * depth)
    elif way == 2:
        line[-1:] = b', "more": ' + b'{"a":' * 20_000 + b"1" + b"}" * 20_001
    elif way == 3:
        line[-1:] = b', "more": ' + b"7" * chance.choice((400, 5_000)) + b"}"
    elif way == 4:
        line = bytearray(text.encode("utf-16" if chance.random() < 0.5 else "latin-1", errors="replace"))
    elif way == 5:
        line = bytearray(b"\xef\xbb\xbf") + line
    elif way == 6:
        start = chance.randrange(len(line))
        del line[start : start + chance.randrange(1, 40)]
    elif way == 7:
        line += chance.choice((b",", b"}", b" {}", bytes(line), b"\x00"))
    return bytes(line).replace(b"\n", b" ").replace(b"\r", b" ") or b"{"


def _place(chance: random.Random, value: Any) -> tuple[Any, Any] | None:
    """Somewhere in a value: the list or object, and the index or name."""
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    if not keys:
        return None
    key = chance.choice(keys)
    if isinstance(value[key], dict | list) and value[key] and chance.random() < 0.7:
        return _place(chance, value[key])
    return value, key


def _value(chance: random.Random) -> Any:
    return copy.deepcopy(chance.choice(VALUES))


def _change(chance: random.Random, holder: Any, key: Any) -> None:
    way, value = chance.randrange(8), holder[key]
    if way == 0:
        holder[key] = _value(chance)
    elif way == 1:
        del holder[key]
    elif way == 2 and isinstance(holder, list):
        holder.insert(key, holder[key])
    elif way == 3 and isinstance(holder, list):
        chance.shuffle(holder)
    elif way == 4 and isinstance(value, str):
        place = chance.randint(0, len(value))
        holder[key] = value[:place] + str(chance.choice(("<image>", "\ud83d", "<imag", "\u2028", "é"))) + value[place:]
    elif way == 5 and isinstance(value, str):
        holder[key] = f"images/{chance.choice(ODD_FILES)}"
    elif way == 6 and isinstance(holder, dict):
        holder[chance.choice(NAMES)] = _value(chance)
    elif isinstance(holder, dict):
        holder[chance.choice(NAMES)] = holder.pop(key)
    else:
        holder.append(_value(chance))


def _with_a_key_twice(chance: random.Random, record: dict[str, Any]) -> str:
    """The record as JSON; of one of its objects a key stands there twice."""
    objects = [each for each in _objects(record) if each]
    if not objects:
        return json.dumps(record)
    holder = chance.choice(objects)
    key, mark = chance.choice(list(holder)), "(again)"
    again = {key + mark: _value(chance)}
    entries = {**again, **holder} if chance.random() < 0.5 else {**holder, **again}
    holder.clear()
    holder.update(entries)
    return json.dumps(record).replace(mark, "")


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _objects(item)


# ---- what becomes of them -------------------------------------------------------------------------------------------


def trial(seed: int, folder: Path, images: list[str]) -> str:
    """Breaks a record, and reads it behind one that is whole; see `judge`.

    Args:
        seed: what is done is drawn from it.
        folder: of the images, and of the file with both records.
        images: names of images there.
    """
    chance = random.Random(seed)
    intact, lines = whole_record(chance, images), _real_lines()
    record = json.loads(chance.choice(lines)) if lines and seed % 3 == 0 else whole_record(chance, images)
    line = mutated_line(chance, record)
    first = json.dumps(intact).encode()
    as_array = chance.random() < 0.3
    content = b"[" + first + b",\n" + line + b"]" if as_array else first + b"\n" + line + b"\n"
    return judge(folder / "broken.jsonl", content, as_array=as_array)


def judge(file: Path, content: bytes, *, as_array: bool) -> str:
    """Writes a data file and reads it.

    Returns:
        ``"refused"`` in a sentence with file and record, or ``"read as it says"``.

    Raises:
        AssertionError: it is neither.
    """
    file.write_bytes(content)
    store = JsonFile(file)
    try:
        locations = locations_of(store)
        records = store.records(0, locations)
        with ThreadPoolExecutor(1) as threads:
            sizes = measure_records(records, MEASURE, threads).sizes
    except DataError as error:
        said = str(error)
        assert said.startswith(str(file)), said
        assert "record " in said, said
        assert len(said) < 5_000, f"{len(said)} characters"
        said.encode()  # so that any log takes it
        return "refused"
    values = _values(content, as_array=as_array)
    assert len(values) == len(records)
    for number, (value, record) in enumerate(zip(values, records, strict=True)):
        _compare(
            record, sizes.media_rows[sizes.media_start[number] : sizes.media_start[number + 1]], value, file.parent
        )
    return "read as it says"


def _values(content: bytes, *, as_array: bool) -> list[Any]:
    text = content.decode("utf-8-sig" if as_array else "utf-8")
    if as_array:
        found = json.loads(text, object_pairs_hook=_each_key_once)
        assert isinstance(found, list)
        return found
    lines = [line.removeprefix("\ufeff") for line in text.split("\n")]
    return [json.loads(line, object_pairs_hook=_each_key_once) for line in lines if line.strip()]


def _each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    assert len(dict(pairs)) == len(pairs), f"one of {pairs} was taken, the other was not"
    return dict(pairs)


def _compare(record: Record, rows: Any, value: Any, folder: Path) -> None:
    seen = seen_in(value, rows.tolist())
    sequence = MEASURE.sequence(record, rows)
    assert sequence.tokens.tolist() == seen.tokens, (MEASURE.tokenizer.decode(seen.tokens), value)
    assert sequence.labels.tolist() == seen.labels, value
    found = [image.content if isinstance(image, EncodedMedia) else image for image in record.images]
    assert found == [image if isinstance(image, bytes) else folder / image for image in seen.images], value
    assert sequence.media_positions.tolist() == seen.positions, value


def main() -> int:
    """Runs the trials that were not run yet."""
    with tempfile.TemporaryDirectory(prefix="broken-records-") as name:
        folder = Path(name)
        images = make_images(folder)
        link_real_images(folder)
        return trials.main("broken records", lambda seed: trial(seed, folder, images))


def link_real_images(folder: Path) -> None:
    """Lets real records find their images."""
    real = real_data_folder()
    if real is not None and (real / "mini_vl/images").is_dir():
        for file in (real / "mini_vl/images").iterdir():
            (folder / "images" / file.name).symlink_to(file)


if __name__ == "__main__":
    sys.exit(main())
