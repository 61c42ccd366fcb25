"""The packing check where the user asks for it: ``flow.check(module, data)`` and ``flowtrain check``."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import lightning as L

from flowtrain_lightning.compute.quiet_lightning import quiet_lightning
from flowtrain_lightning.data import FlowDataModule
from flowtrain_lightning.packing_check.check import CheckReport, check_packing
from flowtrain_lightning.packing_check.detached_copy import detached_copy
from flowtrain_lightning.packing_check.findings import divided


def check(module: Any, data: FlowDataModule) -> list[str]:
    """Says in which ways packing changes what a module learns.

    Samples of the training data are packed and compared with the same samples one by one, in float64 on the CPU, on a
    copy: the features of every media item, the loss, the number of targets, the gradient of every weight and of every
    feature. A `fit` does the same before its first step.

    Args:
        module: a `FlowModule`, best not built yet.
        data: with training data.

    Returns:
        a sentence for each way, with how much it is and how to mend it, and for each reason why nothing is proven;
        empty where packing changes nothing, and for what the module names in ``couples``.

    Raises:
        DataError: there are no training data, or they cannot be read.
        NotCheckable: the module does not fit into memory, even with one block of every kind.
        Exception: whatever the module's methods raise for one sample alone.
    """
    report = report_of(module, data)
    findings = divided(report.findings, module.couples)[0]
    return [finding.sentence for finding in findings] + [f"nothing is proven: {reason}" for reason in report.unproven]


def report_of(module: Any, data: FlowDataModule, trainer: L.Trainer | None = None) -> CheckReport:
    """All that a check finds; see `check`.

    Args:
        module: see there.
        data: see there.
        trainer: which the module may ask for settings; without one, one of Lightning's defaults.
    """
    alone = data.apart()
    alone.read_as(module)
    alone.prepare_data()
    alone.setup("fit")
    trainer = trainer or _plain_trainer(data)
    copied = detached_copy(module)
    copied.trainer = trainer
    with suppress(Exception):  # what it refuses, a fit says; here it makes what a module may need
        copied.setup("fit")
    return check_packing(copied, alone, trainer)


def _plain_trainer(data: FlowDataModule) -> L.Trainer:
    with quiet_lightning():
        trainer = L.Trainer(
            accelerator="cpu",
            devices=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
    trainer.datamodule = data  # type: ignore[attr-defined]
    return trainer
