"""The layouts that must agree, and the Trainer of each."""

from __future__ import annotations

import os
import re
from typing import Any

import lightning as L

import flowtrain_lightning as flow

SEED = 7

DEVICE = os.environ.get("EXACTNESS_DEVICE", "cpu")
"""Where layouts train: with ``"cuda"`` all ranks share one GPU, as `tests.on_a_gpu` asks."""

ALL = ("auto", "ddp 2", "colocated 1", "colocated 2", "1+1", "1+2", "2+1", "2+3", "mixed 1+2")
"""``"1+2"`` is one encoder rank and two backbone ranks; with ``"mixed 1+2"`` the backbone ranks encode too."""


def ranks_of(layout: str) -> int:
    """How many processes a layout needs."""
    return sum(map(int, re.findall(r"(?<![-\d])\d+", layout))) or 1  # but for the number in "deepspeed-2"


def trainer_for(layout: str, *, strategy: dict[str, Any] | None = None, **settings: Any) -> L.Trainer:
    """A quiet Trainer, on the CPU where nothing else is said.

    Args:
        layout: one of ``ALL``, or alike.
        strategy: further arguments of ``FlowTrainStrategy``; ignored by plain layouts.
        settings: of the Trainer.
    """
    kind, _, _ = layout.partition(" ")
    strategy = dict(strategy or {})
    if DEVICE == "cuda":
        settings.setdefault("accelerator", DEVICE)
        if settings["accelerator"] == DEVICE and kind not in ("auto", "ddp"):
            strategy.setdefault("ranks_per_device", ranks_of(layout))
    if isinstance(strategy.get("pool"), dict):  # it came as JSON
        strategy["pool"] = flow.PoolSettings(**strategy["pool"])
    if "roles" in strategy:
        strategy["roles"] = {role: flow.RoleLayout(**wanted) for role, wanted in strategy["roles"].items()}
    chosen: Any
    if kind in ("auto", "ddp"):
        chosen = kind
    elif "allocation" in strategy:
        chosen = flow.FlowTrainStrategy(**strategy)
    elif kind == "colocated":
        chosen = flow.FlowTrainStrategy(placement="colocated", **strategy)
    else:
        placement = "mixed" if kind == "mixed" else "separate"
        only_encode = int(layout.removeprefix("mixed ").split("+")[0])
        chosen = flow.FlowTrainStrategy(encoder_ranks=only_encode, placement=placement, **strategy)
    quiet: dict[str, Any] = {
        "accelerator": "cpu",
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "logger": False,
        "num_sanity_val_steps": 0,
    }
    devices = ranks_of(layout) // strategy.get("ranks_per_device", 1)
    L.seed_everything(SEED, verbose=False)
    return L.Trainer(devices=devices, strategy=chosen, **{**quiet, **settings})
