"""A backbone in stages beside the best layout without: what the planner says that it gains, and what a run gains.

python benchmarks/stages.py            8 and 16 ranks: eight minutes
python benchmarks/stages.py --quick    8 ranks alone, to see that it runs

One sample a device, each device in a node of its own, so that weights and gradients go over slow links. Real processes
sleep for as long as the planner's model says of their stage, in steps stretched until what the runtime itself needs is
small beside them; features, hidden states and all gradients are real and checked. So this tries the runtime, and not
what the planner claims of GPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ["OMP_NUM_THREADS"] = "1"  # of every process, since all of them share the cores

from benchmarks import laid_out, staged
from benchmarks.emulated_records import emulated_data, sizes_of_records, write_records
from benchmarks.launch import machine
from benchmarks.mixes import screens
from benchmarks.modules import ROOT
from benchmarks.report import machine_line, table, write_results
from benchmarks.run_of_plan import STEPS, TOKEN_BUDGET, WARMUP, run_planned
from flowtrain_lightning.allocator import (
    Cluster,
    ModelledCosts,
    SearchSpace,
    Workload,
    named_device,
    named_model,
    role_problems,
)
from flowtrain_lightning.allocator.modelled_plan import ModelledPlan
from flowtrain_lightning.allocator.role_problem import Problems
from flowtrain_lightning.cli.plan_choice import choose_plans, has_stages
from flowtrain_lightning.placement.drawn_steps import steps_of
from flowtrain_lightning.placement.simulated_plans import PlanSimulator

STAGES, WHOLE = "stages", "without"
CONTENDERS = {STAGES: SearchSpace(), WHOLE: SearchSpace(pipeline=(1,))}
"""The plans that are compared: the recommended one, and the best of those without stages."""

_NAME = "stages"
_PATCH_BUDGET = 16384
_PRECISION = "bf16-true"
_DRAWN = 10
"""Steps that are drawn for the plan."""
_DEADLINE = 600.0  # seconds of a run
_KINDS = ("planned", "simulated", "step")


@dataclass(frozen=True)
class StageCell:
    """What is compared in one line: one sample a device, each of which has a node of its own.

    Attributes:
        model: a public one.
        device: of `DEVICES`.
        ranks: processes, each of which stands for one device.
    """

    model: str
    device: str
    ranks: int

    @property
    def name(self) -> str:
        """Model and devices."""
        return f"{self.model}, {self.ranks} {self.device}"

    def records(self, folder: Path) -> Path:
        """Writes the records: a screen each, with an answer."""
        count = self.ranks * (WARMUP + STEPS)
        write_records(folder, count, sides=screens(), pictures={1: 1.0}, words=(380, 420))
        return folder

    def question(self, data: Path) -> tuple[Problems, PlanSimulator]:
        """What is planned for, with the records' own sizes, and what plays plans on steps of theirs.

        Args:
            data: the folder of `records`.
        """
        sizes = sizes_of_records(emulated_data(data, self.ranks, TOKEN_BUDGET))
        module = named_model(self.model)
        workload = Workload(
            sizes.tokens,
            dict.fromkeys(module.encoders, sizes.media_patches),
            global_batch_size=self.ranks,
            token_budget=TOKEN_BUDGET,
            encoder_budget=_PATCH_BUDGET,
        )
        cluster = Cluster(named_device(self.device), self.ranks, 1)
        problems = role_problems(module, workload, cluster, _PRECISION)
        return problems, PlanSimulator(problems, steps_of(workload, sizes, count=_DRAWN))


CELLS = (
    StageCell("qwen2.5-vl-7b", "l40s", 8),
    StageCell("qwen2.5-vl-32b", "h100", 16),
    StageCell("qwen2.5-vl-72b", "h100", 16),
    StageCell("qwen2.5-vl-32b", "l40s", 16),
)


def plans_of(problems: Problems, simulator: PlanSimulator) -> dict[str, ModelledPlan]:
    """Contender -> the plan that is recommended in its space."""
    costs = {name: ModelledCosts(problems, space) for name, space in CONTENDERS.items()}
    return {name: choose_plans(each, simulator).recommended.chosen for name, each in costs.items()}


def measure(cell: StageCell, folder: Path, seconds: float) -> dict[str, Any]:
    """Plans and runs of one cell.

    Args:
        cell: the cell.
        folder: for what the runs write.
        seconds: of the stretched step of the plan in stages.
    """
    data = cell.records(folder)
    problems, simulator = cell.question(data)
    plans = plans_of(problems, simulator)
    stretch = seconds / plans[STAGES].seconds
    found: dict[str, Any] = {"machine": machine(), "stretch": stretch}
    for name, plan in plans.items():
        run = run_planned(
            plan.allocation(1),
            problems,
            stretch,
            data,
            folder / name,
            samples=cell.ranks,
            deadline=_DEADLINE,
            train=staged.train if has_stages(plan) else laid_out.train,
        )
        found[name] = {"plan": describe(plan), "planned": plan.seconds, **run}
        print(f"{cell.name}, {name}: {found[name]}", flush=True)
    return found


def describe(plan: ModelledPlan) -> str:
    """The plan's layouts, and what they compute again."""
    allocation = plan.allocation(1)
    again = [f"the {role} recomputes ({what})" for role, what in allocation.recompute.items() if what != "none"]
    return "; ".join([allocation.describe(), *again])


def gain(found: Mapping[str, Any], kind: str) -> float:
    """How many times as long a step takes without stages."""
    return float(found[WHOLE][kind] / found[STAGES][kind])


def farthest(found: Mapping[str, Any]) -> float:
    """How far the measured seconds of a contender are from the planned or simulated ones, at most."""
    each = (one["step"] / one[kind] - 1 for one in (found[STAGES], found[WHOLE]) for kind in _KINDS[:2])
    return float(max(map(abs, each)))


def text(results: Mapping[str, Any]) -> str:
    """The table: seconds and gains, planned, simulated and measured, and the layouts."""
    rows = [
        [
            name,
            *(f"{each[STAGES][kind]:.2f} / {each[WHOLE][kind]:.2f}" for kind in _KINDS),
            *(f"x {gain(each, kind):.2f}" for kind in _KINDS),
            f"{farthest(each):.1%}",
            f"{max(each[contender]['runtime'] for contender in CONTENDERS):.1%}",
        ]
        for name, each in results.items()
    ]
    kinds = ("drawn", "own", "run")
    head = ["", *kinds, *(f"gain: {kind}" for kind in kinds), "run beside both", "CPU time of the runtime"]
    layouts = [
        f"- {name}, {contender}: {each[contender]['plan']}"
        for name, each in results.items()
        for contender in CONTENDERS
    ]
    parts = [
        "Seconds of a step of one sample a device, each in a node of its own, with a backbone in stages / in the best "
        "layout without: planned on steps that are *drawn* from the data, planned on the run's *own* steps, and of the "
        "*run*. Ranks sleep for what the planner's model says of their stage, and real hidden states pass between "
        "stages: the runtime is tried, and not the planner's claim.",
        table(head, rows),
        "\n".join(layouts),
        "\n".join(dict.fromkeys(machine_line(each["machine"]) for each in results.values())),
    ]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=12.0, help="of a stretched step (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="8 ranks only")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results", help="folder of the results")
    options = parser.parse_args()
    file = options.out / f"{_NAME}.json"
    results: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    for cell in CELLS[:1] if options.quick else CELLS:
        with tempfile.TemporaryDirectory(prefix="benchmark-") as temporary:
            results[cell.name] = measure(cell, Path(temporary), options.seconds)
        write_results(options.out, _NAME, results, text(results))
    print(f"\n{text(results)}\nWritten to {options.out}.")


if __name__ == "__main__":
    main()
