"""Trains on pictures that it makes, draws what it was never asked for, and shows that the words decide the colour.

python -m recipes.metaquery.run
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_only
from PIL import Image, ImageDraw
from tokenizers import Tokenizer
from torch import Tensor

from flowtrain_lightning import FlowDataModule, FlowTrainStrategy
from recipes.metaquery.module import IMAGES, Draws, as_pixels
from recipes.metaquery.reading import TOKENIZER
from recipes.metaquery.scenes import COLOURS, HELD_OUT, SIDE, wishes, with_other_prompts, words, write_scenes

CHANCE = 1 / len(COLOURS)
RUN = Path("runs/metaquery")
TAUGHT = Path("runs/quickstart/checkpoints/last.ckpt")
PROMPTS = 100
"""Records that ask afterwards for what words never ask for in training."""
RECORDS, STEPS = 2080, 1800
"""To train on, and how long."""

_QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_model_summary": False,
}


_HELD_OUT_FILES = {"others": "other-prompts", "own": "records"}


class Drawn(NamedTuple):
    """In how many of the pictures the colour dominates that words have named.

    Attributes:
        own: by each record's own words.
        others: by the words of another record.
    """

    own: float
    others: float


def train(
    folder: Path, taught: Path | None, *, records: int, prompts: int, steps: int, devices: int = 2
) -> Drawn | None:
    """Makes data, trains on it, and draws what is held out.

    Args:
        folder: for the data, ``drawing.ckpt`` and ``drawn.png``.
        taught: a checkpoint of the quickstart; None leaves its model untaught.
        records: to train on.
        prompts: to draw from, which ask for what no training record has.
        steps: of training.
        devices: processes; 1 is plain Lightning.

    Returns:
        What was found, in the first process; None in others.
    """
    _make_data(folder, records, prompts)
    _, held_out = wishes(HELD_OUT)
    train_file = folder / "train" / "records.jsonl"
    files = {name: folder / "held-out" / f"{file}.jsonl" for name, file in _HELD_OUT_FILES.items()}
    L.seed_everything(1, verbose=False)
    strategy: Any = FlowTrainStrategy(placement="colocated") if devices > 1 else "auto"
    trainer = L.Trainer(devices=devices, strategy=strategy, max_steps=steps, default_root_dir=folder, **_QUIET)
    trainer.fit(Draws(None if taught is None else str(taught)), _data(train=train_file, global_batch_size=32))
    trainer.save_checkpoint(folder / "drawing.ckpt")
    if dist.is_initialized():
        dist.destroy_process_group()  # or drawing in one process would wait for the others
    if not trainer.is_global_zero:
        return None
    model = Draws.load_from_checkpoint(folder / "drawing.ckpt", taught=None)
    alone = L.Trainer(devices=1, enable_progress_bar=False, **_QUIET)
    found = {}
    for name, file in files.items():
        (told,) = alone.validate(model, _data(val=file, global_batch_size=prompts), verbose=False)
        found[name] = float(told["val_colour"])
    asked = [words(held_out[number % len(held_out)]) for number in range(prompts)]
    show(asked, [model.drawn[number] for number in range(prompts)], folder / "drawn.png")
    return Drawn(found["own"], found["others"])


@rank_zero_only
def _make_data(folder: Path, records: int, prompts: int) -> None:
    """In the first process, before it starts another."""
    trained_on, held_out = wishes(HELD_OUT)
    write_scenes(folder / "train", trained_on, records, seed=1)
    with_other_prompts(write_scenes(folder / "held-out", held_out, prompts, seed=2), seed=3)


def show(asked: list[str], drawn: list[Tensor], path: Path, columns: int = 5, limit: int = 20) -> None:
    """Writes an image of the first pictures, each above the words that asked for it."""
    scale, wide, high = 6, 190, 6 * SIDE + 24
    rows = -(-min(len(drawn), limit) // columns)
    sheet = Image.new("RGB", (columns * wide, rows * high), "white")
    pencil = ImageDraw.Draw(sheet)
    for number, (text, picture) in enumerate(zip(asked[:limit], drawn, strict=False)):
        left, top = number % columns * wide + 8, number // columns * high + 4
        pixels = Image.fromarray(as_pixels(picture[None])[0])
        sheet.paste(pixels.resize((scale * SIDE,) * 2, Image.Resampling.NEAREST), (left, top))
        pencil.text((left, top + scale * SIDE + 3), text.removeprefix("Draw: "), fill="black")
    sheet.save(path)


def _data(**settings: Any) -> FlowDataModule:
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    return FlowDataModule(tokenizer=tokenizer, images=IMAGES, token_budget=1024, **settings)


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--taught", type=Path, default=TAUGHT, help="a checkpoint of the quickstart")
    parser.add_argument("--devices", type=int, default=2, help="processes")
    parser.add_argument("--steps", type=int, default=STEPS, help="of training")
    arguments = parser.parse_args()
    if not arguments.taught.exists():
        parser.error(f"There is no {arguments.taught}. Run `make quickstart` first, or name a checkpoint of it.")
    sizes = {"records": RECORDS, "prompts": PROMPTS, "steps": arguments.steps, "devices": arguments.devices}
    drawn = train(RUN, arguments.taught, **sizes)
    if drawn is not None:
        told = f"Held-out pictures in the colour named: {drawn.own:.0%}; by the words of others: {drawn.others:.0%}"
        print(f"{told} (chance {CHANCE:.0%}). {RUN / 'drawn.png'} shows some.")


if __name__ == "__main__":
    main()
