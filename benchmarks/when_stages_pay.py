"""When a backbone in stages pays: the fastest plans with stages and without, by links and by samples of a step.

python benchmarks/when_stages_pay.py            all cells: some five minutes of one core
python benchmarks/when_stages_pay.py --quick    the first cell alone

Plans that training runs, searched and played by the planner's models on typical samples; nothing is trained, so that
the figures are as good as these models, and depend on no load.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.launch import machine
from benchmarks.modules import ROOT
from benchmarks.report import machine_line, table, write_results
from flowtrain_lightning.allocator import (
    PRECISIONS,
    Cluster,
    SearchSpace,
    named_device,
    named_model,
    typical_workload,
)
from flowtrain_lightning.allocator.modelled_plan import ModelledPlan
from flowtrain_lightning.cli.plan_choice import has_stages, staged_plans, why_plan_cannot_run
from flowtrain_lightning.cli.plan_question import PlanQuestion

_NAME = "when-stages-pay"
_PLAYED = 12
"""Plans that are played of those with stages, by their modelled time, and of those without."""


@dataclass(frozen=True)
class Cell:
    """What is planned for.

    Attributes:
        model: a public one.
        device: of `DEVICES`.
        devices: how many.
        per_node: of these.
        samples: of a step, on each device.
    """

    model: str
    device: str
    devices: int
    per_node: int
    samples: int

    @property
    def question(self) -> PlanQuestion:
        """The question of ``flowtrain plan``."""
        module = named_model(self.model)
        workload = typical_workload(module, global_batch_size=self.samples * self.devices)
        cluster = Cluster(named_device(self.device), self.devices, self.per_node)
        return PlanQuestion(module, cluster, workload, None, PRECISIONS["bf16-true"], None, SearchSpace())


MODULES = (("qwen2.5-vl-7b", "h100", 8), ("qwen2.5-vl-32b", "h100", 16))
CELLS = tuple(Cell(*module, per_node, samples) for module, per_node, samples in product(MODULES, (1, 8), (1, 4, 16)))


def measure(cell: Cell) -> dict[str, Any]:
    """The fastest plan of both kinds, as played."""
    question = cell.question
    whole = [plan for plan in question.running if not has_stages(plan)]
    every = staged_plans(question.costs)
    staged = [plan for plan in every if why_plan_cannot_run(plan, question.problems) is None]
    found: dict[str, Any] = dict(asdict(cell))
    for name, plans in (("whole", whole), ("staged", staged)):
        best = fastest(question, plans)
        if best is not None:
            found[name] = {"seconds": best.seconds, "plan": describe(best)}
    return found


def fastest(question: PlanQuestion, plans: Iterable[ModelledPlan]) -> ModelledPlan | None:
    """The fastest of the most promising plans, of those that could be played."""
    assert question.simulator is not None
    first = sorted(plans, key=lambda plan: plan.seconds)[:_PLAYED]
    played = question.simulator.simulated(first)
    both = [after for before, after in zip(first, played, strict=True) if after is not before]
    return min(both, key=lambda plan: plan.seconds, default=None)


def describe(plan: ModelledPlan) -> str:
    """Placement and layout of the backbone."""
    return f"{plan.kind}, {plan.chosen['backbone'].layout.describe()}"


def text(results: Mapping[str, Any]) -> str:
    """The table: seconds of both plans, the gain, and the layouts."""
    rows = []
    for cell in results["cells"]:
        where = f"{cell['model']}, {cell['devices']} {cell['device']}, {cell['per_node']} a node"
        whole, staged = (cell.get(name, {"seconds": float("nan"), "plan": "none fits"}) for name in ("whole", "staged"))
        gain = f"x {whole['seconds'] / staged['seconds']:.2f}"
        seconds = (f"{one['seconds']:.3g} s" for one in (whole, staged))
        rows.append([where, str(cell["samples"]), *seconds, gain, whole["plan"], staged["plan"]])
    head = ["", "samples a device", "without", "in stages", "gain", "backbone without", "backbone in stages"]
    said = "Seconds of a step of the fastest plan that training runs, with a backbone in stages and without, as played."
    return "\n\n".join([said, table(head, rows), machine_line(results["machine"])]) + "\n"


def main() -> None:
    """Plan, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one cell")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results", help="folder of the results")
    options = parser.parse_args()
    results: dict[str, Any] = {"machine": machine(), "cells": []}
    for cell in CELLS[:1] if options.quick else CELLS:
        results["cells"].append(measure(cell))
        print(results["cells"][-1], flush=True)
        write_results(options.out, _NAME, results, text(results))
    print(f"\n{text(results)}\nWritten to {options.out}.")


if __name__ == "__main__":
    main()
