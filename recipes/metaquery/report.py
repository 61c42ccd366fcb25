"""Looks at what was learned: draws what held-out prompts ask for, and counts how often the named colour dominates.

python -m recipes.metaquery.report [checkpoint]
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from flowtrain_lightning.data import FlowDataModule, ImageProcessor, PackedTargets
from recipes.metaquery.make_data import COLOURS, FOLDER, SIDE
from recipes.metaquery.module import MetaQuery
from recipes.quickstart.colours import main_colours

CHECKPOINT = Path("runs/metaquery/checkpoints/last.ckpt")
SHEET = Path("runs/metaquery/drawn.png")
IMAGES = ImageProcessor(patch_size=8, merge_size=2, min_pixels=256, max_pixels=4096, mean=(0.5,) * 3, std=(0.5,) * 3)
COLUMNS = 10


def main() -> None:
    """Draw, count and show."""
    model = MetaQuery.load_from_checkpoint(sys.argv[1] if len(sys.argv) > 1 else CHECKPOINT, map_location="cpu").eval()
    asked, pictures = drawn(model, held_out(model))
    found = [dominant(picture) for picture in pictures]
    others = np.random.default_rng(0).permutation(len(asked))
    right = sum(name == colour for name, colour in zip(found, asked, strict=True))
    by_chance = sum(found[place] == asked[other] for place, other in enumerate(others))
    sheet(pictures).save(SHEET)
    print(f"{right} of {len(asked)} drawings of held-out prompts have the colour that was named.")
    print(f"{by_chance} have that of another prompt, drawn at random. The drawings: {SHEET}")


def held_out(model: MetaQuery, folder: Path = FOLDER) -> FlowDataModule:
    """The prompts that name pairs which were never trained."""
    data = FlowDataModule(
        val=folder / "val.jsonl",
        token_budget=512,
        global_batch_size=100,
        tokenizer="recipes/quickstart/tokenizer.json",
        images=IMAGES,
        seed=1,
    )
    data.read_as(model)
    data.setup("validate")
    return data


@torch.no_grad()
def drawn(model: MetaQuery, data: FlowDataModule) -> tuple[list[str], list[NDArray[np.uint8]]]:
    """The colour that each prompt names, and ``[SIDE, SIDE, 3]`` what was drawn for it."""
    asked: list[str] = []
    pictures: list[NDArray[np.uint8]] = []
    loader = data.val_dataloader()
    assert not isinstance(loader, list)
    for step in loader:
        for number, batch in enumerate(step.microbatches):
            if batch is None:
                continue
            condition = model.condition(model.backbone(**model.merge(batch, {})), batch)
            ((_, media),) = step.read_by(number)
            items = PackedTargets(media, 1, 0, step.step)
            new = items.with_values(model.draw(items, condition)).images()
            pixels = ((new.permute(0, 2, 3, 1) + 1) * 127.5).round().clamp(0, 255).to(torch.uint8).numpy()
            pictures += list(pixels)
            asked += [data.record("val", sample).id.split()[0] for sample in batch.samples]
    return asked, pictures


def dominant(picture: NDArray[np.uint8]) -> str:
    """The name of the colour that most of what is not white has."""
    pixels = picture.reshape(-1, 3)
    inked = pixels[pixels.min(axis=1) < 160]
    names = [name for name in main_colours(inked) if name in COLOURS]
    return names[0] if names else "white"


def sheet(pictures: list[NDArray[np.uint8]]) -> Image.Image:
    """All pictures on one."""
    rows = -(-len(pictures) // COLUMNS)
    image = Image.new("RGB", (COLUMNS * (SIDE + 4), rows * (SIDE + 4)), "grey")
    for number, pixels in enumerate(pictures):
        place = (number % COLUMNS * (SIDE + 4) + 2, number // COLUMNS * (SIDE + 4) + 2)
        image.paste(Image.fromarray(pixels), place)
    return image


if __name__ == "__main__":
    main()
