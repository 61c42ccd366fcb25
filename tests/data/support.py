"""Data files of small records, a tokenizer whose ids are easy to say by heart, and what loaders and trainers gave."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from PIL import Image

from flowtrain_lightning.data import (
    ChatTemplate,
    FlowDataModule,
    ImageProcessor,
    IndexConfig,
    JsonFile,
    PackingConfig,
    RankShard,
    Record,
    StepBatch,
    StepLoader,
    TokenSteps,
)
from flowtrain_lightning.data.sources.measuring import Measure
from flowtrain_lightning.data.sources.record_store import locations_of

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
TOKEN_STEPS = TokenSteps(microbatches=2, max_delay=2)

SPECIAL = {"<B>": 1, "<S>": 2, "<U>": 3, "<A>": 4, "<E>": 5, "<I>": 6}

WORKERS = pytest.mark.parametrize("workers", [0, 2])


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


MEASURE = Measure(Letters(), TEMPLATE, IMAGES, "error", prompt=False)

# ---- data files ---------------------------------------------------------------------------------------------------


def write_image(path: Path, height: int, width: int, seed: int = 0) -> str:
    """An image of random pixels; returns its path as a record in the folder above names it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return f"{path.parent.name}/{path.name}"


def message_record(number: int, text: str, answer: str, images: list[str]) -> dict:
    return {
        "id": f"r{number}",
        "images": [{"path": image} for image in images],
        "messages": [
            {"role": "user", "content": "<image>" * len(images) + text},
            {"role": "assistant", "content": answer},
        ],
    }


def write_records(path: Path, records: list[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def write_set(path: Path, count: int, first: int = 0) -> Path:
    """Records with 0, 1, 2, 0, 1, 2 ... images of mixed sizes and texts of mixed lengths."""
    records = []
    for number in range(first, first + count):
        images = [
            write_image(path.parent / f"images/{number}_{index}.png", 4 + number % 5, 8 + index * 4, seed=number)
            for index in range(number % 3)
        ]
        records.append(message_record(number, "ask" * (number % 4), f"answer {number}", images))
    return write_records(path, records)


def records_in(file: Path) -> list[Record]:
    """All records of a JSON file."""
    store = JsonFile(file)
    return store.records(0, locations_of(store))


# ---- data modules, loaders and what they give -----------------------------------------------------------------------


def data_module(*files: Any, shard: RankShard | None = None, **changes: Any) -> FlowDataModule:
    """A data module over small records.

    Args:
        files: of training and validation.
        shard: what the rank loads of every step, as a strategy says it.
        changes: settings that differ from the usual; those of ``PackingConfig`` and ``IndexConfig`` by their own names.
    """
    settings: dict[str, Any] = {
        "tokenizer": Letters(),
        "token_budget": 64,
        "global_batch_size": 4,
        "images": IMAGES,
        "template": TEMPLATE,
        "seed": 3,
    }
    for name, section in (("packing", PackingConfig), ("index", IndexConfig)):
        fields = {field: changes.pop(field) for field in section.__dataclass_fields__ if field in changes}
        settings |= {name: section(**fields)} if fields else {}
    data = FlowDataModule(*files, **(settings | changes))
    if shard is not None:
        data.trainer = quiet_trainer()
        data.trainer.strategy.rank_shard = shard
    return data


def read(loader: StepLoader, epoch: int = 0, count: int | None = None) -> list[tuple[int, int, list[int]]]:
    """The names of an epoch's batches, all or the first ``count``."""
    loader.sampler.set_epoch(epoch)
    iterator = iter(loader)
    return named(next(iterator) for _ in range(count)) if count is not None else named(iterator)


def named(batches: Iterable[StepBatch]) -> list[tuple[int, int, list[int]]]:
    """Epoch, step and samples of each batch."""
    return [(batch.epoch, batch.step, batch.plan.samples.tolist()) for batch in batches]


# ---- training runs --------------------------------------------------------------------------------------------------


class Recorder(L.LightningModule):
    """Writes down which samples it is trained and validated on."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.trained, self.validated, self.predicted = [], [], []

    def training_step(self, batch):
        self.trained += named([batch])
        return (self.weight * torch.rand(1)).sum()

    def validation_step(self, batch):
        self.validated.append(batch.plan.samples.tolist())

    def test_step(self, batch):
        assert batch.step < 5

    def predict_step(self, batch):
        self.predicted += [bytes(batch.microbatches[0].tokens.tolist())]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Scheduled(Recorder):
    """Asks for the number of steps while it makes its optimizer."""

    def configure_optimizers(self):
        self.estimate = self.trainer.estimated_stepping_batches
        return super().configure_optimizers()


def quiet_trainer(folder: Path | None = None, **settings: Any) -> L.Trainer:
    """A Trainer that prints and writes nothing by itself."""
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    return L.Trainer(default_root_dir=folder, **(quiet | {"enable_checkpointing": False} | settings))


def trained(folder: Path, data: FlowDataModule, checkpoint: Path | None = None, **settings: Any) -> list:
    """Epoch, step and samples of every batch of a training."""
    model = Recorder()
    quiet_trainer(folder, **settings).fit(model, data, ckpt_path=checkpoint, weights_only=True)
    return model.trained


class SaveAlways(L.Callback):
    """Saves a checkpoint at every moment at which one may be saved; its name ends with the steps done."""

    def __init__(self, folder):
        self.folder = folder

    def save(self, trainer, moment):
        trainer.save_checkpoint(self.folder / f"{moment}-{trainer.global_step}.ckpt")

    def on_train_batch_end(self, trainer, *_):
        self.save(trainer, "batch")

    def on_validation_end(self, trainer, *_):
        self.save(trainer, "validation")

    def on_train_epoch_end(self, trainer, *_):
        self.save(trainer, "epoch")
