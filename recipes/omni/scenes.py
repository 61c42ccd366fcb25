"""Drawings of one colour and tones of one pitch, and records that ask what is to be seen and heard."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from tokenizers import Tokenizer, models, pre_tokenizers

COLOURS = {"red": (214, 40, 40), "green": (44, 160, 44), "blue": (31, 90, 200), "yellow": (240, 200, 20)}
PITCHES = {"deep": 130.0, "low": 260.0, "middle": 520.0, "high": 1040.0, "shrill": 2080.0}
"""Hertz, an octave apart; each tone is up to a fifth of that higher or lower."""

QUESTION = "colour pitch"
SIDE = 32
"""Of a drawing, in pixels."""

_MARKS = ("im_start", "im_end", "vision_start", "vision_end", "image_pad", "audio_start", "audio_end", "audio_pad")
_FORMATS = (("wav", 16_000, 1), ("flac", 22_050, 2), ("ogg", 16_000, 1), ("wav", 44_100, 2))
"""Ending, samples a second and channels of each clip in turn."""


def tokenizer() -> Tokenizer:
    """A token for each word, and for each mark of the chat template."""
    words = ["[unknown]", "user", "assistant", *QUESTION.split(), *COLOURS, *PITCHES]
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[unknown]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.add_special_tokens([f"<|{mark}|>" for mark in _MARKS])
    return made


def write_scenes(folder: Path, count: int, seed: int) -> Path:
    """Writes drawings, tones and a file of records that name both.

    Args:
        folder: for all of them.
        count: of records.
        seed: of chance.

    Returns:
        The file of records.
    """
    folder.mkdir(parents=True, exist_ok=True)
    draw, records = np.random.default_rng(seed), []
    for number in range(count):
        colour, pitch = str(draw.choice(list(COLOURS))), str(draw.choice(list(PITCHES)))
        ending, rate, channels = _FORMATS[number % len(_FORMATS)]
        drawing(colour, draw).save(folder / f"{number}.png")
        soundfile.write(folder / f"{number}.{ending}", tone(pitch, rate, channels, draw), rate)
        records.append(_record(f"{number}.png", f"{number}.{ending}", f"{colour} {pitch}"))
    return _written(folder / "records.jsonl", records)


def with_other_tones(records: Path, seed: int) -> Path:
    """The same drawings, questions and answers, each with the tone of another record.

    Args:
        records: what `write_scenes` wrote.
        seed: of chance.
    """
    found = [json.loads(line) for line in records.read_text(encoding="utf-8").splitlines()]
    tones = [record["messages"][0]["content"][1]["path"] for record in found]
    for record, other in zip(found, np.random.default_rng(seed).permutation(tones).tolist(), strict=True):
        record["messages"][0]["content"][1]["path"] = other
    return _written(records.with_name("other-tones.jsonl"), found)


def drawing(colour: str, draw: np.random.Generator) -> Image.Image:
    """A disc or a square of a colour, somewhere on grey."""
    image = Image.new("RGB", (SIDE, SIDE), (int(draw.integers(150, 256)),) * 3)
    left, top = (int(place) for place in draw.integers(0, SIDE // 2, 2))
    right, bottom = left + int(draw.integers(10, SIDE // 2)), top + int(draw.integers(10, SIDE // 2))
    pencil = ImageDraw.Draw(image)
    (pencil.ellipse if draw.random() < 0.5 else pencil.rectangle)((left, top, right, bottom), fill=COLOURS[colour])
    return image


def tone(pitch: str, rate: int, channels: int, draw: np.random.Generator) -> NDArray[np.float64]:
    """``[samples, channels]`` a fifth to a half of a second of a tone with overtones, in noise."""
    seconds = np.arange(int(rate * draw.uniform(0.2, 0.5))) / rate
    hertz = PITCHES[pitch] * draw.uniform(0.83, 1.2)
    turns = 2 * np.pi * hertz * seconds + draw.uniform(0, 2 * np.pi)
    wave = np.sin(turns) + 0.3 * np.sin(2 * turns) + 0.15 * np.sin(3 * turns)
    loudness = draw.uniform(0.1, 0.6, channels)
    noise = draw.normal(0, 0.02, (len(seconds), channels))
    return 0.6 * wave[:, None] * loudness + noise


def _record(image: str, audio: str, answer: str) -> dict[str, Any]:
    media = [{"type": "image", "path": image}, {"type": "audio", "path": audio}]
    asked = {"role": "user", "content": [*media, {"type": "text", "text": QUESTION}]}
    return {"messages": [asked, {"role": "assistant", "content": answer}]}


def _written(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records), encoding="utf-8")
    return path
