"""Published step times of language models as rows of a table, and what the planner predicts of each."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from flowtrain_lightning.allocator import BACKBONE, PRECISIONS, Cluster, Efficiency, Layout, RoleProblem, named_device
from flowtrain_lightning.allocator.coefficients import COEFFICIENTS, assumed_efficiency
from flowtrain_lightning.allocator.dimensions import backbone
from flowtrain_lightning.allocator.flops import FloatArray
from flowtrain_lightning.allocator.role_layout import Recompute, Sharding
from flowtrain_lightning.allocator.role_problem import Family, family_of
from flowtrain_lightning.allocator.role_time import role_time
from flowtrain_lightning.allocator.workload import RoleLoad

MPT = {
    "mpt-760m": (24, 1536, 12),
    "mpt-1b": (24, 2048, 16),
    "mpt-3b": (32, 2560, 20),
    "mpt-7b": (32, 4096, 32),
    "mpt-13b": (40, 5120, 40),
    "mpt-30b": (48, 7168, 56),
    "mpt-70b": (80, 8192, 64),
}
"""Model -> layers, width and heads (mosaicml/llm-foundry, ``scripts/train/yamls/pretrain``)."""

_BF16_REDUCED = replace(PRECISIONS["bf16-mixed"], reduced=2)
"""llm-foundry's ``mixed_precision: PURE``: gradients are summed in bf16."""


@dataclass(frozen=True)
class PublishedStep:
    """One row of the table.

    Attributes:
        model: a name in `MPT`.
        device: a known device's name.
        devices: how many.
        seconds: of a step, as published.
        what: the rest of the row in a few words.
        problem: the row as a planner's problem.
        family: its layout.
    """

    model: str
    device: str
    devices: int
    seconds: float
    what: str
    problem: RoleProblem
    family: Family

    def predicted(self, efficiency: Efficiency | None = None) -> float:
        """Seconds of a step by the planner's model of time, or by that model with other coefficients."""
        problem = self.problem if efficiency is None else replace(self.problem, efficiency=efficiency)
        return float(role_time(problem, replace(self.family, cut="number")).total[0])


def read_steps(path: Path) -> list[PublishedStep]:
    """The rows of a CSV file with ``model,device,gpus,layout,batch,seq,published_s``."""
    with path.open(newline="", encoding="utf-8") as file:
        return [_step(row) for row in csv.DictReader(file)]


def _step(row: dict[str, str]) -> PublishedStep:
    layers, hidden, heads = MPT[row["model"]]
    half = backbone(
        layers=layers, hidden=hidden, feed_forward=4 * hidden, heads=heads, vocabulary=50368, gated=False, tied=True
    )
    data, shard, recompute, microbatch = (part.strip() for part in row["layout"].split(","))
    sequence, samples = int(row["seq"]), int(microbatch.removeprefix("mbs "))
    load = RoleLoad(
        np.array([sequence]), int(row["batch"]), samples * sequence, 1, forwards=int(row["batch"]) // samples
    )
    device = named_device(row["device"])
    cluster = Cluster(device, int(row["gpus"]), device.per_node)
    problem = RoleProblem(BACKBONE, half, load, False, cluster, _BF16_REDUCED, assumed_efficiency(device, COEFFICIENTS))
    sharding: Sharding = "zero2" if shard == "zero2" else "fsdp"
    again: Recompute = "full" if recompute == "recompute full" else "none"
    return PublishedStep(
        model=row["model"],
        device=row["device"],
        devices=cluster.devices,
        seconds=float(row["published_s"]),
        what=f"{row['layout']}, {sequence} tokens",
        problem=problem,
        family=family_of(Layout(int(data.removeprefix("data ")), shard=sharding), again),
    )


def log_errors(steps: Sequence[PublishedStep]) -> FloatArray:
    """``[steps]`` logarithm of predicted over published."""
    return np.log([step.predicted() / step.seconds for step in steps])
