"""Trains on drawings and tones that it makes, and shows that the model hears: with tones swapped it is at chance.

python -m recipes.omni.run
"""

from __future__ import annotations

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import lightning as L

from flowtrain_lightning import FlowDataModule, FlowTrainStrategy
from recipes.omni.module import AUDIO, IMAGES, SeesAndHears
from recipes.omni.scenes import PITCHES, tokenizer, with_other_tones, write_scenes

CHANCE = 1 / len(PITCHES)
_TOLD = "val_heard"


class Heard(NamedTuple):
    """How many of the held-out pitches are named right.

    Attributes:
        own: with each record's own tone.
        others: with the tone of another record.
    """

    own: float
    others: float


def train(folder: Path, *, records: int, held_out: int, steps: int, devices: int = 2) -> Heard:
    """Makes data, trains on it, and looks at what is held out.

    Args:
        folder: for the data.
        records: to train on.
        held_out: that the model never sees in training.
        steps: of training.
        devices: processes, each of which sees, hears and reads; 1 is plain Lightning.
    """
    words = tokenizer()
    write_scenes(folder / "train", records, seed=1)
    own = write_scenes(folder / "held-out", held_out, seed=2)
    files = {"train": folder / "train" / "records.jsonl", "own": own, "others": with_other_tones(own, seed=3)}
    strategy: Any = FlowTrainStrategy(placement="colocated") if devices > 1 else "auto"
    quiet: Any = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
    trainer = L.Trainer(
        accelerator="cpu", devices=devices, strategy=strategy, max_steps=steps, enable_progress_bar=False, **quiet
    )
    L.seed_everything(1, verbose=False)
    known = words.get_vocab()
    model = SeesAndHears(len(known), [known[word] for word in PITCHES])
    given: Any = {"tokenizer": words, "images": IMAGES, "audio": AUDIO, "token_budget": 1024}
    trainer.fit(model, FlowDataModule(files["train"], global_batch_size=32, **given))
    found = []
    for name in ("own", "others"):
        (told,) = trainer.validate(model, FlowDataModule(val=files[name], global_batch_size=32, **given), verbose=False)
        found.append(float(told[_TOLD]))
    return Heard(*found)


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=2, help="processes")
    parser.add_argument("--steps", type=int, default=300, help="of training")
    arguments = parser.parse_args()
    with TemporaryDirectory() as folder:
        heard = train(Path(folder), records=2000, held_out=256, steps=arguments.steps, devices=arguments.devices)
    told = f"Held-out pitches named right: {heard.own:.0%}; with the tones of others: {heard.others:.0%}"
    print(f"{told} (chance {CHANCE:.0%}).")


if __name__ == "__main__":
    main()
