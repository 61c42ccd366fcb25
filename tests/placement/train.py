"""``train.py FOLDER``: two ranks train the tiny module several times and note which allocation they took."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

import flowtrain_lightning as flow
from flowtrain_lightning.allocator import default_allocation
from flowtrain_lightning.callbacks import FlowReplan
from flowtrain_lightning.packing import CostModel
from flowtrain_lightning.placement.profile import read_profile, write_profile
from tests.lightning.run_context import Recorder, half_lengths
from tests.tiny import TinyVLM, tiny_data

FOLDER = Path(sys.argv[1])
RANK = os.environ.get("LOCAL_RANK", "0")
NOTES: dict[str, Any] = {}


def train(
    name: str,
    strategy: Any,
    logger: Any = False,
    resume: Path | None = None,
    weights_only: bool | None = None,
    module: Any = None,
    callbacks: Sequence[L.Callback] = (),
) -> L.Trainer:
    """Train from the same seed, and note what came out."""
    L.seed_everything(7, verbose=False)
    module = module or TinyVLM()
    recorder = Recorder()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_steps=6 if resume else 4,
        logger=logger,
        callbacks=[recorder, *callbacks],
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=FOLDER / name,
    )
    trainer.fit(module, tiny_data(FOLDER), ckpt_path=resume, weights_only=weights_only)
    losses = [event[2] for event in recorder.events if event[0] == "train"]
    NOTES[name] = {
        "allocation": trainer.strategy.allocation.state_dict(),
        "reason": trainer.strategy.placement_decision.reason,
        "losses": losses,
        "lengths": half_lengths(module),
    }
    return trainer


def far_too_slow() -> Path:
    """The profile that was kept, of a backbone that takes minutes for a step, and of optimizers that take a second."""
    (kept,) = FOLDER.glob(".flowtrain/profile.*.json")
    profile = read_profile(kept)
    costs = {"encoder": CostModel(0.01, 0.0, 0.0), "backbone": CostModel(1.0, 0.0, 0.0)}
    roles = {role: replace(half, cost=costs[role], optimizer_seconds=1.0) for role, half in profile.roles.items()}
    path = FOLDER / f"slow-{RANK}.json"
    write_profile(replace(profile, roles=roles), path)
    return path


def main() -> None:
    """All runs, one after another in the same processes."""
    planned = train("planned", "flowtrain", CSVLogger(FOLDER / "planned", name="", version="")).strategy.allocation
    train("kept", "flowtrain", TensorBoardLogger(FOLDER / "kept", name="", version=""))
    train("asked", flow.FlowTrainStrategy(allocation=FOLDER / "planned" / "allocation.yaml"))
    other = default_allocation(2, "colocated" if planned.placement == "separate" else "separate")
    saved, trusted = FOLDER / "saved.ckpt", FOLDER / "trusted.ckpt"
    module = TinyVLM()
    train("other", flow.FlowTrainStrategy(allocation=other), module=module).save_checkpoint(saved)
    train("again", "flowtrain", module=module)
    train("resumed", "flowtrain", resume=saved)
    module.hparams["folder"] = FOLDER  # which torch reads with weights_only=False alone
    train("with a path", flow.FlowTrainStrategy(allocation=other), module=module).save_checkpoint(trusted)
    train("trusted", "flowtrain", resume=trusted, weights_only=False)
    train("by profile", flow.FlowTrainStrategy(profile=far_too_slow()), resume=saved, callbacks=[FlowReplan(steps=2)])
    (FOLDER / f"notes-{RANK}.json").write_text(json.dumps(NOTES))


if __name__ == "__main__":
    main()
