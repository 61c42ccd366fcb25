"""The plain PyTorch loop that all layouts are held against: no engine, no packing, one sample after another."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from flowtrain_lightning.data import IGNORED_LABEL, PackedBatch, PackedMedia, StepDataset
from flowtrain_lightning.data.loading.collate import pack_media, pack_sequences
from tests.exactness.compare import read_run
from tests.exactness.data import STEPS, steps_data
from tests.exactness.layouts import DEVICE, SEED
from tests.exactness.mixture import PlainBalance
from tests.exactness.modules import KINDS
from tests.exactness.train import Named, Recorder, gradients_of, weights_of
from tests.exactness.two_losses import PLACES, told_places
from tests.tiny import TinyVLM


def train(
    folder: Path,
    *,
    data: str,
    precision: str = "64-true",
    clip: float | None = None,
    kind: str = "tiny",
    module: dict[str, Any] | None = None,
    follows: str = "",
) -> None:
    """Trains ``STEPS`` steps and writes what a layout's rank writes.

    With ``follows``, the folder of a run, each step begins with the weights with which that run began it: its gradients
    can then be compared in every step, whatever an optimizer made of rounding in those before.
    """
    torch.set_default_dtype({"64-true": torch.float64, "32-true": torch.float32}[precision])
    os.environ["PL_GLOBAL_SEED"] = str(SEED)
    model = KINDS[kind](**(module or {}))
    with torch.device(DEVICE):  # where layouts draw their weights
        model.configure_model()
    model.cpu()
    configured = model.configure_optimizers()
    optimizer, scheduler = configured["optimizer"], configured["lr_scheduler"]["scheduler"]
    datamodule = steps_data(Path(data))
    datamodule.setup("fit")
    dataset = datamodule.train_dataloader().steps
    recorder = Recorder()
    recorder.initial = weights_of(model)
    balance = PlainBalance(model)
    led = [recorder.initial, *read_run(Path(follows)).weights] if follows else []
    for step in range(STEPS):
        if led:
            _take(model, led[step])
        model.zero_grad(set_to_none=True)
        loss = _step_loss(model, dataset, step)
        loss.backward()
        recorder.gradients.append(gradients_of(model))
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        scheduler.step()
        balance.step()
        recorder.losses.append(loss.item())
        recorder.weights.append(weights_of(model))
    recorder.save(folder)


def _take(model: TinyVLM, weights: Named) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])


def _step_loss(model: TinyVLM, dataset: StepDataset, step: int) -> Tensor:
    """The sum of all samples' losses over the number of all target tokens; of further losses likewise, weighed."""
    losses, targets = [], 0
    places: list[tuple[Tensor, int]] = []
    for sequence, pictures in samples_of_step(dataset, step):
        features = _encode(model, pictures)
        logits = model.backbone(**model.merge(sequence, features))
        losses.append(functional.cross_entropy(logits, sequence.labels, ignore_index=IGNORED_LABEL, reduction="sum"))
        targets += int((sequence.labels != IGNORED_LABEL).sum())
        places += [told_places(logits, sequence)] * (PLACES in model.loss_weights)
    words, count = torch.stack(losses).sum() / targets, sum(number for _, number in places)
    if not places:
        return words
    told = sum(errors for errors, _ in places) / max(count, 1)
    return model.loss_weights["backbone"] * words + model.loss_weights[PLACES] * told


def samples_of_step(dataset: StepDataset, step: int) -> Iterator[tuple[PackedBatch, list[PackedMedia]]]:
    """Each sample of a step as a microbatch of its own, with its pictures as encoder batches of their own."""
    loader = dataset.samples
    for sample in dataset.sampling.step(0, step).tolist():
        sizes = loader.source.sizes(np.array([sample]))
        record = loader.source.record(sample)
        sequence = loader.sequence(record, int(sizes.tokens[0]), sizes.media_rows)
        pictures = [
            loader.media(record, sample, number, rows, epoch=0) for number, rows in enumerate(sizes.media_rows.tolist())
        ]
        yield pack_sequences([sequence], [sample]), [pack_media([picture]) for picture in pictures]


def _encode(model: TinyVLM, pictures: list[PackedMedia]) -> dict[str, Any]:
    if not pictures:
        return {}
    dtype = torch.get_default_dtype()
    encoded = [model.encode(picture.with_patches(picture.patches.to(dtype))) for picture in pictures]
    levels = tuple(torch.cat(level) for level in zip(*encoded, strict=True))
    return {"image": levels}
