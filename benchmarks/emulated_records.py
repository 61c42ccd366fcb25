"""What emulated runs train on: pictures of one colour, each its number, and texts of one word."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks.modules import TOKENIZER
from flowtrain_lightning.data import FlowDataModule, ImageProcessor, IndexConfig, PackingConfig
from flowtrain_lightning.packing import IntArray, SampleSizes

IMAGES = ImageProcessor(
    patch_size=2, merge_size=2, min_pixels=16, max_pixels=1 << 20, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0)
)


def write_records(
    folder: Path,
    records: int,
    seed: int = 0,
    *,
    sides: IntArray | None = None,
    pictures: Mapping[int, float] | None = None,
    words: tuple[int, int] = (5, 200),
    row_pixels: int = IMAGES.patch_size * IMAGES.merge_size,
    repeated: bool = True,
) -> None:
    """``train.jsonl``, its pictures, and ``pictures.json``: for each record number and rows of its pictures.

    Args:
        folder: where.
        records: how many.
        seed: of what is drawn.
        sides: ``[pictures, 2]`` height and width of the pictures that records choose from, in rows of features; by
            default 256 pictures of 16 to 400 rows.
        pictures: how many a record has -> probability; by default a fifth has none, a fifth has two.
        words: of a text, at least and less than; a word is a token.
        row_pixels: along each side of what becomes one row of features.
        repeated: records choose from all pictures, else each takes the next ones, which no other has.
    """
    folder.mkdir(parents=True, exist_ok=True)
    draw = np.random.default_rng(seed)
    sides = draw.integers(4, 21, (256, 2)) if sides is None else sides
    pictures = pictures or {0: 0.2, 1: 0.6, 2: 0.2}
    rows, pixels = sides.prod(1), sides * row_pixels
    for number, (height, width) in enumerate(pixels.tolist()):
        colour = (0, number >> 8, number & 255)
        Image.new("RGB", (width, height), colour).save(folder / f"{number}.png")
    lines, written, taken = [], [], 0
    for record in range(records):
        count = draw.choice(list(pictures), p=list(pictures.values()))
        chosen = draw.integers(0, len(sides), count).tolist() if repeated else [*range(taken, taken + int(count))]
        taken += int(count)
        text = " ".join(["a"] * int(draw.integers(*words)))
        images = [{"path": f"{n}.png", "h": int(pixels[n, 0]), "w": int(pixels[n, 1])} for n in chosen]
        messages = [
            {"role": "user", "content": "<image>" * len(chosen) + "what?"},
            {"role": "assistant", "content": text},
        ]
        lines.append(json.dumps({"id": str(record), "images": images, "messages": messages}))
        written.append([[number, int(rows[number])] for number in chosen])
    (folder / "train.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "pictures.json").write_text(json.dumps(written))


def emulated_data(
    folder: Path, global_batch_size: int, token_budget: int, packing: PackingConfig | None = None
) -> FlowDataModule:
    """The data module over what `write_records` wrote; a process of its own loads for each rank.

    Args:
        folder: that of `write_records`.
        global_batch_size: samples of a step.
        token_budget: tokens of a microbatch.
        packing: by which steps are packed.
    """
    return FlowDataModule(
        folder / "train.jsonl",
        tokenizer=TOKENIZER,
        images=IMAGES,
        token_budget=token_budget,
        global_batch_size=global_batch_size,
        num_workers=1,
        seed=0,
        index=IndexConfig(cache_dir=folder / "index"),
        packing=packing or PackingConfig(),
        augment=unchanged,
    )


def unchanged(image: Image.Image, generator: np.random.Generator) -> Image.Image:
    """The same picture: what is augmented is encoded for every sample that has it, and so has gradients of one."""
    return image


def sizes_of_records(data: FlowDataModule) -> SampleSizes:
    """Sizes of all records of `emulated_data`, whose pictures are told apart as in training."""
    data.setup("fit")
    source = data.train_dataloader().steps.samples.source
    return replace(source.sizes(np.arange(len(source))), media_content=None)
