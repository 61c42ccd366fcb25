"""How long the quickstart will take on this machine, told from a few steps in one process."""

from __future__ import annotations

import os
import time
from statistics import median
from typing import Any

import lightning as L
import torch

from recipes.quickstart.module import QuickstartVLM
from recipes.quickstart.report import QUIET, configuration, data_module

PROCESSES = 2

_STEPS = 5  # the first one is not counted
_STEPS_BESIDE_TRAINING = 90  # validation and the report take as long as so many training steps
_MEASURING_SECONDS = 12.0  # of the halves of the model, before the first step


def sentence(start_seconds: float) -> str:
    """What to expect.

    Args:
        start_seconds: what the start of this process took; those of others take as long.
    """
    torch.set_num_threads(max(1, _cores() // PROCESSES))  # as each of the processes will use
    configured = configuration()
    step_seconds = measured_step_seconds(configured) / min(PROCESSES, _cores())
    steps = configured["trainer"]["max_steps"]
    seconds = 2 * start_seconds + _MEASURING_SECONDS + (steps + _STEPS_BESIDE_TRAINING) * step_seconds
    return (
        f"About {max(1, round(seconds / 60))} min, if the machine stays as busy as it is now (load "
        f"{os.getloadavg()[0]:.1f} on {_cores()} cores): {steps} steps of some {1e3 * step_seconds:.0f} ms, and "
        "what goes before and after them."
    )


def measured_step_seconds(configured: dict[str, Any]) -> float:
    """Seconds of a training step of the whole model in this process."""
    times = _StepTimes()
    trainer = L.Trainer(max_steps=_STEPS, limit_val_batches=0, callbacks=[times], devices=1, **QUIET)
    trainer.fit(QuickstartVLM(**configured["model"]["init_args"]), data_module(configured))
    return median(end - start for start, end in zip(times.ends, times.ends[1:], strict=False))


class _StepTimes(L.Callback):
    """When each step ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_batch_end(self, *arguments: Any) -> None:
        self.ends.append(time.monotonic())


def _cores() -> int:
    return len(os.sched_getaffinity(0))
