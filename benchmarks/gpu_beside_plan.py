"""What ``benchmarks/gpu.py`` has measured on one GPU, beside its plan: ``python -m benchmarks.gpu_beside_plan``.

Nothing in the planner was fitted to these runs, in eager code on packed batches. Plans price pictures by their patches,
of which the results tell no number: it is the one with which a step has as many FLOPs as the measured one.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.modules import ROOT
from benchmarks.report import table
from flowtrain_lightning.allocator import ROLES, Allocation, Cluster, Layout, Workload, named_model, role_problems
from flowtrain_lightning.allocator.devices import maker_device
from flowtrain_lightning.allocator.modelled_plan import ModelledPlan, given_plan
from flowtrain_lightning.allocator.role_problem import Problems
from flowtrain_lightning.packing.encoder_batches import ENCODER_BUDGET

RESULTS = ROOT / "benchmarks/results/gpu-qwen2-vl-2b.json"

EAGER = ("loop", "auto")
"""Variants whose layers are not compiled and whose batches are packed."""

_MOST_PATCHES = 1024
"""Of a picture there, see `benchmarks.gpu_model.images_for`."""


@dataclass(frozen=True)
class Measured:
    """A variant that ran.

    Attributes:
        name: of the variant.
        seconds: of a step.
        memory: bytes of tensors at most.
        plan: of the same step.
    """

    name: str
    seconds: float
    memory: float
    plan: ModelledPlan

    @property
    def error(self) -> float:
        """By how much of the measured time the planned one is longer."""
        return self.plan.seconds / self.seconds - 1

    @property
    def in_band(self) -> bool:
        """Whether the measured time is one of the 80 % that are expected."""
        return self.plan.seconds_low <= self.seconds <= self.plan.seconds_high


def read_runs(path: Path = RESULTS) -> list[Measured]:
    """The variants in a file of results that are as a plan assumes them."""
    found = json.loads(path.read_text())
    options, told, runs = found["options"], found["workload"], found["runs"]
    tokens, flops = (told[name] / int(options["steps"]) for name in ("tokens", "flops"))
    plan = planned(options, told["device"], tokens, flops)

    def typical(name: str, figure: str) -> float:
        return float(np.median([each[figure] for each in runs[name]]))

    return [
        Measured(name, tokens / typical(name, "tokens_per_second"), typical(name, "memory"), plan)
        for name in EAGER
        if name in runs
    ]


def planned(options: dict[str, str], maker: str, tokens: float, flops: float) -> ModelledPlan:
    """The plan of steps of so many tokens and FLOPs on one device that keeps all activations."""
    samples = int(options["batch"])
    module, device = named_model(options["model"]), maker_device(maker)
    if device is None:
        raise SystemExit(f"The results are of {maker!r}, which is no known device.")
    cluster = Cluster(device, 1, device.per_node)

    def with_patches(patches: int) -> Problems:
        lengths = {"image": np.full(samples, patches)}
        counts = np.full(samples, round(tokens / samples))
        workload = Workload(counts, lengths, samples, int(options["budget"]), ENCODER_BUDGET)
        return role_problems(module, workload, cluster, "bf16-true")

    def flops_of(patches: int) -> float:
        return sum(problem.model_flops for problem in with_patches(patches).values())

    patches = min(range(4, _MOST_PATCHES + 1, 4), key=lambda each: abs(flops_of(each) - flops))
    ranks = dict.fromkeys(ROLES, (0,))
    allocation = Allocation("colocated", dict.fromkeys(ROLES, Layout(1)), ranks, dict.fromkeys(ROLES, "none"))
    return given_plan(with_patches(patches), allocation)


def main() -> None:
    """Print measured and planned times."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    lines = [
        (
            run.name,
            f"{run.seconds:.3f}",
            f"{run.plan.seconds:.3f} ({run.plan.seconds_low:.2f} to {run.plan.seconds_high:.2f})",
            f"{100 * run.error:+.1f} %",
            f"{run.memory / 2**30:.1f}",
            f"{run.plan.peak_bytes / 2**30:.1f}",
        )
        for run in read_runs()
    ]
    print(table(("variant", "measured s", "planned s (80 % band)", "error", "measured GiB", "planned GiB"), lines))


if __name__ == "__main__":
    main()
