"""Teaches the quickstart's trained model, which stays as it is, to draw; and shows what it draws of unseen prompts.

python -m recipes.quickstart.run           # once: trains the model that reads the prompts
python -m recipes.metaquery.run
"""

from __future__ import annotations

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import lightning as L
import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from tokenizers import Tokenizer

from flowtrain_lightning import FlowDataModule, FlowTrainStrategy
from flowtrain_lightning.data import ImageProcessor
from recipes.metaquery.module import MetaQuery
from recipes.metaquery.prompts import COLOURS, SIDE, Prompt, dominant_colour, prompts, write_records

CHANCE = 1 / len(COLOURS)
TRAINED = Path("runs/quickstart/checkpoints/best.ckpt")
HELD_OUT = 100
IMAGES = ImageProcessor(
    patch_size=8, merge_size=2, min_pixels=256, max_pixels=4096, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5)
)

_QUIET: Any = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}


class Drawn(NamedTuple):
    """How many drawings of held-out prompts are mostly of the colour that is named.

    Attributes:
        own: by each drawing's own prompt.
        others: by the prompt of another drawing.
        pictures: ``[prompts, side, side, 3]`` by their own prompts.
    """

    own: float
    others: float
    pictures: NDArray[np.uint8]


def train(folder: Path, trained: Path, *, steps: int, devices: int = 2, records: int = 1500) -> Drawn:
    """Makes data, trains on it, and draws what is held out.

    Args:
        folder: for the data.
        trained: the quickstart's checkpoint.
        steps: of training.
        devices: processes, each of which reads and draws; 1 is plain Lightning.
        records: to train on.
    """
    known, unseen = prompts(HELD_OUT)
    choice = np.random.default_rng(1).integers(0, len(known), records)
    given: Any = {"tokenizer": Tokenizer.from_file("recipes/quickstart/tokenizer.json"), "images": IMAGES}
    data = FlowDataModule(
        write_records(folder / "train", [known[number] for number in choice]),
        global_batch_size=32,
        token_budget=1024,
        **given,
    )
    strategy: Any = FlowTrainStrategy(placement="colocated") if devices > 1 else "auto"
    trainer = L.Trainer(accelerator="cpu", devices=devices, strategy=strategy, max_steps=steps, **_QUIET)
    L.seed_everything(1, verbose=False)
    model = MetaQuery(str(trained))
    trainer.fit(model, data)
    pictures = _drawn(model, write_records(folder / "held-out", unseen), given)
    shuffled = [unseen[number] for number in np.random.default_rng(2).permutation(len(unseen))]
    others = _drawn(model, write_records(folder / "shuffled", unseen, shuffled), given)
    return Drawn(_share(pictures, unseen), _share(others, unseen), pictures)


def _drawn(model: MetaQuery, records: Path, given: Any) -> NDArray[np.uint8]:
    """``[records, side, side, 3]`` what the model draws."""
    data = FlowDataModule(val=records, global_batch_size=HELD_OUT, token_budget=8192, **given)
    data.read_as(model)  # which says that pictures may be generated
    data.setup("validate")
    found: dict[int, Any] = {}
    model.eval()
    steps: Any = data.val_dataloader()
    for step in steps:
        for packed in filter(None, step.microbatches):
            with torch.no_grad():
                made = model.draw(model.rows(packed, {}), seed=step.step)
            values = ((made + 1) * 127.5).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()
            found |= dict(zip(packed.samples, values, strict=True))
    return np.stack([found[number] for number in sorted(found)])


def _share(pictures: NDArray[np.uint8], wanted: list[Prompt]) -> float:
    told = zip(pictures, wanted, strict=True)
    return float(np.mean([dominant_colour(picture) == prompt.colour for picture, prompt in told]))


def contact_sheet(pictures: NDArray[np.uint8], path: Path, columns: int = 10) -> None:
    """Writes all pictures as one, in rows."""
    rows = -(-len(pictures) // columns)
    sheet = Image.new("RGB", (columns * (SIDE + 2), rows * (SIDE + 2)), (200, 200, 200))
    for number, picture in enumerate(pictures):
        sheet.paste(Image.fromarray(picture), (number % columns * (SIDE + 2) + 1, number // columns * (SIDE + 2) + 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet.resize((2 * sheet.width, 2 * sheet.height), Image.Resampling.NEAREST).save(path)


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=2, help="processes")
    parser.add_argument("--steps", type=int, default=600, help="of training")
    parser.add_argument("--trained", type=Path, default=TRAINED, help="the quickstart's checkpoint")
    parser.add_argument("--out", type=Path, default=Path("runs/metaquery/drawn.png"), help="what it draws")
    arguments = parser.parse_args()
    if not arguments.trained.exists():
        parser.error(f"there is no {arguments.trained}: python -m recipes.quickstart.run trains it in a few minutes.")
    with TemporaryDirectory() as folder:
        drawn = train(Path(folder), arguments.trained, steps=arguments.steps, devices=arguments.devices)
    contact_sheet(drawn.pictures, arguments.out)
    told = f"Of {HELD_OUT} unseen prompts the named colour dominates in {drawn.own:.0%}"
    print(f"{told}; with prompts shuffled in {drawn.others:.0%} (chance {CHANCE:.0%}). See {arguments.out}.")


if __name__ == "__main__":
    main()
