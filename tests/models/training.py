"""A training run of a Hugging Face model on any layout, as ranks of a job run it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import flowtrain_lightning as flow
from flowtrain_lightning.data import PackingConfig
from flowtrain_lightning.models import AnyVLM
from flowtrain_lightning.models.liger import Kernels
from flowtrain_lightning.packing import CostModel
from flowtrain_lightning.parallel.blocks import Compile
from flowtrain_lightning.parallel.ranks.connecting import disconnect_groups
from tests.exactness.compare import read_run
from tests.exactness.data import STEPS, steps_data
from tests.exactness.layouts import trainer_for
from tests.exactness.train import Recorder
from tests.models.tiny import FAMILIES
from tests.models.without_a_class import family_of

BY_ANY = " by any"
"""After the name of a family, has the class train it that takes any."""


class SaveAfter(L.Callback):
    """Saves a checkpoint after a step."""

    def __init__(self, step: int, path: Path) -> None:
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step < STEPS:
            trainer.save_checkpoint(self.path)


class Follow(L.Callback):
    """Begins each step with the weights with which another run began it, so that gradients can be compared in all."""

    def __init__(self, run: Path) -> None:
        found = read_run(run)
        self.weights = [found.initial, *found.weights]

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        with torch.no_grad():
            for name, parameter in pl_module.named_parameters():
                parameter.copy_(self.weights[trainer.global_step][name])


def train(
    folder: Path,
    *,
    data: str,
    layout: str,
    family: str,
    precision: str = "64-true",
    accelerator: str = "cpu",
    strategy: dict[str, Any] | None = None,
    roles: dict[str, dict[str, Any]] | None = None,
    adapters: Any = None,
    frozen: Sequence[str] = (),
    frozen_in_bf16: bool = False,
    moves: bool = True,
    compile: Compile = "none",
    recompute: Any = False,
    kernels: Kernels = "none",
    muon: bool = False,
    resumes: str | None = None,
    saves_after: int = STEPS,
    encoder_budget: int | None = None,
    exact_norms: bool = False,
    follows: str = "",
) -> None:
    """Trains ``STEPS`` steps; every rank writes down what it computed, and all checkpoints.

    These are ``last.ckpt`` of the end, and ``middle.ckpt`` of the step that was asked for.

    ``moves`` says whether a projector behind a frozen tower goes to the backbone half, ``muon`` that `MuonAdamW` steps,
    ``exact_norms`` that Llama's norms do not round to float32, ``follows`` which run's weights begin the steps.
    """
    torch.backends.cudnn.allow_tf32 = False  # else convolutions on GPUs keep three digits
    if exact_norms:
        LlamaRMSNorm.forward = _whole_norm
    chosen, recorder = family_of(family.removesuffix(BY_ANY)), Recorder()
    kind: Any = AnyVLM if family.endswith(BY_ANY) else chosen.kind
    kind = kind if moves else type("Kept", (kind,), {"projector": ()})
    if muon:
        kind = type("Muon", (kind,), {"configure_optimizers": lambda module: flow.MuonAdamW(module, lr=1e-2)})
    settings: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "frozen": frozen, "frozen_in_bf16": frozen_in_bf16}
    settings |= {"compile": compile, "recompute": recompute, "kernels": kernels}
    images: dict[str, Any] = {
        "images": chosen.images,
        "token_budget": 160 if family.removesuffix(BY_ANY) in FAMILIES else 512,
    }
    if encoder_budget is not None:
        images["encoder_budget"] = encoder_budget
    if layout.startswith("mixed"):  # more to encode than the ranks can that only encode
        images["packing"] = PackingConfig(media_costs={"encoder": CostModel(4.0, 0.0, 0.0)})
    following = [Follow(Path(follows))] if follows else []
    trainer = trainer_for(
        layout,
        strategy={**(strategy or {}), **({"roles": roles} if roles else {})},
        accelerator=accelerator,
        precision=precision,
        max_steps=STEPS,
        limit_val_batches=0,
        callbacks=[*following, recorder, SaveAfter(saves_after, folder / "middle.ckpt")],
        default_root_dir=folder,
    )
    module = kind(chosen.config, adapters=adapters, **settings)
    trainer.fit(module, datamodule=steps_data(Path(data), **images), ckpt_path=resumes)
    trainer.save_checkpoint(folder / "last.ckpt")
    recorder.save(folder)
    disconnect_groups()


def _whole_norm(norm: LlamaRMSNorm, hidden: Tensor) -> Tensor:
    """Llama's norm, in the numbers of what it gets."""
    scaled: Tensor = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
    return norm.weight * scaled
