"""Records and images that something has happened to, drawn from a seed, and what the data room makes of each."""

from __future__ import annotations

import io
import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from flowtrain_lightning.data import DataError, ImageError, JsonFile
from flowtrain_lightning.data.image_files import decode, flatten, read_header
from flowtrain_lightning.data.measuring import measure_records
from flowtrain_lightning.data.media_files import EncodedMedia
from flowtrain_lightning.data.sources.record_store import locations_of
from tests.data.support import MEASURE

VALUES: tuple[Any, ...] = (
    None, True, 0, -1, 3.5, 10**400, "", "<image>", "\ud83d", "a\x7fb", "../..", ".", [], {}, [[]], [None], {"a": []},
)  # fmt: skip
MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr", "I", "I;16", "F", "LAB", "HSV")
FORMATS = ("PNG", "JPEG", "TIFF", "WEBP", "GIF", "BMP", "AVIF", "PPM", "JPEG2000", "TGA", "ICO", "PDF", "EPS")


# ---- records ------------------------------------------------------------------------------------------------------


def whole_record(chance: random.Random, images: list[str]) -> dict[str, Any]:
    """A record of a kind drawn by chance."""
    kind = chance.randrange(5)
    image = chance.choice(images)
    if kind == 0:
        return {"text": "some words"}
    if kind == 1:
        return {"input_ids": [9, 6, 9, 8], "labels": [-100, -100, 9, 8], "images": [{"path": image}]}
    if kind == 2:
        turns = [{"from": "human", "value": "<image>What?"}, {"from": "gpt", "value": "This."}]
        return {"id": "x", "image": image, "conversations": turns}
    parts = [{"type": "image", "path": image}, {"type": "text", "text": "What?"}]
    content = parts if kind == 3 else "<image>What?"
    turns = [{"role": "user", "content": content}, {"role": "assistant", "content": "This."}]
    return {"id": 7, "messages": turns} | ({} if kind == 3 else {"images": [{"path": image}]})


def mutated_record(chance: random.Random, record: dict[str, Any]) -> bytes:
    """The line of a record of which a value, a name or some bytes are others than before."""
    for _ in range(chance.randint(1, 2)):
        place = _place(chance, record)
        if place is not None:
            holder, key = place
            _change(chance, holder, key)
    line = bytearray(json.dumps(record).encode())
    for _ in range(chance.choice((0, 0, 0, 1, 3))):
        line[chance.randrange(len(line))] = chance.randrange(256)
    if chance.random() < 0.05:
        line = line[: chance.randrange(1, len(line) + 1)]
    if chance.random() < 0.02:
        line = bytearray(b"[" * chance.choice((500, 990, 50_000)))
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


def _change(chance: random.Random, holder: Any, key: Any) -> None:
    way = chance.randrange(4)
    if way == 0:
        holder[key] = chance.choice(VALUES)
    elif way == 1:
        del holder[key]
    elif way == 2 and isinstance(holder, list):
        holder.insert(key, holder[key])
    elif isinstance(holder, dict):
        holder[chance.choice(("role", "text", "image", "path", "zzz"))] = holder.pop(key)


def judge_record(folder: Path, line: bytes, intact: dict[str, Any]) -> str:
    """``"refused"`` in a sentence with file and record, or ``"read"`` as what the line says.

    Raises:
        AssertionError: it is neither.
    """
    file = folder / "mutated.jsonl"
    file.write_bytes(json.dumps(intact).encode() + b"\n" + line + b"\n")
    store = JsonFile(file)
    try:
        locations = locations_of(store)
        measured = measure_records(store.records(0, locations), MEASURE, ThreadPoolExecutor(1))
    except DataError as error:
        said = str(error)
    else:
        record = store.records(0, locations)[-1]
        sequence = MEASURE.sequence(record, measured.sizes.select(np.asarray([1])).media_rows)
        assert MEASURE.tokenizer.decode(sequence.tokens.tolist()) == _said(json.loads(line.decode("utf-8-sig"))), line
        assert len(sequence.media_rows) == len(record.images)
        return "read"
    assert said.startswith(f"{file}, record "), said
    return "refused"


def _said(fields: dict[str, Any]) -> str:
    """The text that a person reads in a record, images as ``[]``; what ids say, letter by letter."""
    if "messages" in fields or "conversations" in fields:
        name, key = ("messages", "content") if "messages" in fields else ("conversations", "value")
        contents = [turn[key] for turn in fields[name]]
        parts = [part for content in contents for part in (content if isinstance(content, list) else [content])]
        texts = [
            part if isinstance(part, str) else part["text"] if part["type"] == "text" else "<image>" for part in parts
        ]
        return "".join(texts).replace("<image>", "[]")
    if "input_ids" in fields:
        return "".join(chr(token) for token in fields["input_ids"] if token > 6)
    return str(fields["text"])


# ---- images -------------------------------------------------------------------------------------------------------


def drawn_image(chance: random.Random) -> bytes:
    """An image file of a mode, format and orientation drawn by chance; empty where Pillow cannot write such a one."""
    pixels = np.random.default_rng(chance.randrange(1 << 30)).integers(0, 256, (chance.randint(1, 24), 9, 3), np.uint8)
    image, mode, file = Image.fromarray(pixels), chance.choice(MODES), io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = chance.randrange(10)
    settings: dict[str, Any] = {"exif": exif.tobytes()} if chance.random() < 0.5 else {}
    if chance.random() < 0.2:
        settings |= {"save_all": True, "append_images": [image.rotate(180)]}
    try:
        if mode == "I;16":
            image = Image.fromarray(pixels[:, :, 0].astype(np.uint16) * 257)
        elif mode in ("LAB", "PA"):
            image = image.convert("P").convert("PA") if mode == "PA" else Image.new("LAB", (9, 9))
        else:
            image = image.convert("L").convert(mode) if mode in ("I", "F") else image.convert(mode)
        kind = chance.choice(FORMATS)
        if kind == "AVIF":  # in writing other than this, Pillow can end the whole process
            image, settings = image.convert("RGB"), {}
        image.save(file, kind, **settings)
    except Exception:
        return b""
    return file.getvalue()


def mutated_image(chance: random.Random) -> bytes:
    """An image file, often with some bytes changed, left out or added."""
    while not (content := bytearray(drawn_image(chance))):
        pass
    way = chance.randrange(5)
    if way == 1:
        for _ in range(chance.randint(1, 4)):
            content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    elif way == 2:
        content = content[: chance.randrange(len(content))]
    elif way == 3:
        content[chance.randrange(len(content)) :] = chance.randbytes(chance.randrange(40))
    return bytes(content)


def judge_image(content: bytes) -> str:
    """``"refused"`` in a sentence, or ``"shown"`` as by the plainest use of Pillow there is.

    Raises:
        AssertionError: it is neither.
    """
    file = EncodedMedia("drawn", content)
    said = ""
    try:
        header = read_header(file)
        shown = np.asarray(flatten(decode(file), "RGB")).astype(int)
    except ImageError as error:
        said = str(error)
    if said:
        assert len(said.split()) > 4, said
        return "refused"
    assert shown.shape == (header.height, header.width, 3)
    with Image.open(io.BytesIO(content)) as plain:
        expected = np.asarray(_by_hand(plain)).astype(int)
    assert np.abs(shown - expected).max(initial=0) <= 1
    return "shown"


def _by_hand(image: Image.Image) -> Image.Image:
    """The image upright, in 8 bits, on white, each by the plainest means there are."""
    image.load()
    turn = 1 if image.format == "TIFF" else image.getexif().get(0x0112, 1)  # Pillow turns a TIFF while it loads it
    turned = np.asarray(image.convert("RGBA") if image.mode not in ("I;16", "I;16B", "I") else _scaled(image))
    turns = {
        2: lambda a: a[:, ::-1],
        3: lambda a: a[::-1, ::-1],
        4: lambda a: a[::-1],
        5: lambda a: a.swapaxes(0, 1),
        6: lambda a: a.swapaxes(0, 1)[:, ::-1],
        7: lambda a: a.swapaxes(0, 1)[::-1, ::-1],
        8: lambda a: a.swapaxes(0, 1)[::-1],
    }
    turned = turns.get(turn, lambda a: a)(turned).astype(float)
    alpha = turned[:, :, 3:] / 255
    return (turned[:, :, :3] * alpha + 255 * (1 - alpha)).round()


def _scaled(image: Image.Image) -> Image.Image:
    values = np.asarray(image).astype(float) / 257
    return Image.fromarray(values.round().clip(0, 255).astype(np.uint8)).convert("RGBA")
