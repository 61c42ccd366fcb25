"""The plain PyTorch loop that every layout of an encoder, a decoder and a generator is held against."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from flowtrain_lightning.data import IGNORED_LABEL, PackedTargets, StepDataset
from flowtrain_lightning.data.batch import GeneratedItem
from flowtrain_lightning.data.loading.collate import pack_media, pack_sequences
from tests.exactness.drawing import ROWS, STEPS, Drawing, drawings
from tests.exactness.layouts import SEED
from tests.exactness.train import Recorder, gradients_of, weights_of
from tests.exactness.two_losses import PLACES, told_places


def train(folder: Path, *, data: str, module: dict[str, Any] | None = None, clip: float | None = None) -> None:
    """Trains ``STEPS`` steps, sample after sample and picture after picture, and writes what a layout's rank writes."""
    torch.set_default_dtype(torch.float64)
    os.environ["PL_GLOBAL_SEED"] = str(SEED)
    model = Drawing(**(module or {}))
    model.configure_model()
    model.log = lambda *_, **__: None
    optimizer = model.configure_optimizers()
    datamodule = drawings(Path(data))
    datamodule.read_as(model)
    datamodule.setup("fit")
    dataset, recorder = datamodule.train_dataloader().steps, Recorder()
    recorder.initial = weights_of(model)
    for step in range(STEPS):
        model.zero_grad(set_to_none=True)
        losses = _step_losses(model, dataset, step)
        weighed = [model.loss_weights[role] * summed / count for role, (summed, count) in losses.items() if count]
        loss = sum(weighed, torch.zeros(()))
        if loss.requires_grad:
            loss.backward()
        recorder.gradients.append(gradients_of(model))
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        recorder.losses.append(loss.item())
        recorder.weights.append(weights_of(model))
    recorder.save(folder)


def _step_losses(model: Drawing, dataset: StepDataset, step: int) -> dict[str, tuple[Tensor, int]]:
    """Half -> the sum of all its losses in a step, and over how many it was taken."""
    said: list[Tensor] = []
    drawn: list[Tensor] = []
    told: list[tuple[Tensor, int]] = []
    targets = values = 0
    loader = dataset.samples
    for place, sample in enumerate(dataset.sampling.step(0, step).tolist()):
        sizes, record = loader.source.sizes(np.array([sample])), loader.source.record(sample)
        rows, names = sizes.media_rows, sizes.media_modality
        sequence = loader.sequence(record, int(sizes.tokens[0]), rows)
        batch = pack_sequences([sequence], [sample], modalities=None if names is None else [names])
        pictures = [loader.media(record, sample, number, int(count), epoch=0) for number, count in enumerate(rows)]
        shown = [pack_media([each]) for number, each in enumerate(pictures) if number not in record.generated]
        features = [model.encode(each.with_patches(each.patches.double()))[0] for each in shown]
        outputs = model.backbone(**model.merge(batch, {"image": torch.cat(features)} if features else {}))
        if model.hparams["says"]:
            said.append(
                functional.cross_entropy(outputs.logits, batch.labels, ignore_index=IGNORED_LABEL, reduction="sum")
            )
            targets += int((batch.labels != IGNORED_LABEL).sum())
        if model.hparams["tells"]:
            told.append(told_places(outputs.logits, batch))
        condition = outputs.hidden[batch.condition_positions].view(-1, ROWS, outputs.hidden.shape[1])
        for number, own in zip(sorted(record.generated), condition, strict=True):
            media = pack_media([pictures[number]])
            items = (GeneratedItem(place, number, ROWS),)
            media = type(media)(
                **{**vars(media), "items": items, "pixels": media.patches.double(), "normalisation": None}
            )
            loss, count = model.generator_loss(PackedTargets(media, SEED, 0, step), own)
            drawn.append(loss)
            values += count
    nothing = torch.zeros(())
    places = {PLACES: (sum((errors for errors, _ in told), nothing), sum(count for _, count in told))} if told else {}
    return {"backbone": (sum(said, nothing), targets), "generator": (sum(drawn, nothing), values), **places}
