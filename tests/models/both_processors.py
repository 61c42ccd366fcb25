"""A processor of Hugging Face and ours of the same folder: conversations to compare, and what each makes of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from flowtrain_lightning.data import Record, TokenSequence
from flowtrain_lightning.data.records.formats import parse
from flowtrain_lightning.data.records.record_turns import MARKERS
from flowtrain_lightning.models.processor import Processor

SIZES = ((60, 60), (90, 130), (200, 70))
"""Height and width in pixels of the images of every record, in turn."""


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, **others: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **others}


CONVERSATIONS = {
    "an image": [user("<image>What is this?"), assistant("A cat.")],
    "text alone": [user("What is two and two?"), assistant("Four.")],
    "a system turn": [{"role": "system", "content": "Be short."}, user("<image>What?"), assistant("A cat.")],
    "several images": [user("<image>One.<image> Two?"), assistant("Yes."), user("And <image>?"), assistant("No.")],
    "empty turns": [user(""), assistant("")],
    "line breaks around": [user("\n\nWhat?\n"), assistant("\n\nHello\n\n\n"), user("\n"), assistant("\n\nNo\n")],
    "line breaks and an image": [user("<image>\nWhat?\n\n"), assistant("\n\nHello")],
    "many alphabets": [user("Grüße  –  你好 🙂"), assistant("  двa\tblanks ")],
}


@dataclass(frozen=True)
class Both:
    """A family's processor of Hugging Face, ours from its folder, and the images' files."""

    theirs: Any
    ours: Processor
    images: list[Path]
    family: str

    @property
    def template(self) -> Any:
        return self.ours.template

    def record(self, turns: list[dict[str, Any]], **others: Any) -> Record:
        images = sum(turn["content"].count(MARKERS["image"]) for turn in turns if isinstance(turn["content"], str))
        beside = [str(path) for path in self.images[:images]]
        return parse({"messages": turns, "images": beside, **others}, "/d.jsonl", 0, Path("/").joinpath)

    def sequence(self, record: Record, prompt: bool = False) -> TokenSequence:
        return self.template.sequence(record, self.ours.tokenizer, self.rows(record), prompt=prompt)

    def rows(self, record: Record) -> np.ndarray:
        """Rows of features of every image, by counting tokens in what the processor makes of each."""
        images = [Image.open(path) for path in record.images]
        place = self.theirs.image_token
        several = self.family == "llava_onevision" and len(images) > 1  # it takes several images in another way
        counts = []
        for image in images:
            if several:
                break
            found = self.theirs(text=[place], images=[[image]])["input_ids"][0]
            counts.append(list(found).count(self.template.image_id(self.ours.tokenizer)))
        if several:
            found = self.theirs(text=[place * len(images)], images=[images])["input_ids"][0]
            counts = [list(found).count(self.template.image_id(self.ours.tokenizer)) // len(images)] * len(images)
        return np.asarray(counts, dtype=np.int64)

    def expected(self, record: Record, prompt: bool = False, mask: bool = False) -> Any:
        turns = list(record.turns)
        if prompt:
            turns = turns[: max(number for number, turn in enumerate(turns) if turn.role == "assistant")]
        images, messages = iter(record.images), []
        for turn in turns:
            content: list[dict[str, Any]] = []
            for number, text in enumerate(turn.texts):
                content += [{"type": "image", "image": Image.open(next(images))}] if number else []
                content += [{"type": "text", "text": text}] if text else []
            empty = "" if turn.others else [{"type": "text", "text": ""}]
            messages.append({"role": turn.role, "content": content or empty, **turn.others})
        more = {"return_assistant_tokens_mask": True} if mask else {}
        found = self.theirs.apply_chat_template(
            messages, tokenize=True, return_dict=True, add_generation_prompt=prompt, **record.others, **more
        )
        return {name: np.asarray(value).reshape(-1) for name, value in found.items() if "input_ids" in name or mask}


def write_images(folder: Path) -> list[Path]:
    """An image of noise in each of the sizes."""
    images = []
    for number, (height, width) in enumerate(SIZES):
        pixels = np.random.default_rng(number).integers(0, 255, (height, width, 3), dtype=np.uint8)
        images.append(folder / f"{number}.png")
        Image.fromarray(pixels).save(images[-1])
    return images
