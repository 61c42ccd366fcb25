"""A tokenizer whose ids are easy to say by heart, small pictures, and data files made of them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
from PIL import Image

from flowtrain_lightning.data import ChatTemplate, FlowDataModule, ImageProcessor

TEMPLATE = ChatTemplate(
    headers={"system": "<S>", "user": "<U>", "assistant": "<A>"},
    end="<E>",
    between="",
    begin="<B>",
    image_token="<I>",
    before_image="[",
    after_image="]",
)
IMAGES = ImageProcessor(patch_size=2, merge_size=2, min_pixels=16, max_pixels=256)
TOKENS = {"batch_unit": "tokens", "microbatches": 2, "max_delay": 2}
"""Settings of :func:`data_module` for steps of a number of microbatches."""

SPECIAL = {"<B>": 1, "<S>": 2, "<U>": 3, "<A>": 4, "<E>": 5, "<I>": 6}


class Letters:
    """Every character is its code point; the markers of ``TEMPLATE`` are 1 to 6."""

    def __init__(self, fingerprint: str = "letters") -> None:
        self.fingerprint = fingerprint

    def encode(self, text: str) -> list[int]:
        return [SPECIAL.get(part) or ord(part) for part in re.findall(r"<[BSUAEI]>|.", text, re.DOTALL)]

    def decode(self, ids) -> str:
        return "".join(chr(number) for number in ids if number > 6)

    def token_to_id(self, token: str) -> int | None:
        return SPECIAL.get(token)


def write_picture(path: Path, height: int, width: int, seed: int = 0) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return f"{path.parent.name}/{path.name}"


def message_record(number: int, text: str, answer: str, pictures: list[str]) -> dict:
    return {
        "id": f"r{number}",
        "images": [{"path": picture} for picture in pictures],
        "messages": [
            {"role": "user", "content": "<image>" * len(pictures) + text},
            {"role": "assistant", "content": answer},
        ],
    }


def write_records(path: Path, records: list[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def write_set(path: Path, count: int, first: int = 0) -> Path:
    """Records with 0, 1, 2, 0, 1, 2 ... pictures of mixed sizes and texts of mixed lengths."""
    records = []
    for number in range(first, first + count):
        pictures = [
            write_picture(path.parent / f"pictures/{number}_{place}.png", 4 + number % 5, 8 + place * 4, seed=number)
            for place in range(number % 3)
        ]
        records.append(message_record(number, "ask" * (number % 4), f"answer {number}", pictures))
    return write_records(path, records)


def data_module(*args, **changes) -> FlowDataModule:
    settings = {
        "tokenizer": Letters(),
        "token_budget": 64,
        "global_batch_size": 4,
        "images": IMAGES,
        "template": TEMPLATE,
        "seed": 3,
    }
    return FlowDataModule(*args, **(settings | changes))
