"""Two ranks train the tiny module several times, and note which allocation they took."""

from __future__ import annotations

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
from tests.forks import write_down
from tests.lightning.run_context import Recorder, half_lengths
from tests.tiny import TinyVLM, tiny_data


class Runs:
    """Runs in one folder, which holds their data too.

    Attributes:
        notes: name of a run -> what came out.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.notes: dict[str, Any] = {}

    def train(
        self,
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
            default_root_dir=self.folder / name,
        )
        trainer.fit(module, tiny_data(self.folder), ckpt_path=resume, weights_only=weights_only)
        losses = [event[2] for event in recorder.events if event[0] == "train"]
        self.notes[name] = {
            "allocation": trainer.strategy.allocation.state_dict(),
            "reason": trainer.strategy.placement_decision.reason,
            "losses": losses,
            "lengths": half_lengths(module),
        }
        return trainer

    def far_too_slow(self, rank: int) -> Path:
        """The profile that was kept, with minutes for a step of the backbone, and a second for one of an optimizer."""
        (kept,) = self.folder.glob(".flowtrain/profile.*.json")
        profile = read_profile(kept)
        costs = {"encoder": CostModel(0.01, 0.0, 0.0), "backbone": CostModel(1.0, 0.0, 0.0)}
        roles = {role: replace(half, cost=costs[role], optimizer_seconds=1.0) for role, half in profile.roles.items()}
        path = self.folder / f"slow-{rank}.json"
        write_profile(replace(profile, roles=roles), path)
        return path


def make_all_runs(folder: Path) -> None:
    """All runs, one after another in the same processes."""
    runs = Runs(folder)
    planned = runs.train("planned", "flowtrain", CSVLogger(folder / "planned", name="", version="")).strategy.allocation
    runs.train("kept", "flowtrain", TensorBoardLogger(folder / "kept", name="", version=""))
    runs.train("asked", flow.FlowTrainStrategy(allocation=folder / "planned" / "allocation.yaml"))
    other = default_allocation(2, "colocated" if planned.placement == "separate" else "separate")
    saved, trusted = folder / "saved.ckpt", folder / "trusted.ckpt"
    module = TinyVLM()
    trainer = runs.train("other", flow.FlowTrainStrategy(allocation=other), module=module)
    trainer.save_checkpoint(saved)
    slow = runs.far_too_slow(trainer.global_rank)
    runs.train("again", "flowtrain", module=module)
    runs.train("resumed", "flowtrain", resume=saved)
    module.hparams["folder"] = folder  # which torch reads with weights_only=False alone
    runs.train("with a path", flow.FlowTrainStrategy(allocation=other), module=module).save_checkpoint(trusted)
    runs.train("trusted", "flowtrain", resume=trusted, weights_only=False)
    runs.train("by profile", flow.FlowTrainStrategy(profile=slow), resume=saved, callbacks=[FlowReplan(steps=2)])
    write_down(folder, runs.notes)
