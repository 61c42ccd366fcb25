"""A plain PyTorch loop over a Hugging Face model: no engine, no packing, its projector called by its tower."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from flowtrain_lightning.data import PackedMedia
from tests.exactness.data import STEPS, steps_data
from tests.exactness.layouts import SEED
from tests.exactness.reference import samples_of_step
from tests.exactness.train import Recorder, gradients_of, weights_of
from tests.models.tiny import FAMILIES


def train(folder: Path, *, data: str, family: str, frozen: Sequence[str]) -> None:
    """Trains ``STEPS`` steps in float64 and writes what a layout's rank writes."""
    torch.set_default_dtype(torch.float64)
    os.environ["PL_GLOBAL_SEED"] = str(SEED)
    chosen, recorder = FAMILIES[family], Recorder()
    kind = type("Kept", (chosen.kind,), {"projector": ()})
    module = kind(chosen.config, frozen=frozen, lr=1e-2, weight_decay=0.1)
    module.configure_model()
    optimizer = module.configure_optimizers()
    datamodule = steps_data(Path(data), images=chosen.images)
    datamodule.setup("fit")
    dataset = datamodule.train_dataloader().steps
    recorder.initial = weights_of(module)
    for step in range(STEPS):
        module.zero_grad(set_to_none=True)
        losses: list[Tensor] = []
        targets = 0
        for batch, images in samples_of_step(dataset, step):
            loss, tokens = module.backbone_step(batch, _features(module, images), "train")
            losses.append(loss)
            targets += tokens
        total = torch.stack(losses).sum()
        total.backward()
        for weight in module.parameters():
            if weight.grad is not None:
                weight.grad /= targets  # not before: norms of transformers round gradients to float32 on their way
        recorder.gradients.append(gradients_of(module))
        optimizer.step()
        recorder.losses.append(total.item() / targets)
        recorder.weights.append(weights_of(module))
    recorder.save(folder)


def _features(module: torch.nn.Module, images: list[PackedMedia]) -> dict[str, Tensor | tuple[Tensor, ...]]:
    if not images:
        return {}
    encoded = [module.encode(image.with_patches(image.patches.double())) for image in images]
    if isinstance(encoded[0], Tensor):
        return {"image": torch.cat(encoded)}
    return {"image": tuple(torch.cat(level) for level in zip(*encoded, strict=True))}
