"""Fits of wrong modules on one or two ranks, and what they say; run by `Job`s."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L

import flowtrain_lightning as flow
from tests.packing_check import right_modules, wrong_modules
from tests.tiny import tiny_data, write_records


def strategy_of(given: str | dict[str, Any]) -> Any:
    return given if isinstance(given, str) else flow.FlowTrainStrategy(**given)


def trainer_of_a_step(folder: Path, strategy: Any, ranks: int = 1) -> L.Trainer:
    return L.Trainer(
        strategy=strategy,
        devices=ranks,
        accelerator="cpu",
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )


def fit(folder: Path, module: str, strategy: str | dict[str, Any], ranks: int) -> None:
    """Trains a step; writes what refuses it."""
    kind = getattr(wrong_modules, module, None) or getattr(right_modules, module)
    if not (folder / "train.jsonl").exists():
        write_records(folder, 16)
    trainer = trainer_of_a_step(folder, strategy_of(strategy), ranks)
    try:
        trainer.fit(kind(), tiny_data(folder))
    except ValueError as error:
        (folder / f"refused{trainer.global_rank}.txt").write_text(str(error))
