"""The plain PyTorch loop that every layout of an eye, an ear and a decoder is held against."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tests.exactness.hearing import GLOBAL_BATCH, MEDIA_IDS, STEPS, Given, Memory, Sample, SeeingAndHearing, module_of
from tests.exactness.layouts import SEED
from tests.exactness.train import Recorder, gradients_of, weights_of

NOT_LEARNED = -1


def train(
    folder: Path,
    *,
    module: dict[str, Any] | None = None,
    clip: float | None = None,
    letters: bool = False,
    divided: bool = False,
    feels: bool = False,
    deep: bool = False,
    precision: str = "64-true",
) -> None:
    """Trains ``STEPS`` steps, sample after sample, and writes what a layout's rank writes."""
    torch.set_default_dtype(torch.float64 if precision == "64-true" else torch.float32)
    os.environ["PL_GLOBAL_SEED"] = str(SEED)
    model = module_of(letters=letters, divided=divided, feels=feels, deep=deep)(**(module or {}))
    model.configure_model()
    optimizer = model.configure_optimizers()
    recorder, samples = Recorder(), Memory(feels=feels).samples
    recorder.initial = weights_of(model)
    for step in range(STEPS):
        model.zero_grad(set_to_none=True)
        pairs = [loss_of(model, sample) for sample in samples[step * GLOBAL_BATCH : (step + 1) * GLOBAL_BATCH]]
        loss = torch.stack([summed for summed, _ in pairs]).sum() / sum(count for _, count in pairs)
        loss.backward()
        recorder.gradients.append(gradients_of(model))
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        recorder.losses.append(loss.item())
        recorder.weights.append(weights_of(model))
    recorder.save(folder)


def loss_of(model: SeeingAndHearing, sample: Sample) -> tuple[Tensor, int]:
    """The summed loss of one sample, and its number of target tokens."""
    tokens: list[int] = []
    learned: list[bool] = []
    rows: list[Tensor] = []
    places: list[int] = []
    media = iter(sample.media)
    for token, is_learned in zip(sample.ids.tolist(), sample.learned.tolist(), strict=True):
        often = 1
        if token in MEDIA_IDS.values():
            encoded = _encoded(model, next(media))
            often = len(encoded)
            rows.append(encoded)
            places += range(len(tokens), len(tokens) + often)
        tokens += [token] * often
        learned += [is_learned] * often
    x = model.backbone.embed(torch.tensor(tokens))
    if rows:
        x = x.index_add(0, torch.tensor(places), torch.cat(rows))
    logits = model.backbone(
        x, torch.arange(len(tokens)), torch.tensor([0, len(tokens)], dtype=torch.int32), len(tokens)
    )
    targets = [token if keep else NOT_LEARNED for token, keep in zip(tokens[1:], learned[1:], strict=True)]
    expected = torch.tensor(targets)
    loss = functional.cross_entropy(logits[:-1], expected, ignore_index=NOT_LEARNED, reduction="sum")
    return loss, int((expected != NOT_LEARNED).sum())


def _encoded(model: SeeingAndHearing, item: Given) -> Tensor:
    length = len(item.values)
    alone = SimpleNamespace(
        modality=item.modality,
        patches=torch.from_numpy(item.values).to(torch.get_default_dtype()),
        cu_seqlens=torch.tensor([0, length], dtype=torch.int32),
        max_seqlen=length,
    )
    (rows,) = model.encode(alone)
    return rows
