"""Experts divided among ranks beside whole ones: what the planner says that it gains, and what a run gains.

python benchmarks/divided_experts.py            8 and 16 ranks: a quarter of an hour
python benchmarks/divided_experts.py --quick    8 ranks alone, to see that it runs

Qwen3-VL-30B-A3B on H100. Real processes sleep for as long as the planner's model says, in steps stretched until what
the runtime itself needs is small beside them; where experts are divided, rows go to all ranks that share them and come
back, in every forward and backward. So this tries the runtime, and not what the planner claims of GPUs.
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

from benchmarks.emulated_records import emulated_data, sizes_of_records, write_records
from benchmarks.launch import machine
from benchmarks.layout_plans import PER_NODE, describe
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
from flowtrain_lightning.cli.plan_choice import choose_plans
from flowtrain_lightning.placement.drawn_steps import steps_of
from flowtrain_lightning.placement.simulated_plans import PlanSimulator

MODEL, DEVICE = "qwen3-vl-30b-a3b", "h100"
DIVIDED, WHOLE = "divided", "whole"
CONTENDERS = {DIVIDED: SearchSpace(), WHOLE: SearchSpace(expert=(1,))}
"""The plans that are compared: the recommended one, and the best without an expert degree."""

_NAME = "divided-experts"
_PATCH_BUDGET = 16384
_SAMPLES = 32  # of a step, for each rank
_DEADLINE = 900.0  # seconds of a run
_KINDS = ("planned", "simulated", "step")


@dataclass(frozen=True)
class ExpertCell:
    """What is compared in one line.

    Attributes:
        ranks: processes, each of which stands for one device.
        seconds: of the stretched step of the plan that divides experts.
    """

    ranks: int
    seconds: float

    @property
    def samples(self) -> int:
        """Of a step."""
        return _SAMPLES * self.ranks

    def records(self, folder: Path) -> Path:
        """Writes the records: screens, each with an answer."""
        write_records(folder, self.samples * (WARMUP + STEPS), sides=screens(), pictures={1: 1.0}, words=(100, 800))
        return folder

    def question(self, data: Path) -> tuple[Problems, PlanSimulator]:
        """What is planned for, with the records' own sizes, and what plays plans on steps of theirs.

        Args:
            data: the folder of `records`.
        """
        sizes = sizes_of_records(emulated_data(data, self.samples, TOKEN_BUDGET))
        module = named_model(MODEL)
        workload = Workload(
            sizes.tokens,
            dict.fromkeys(module.encoders, sizes.media_patches),
            global_batch_size=self.samples,
            token_budget=TOKEN_BUDGET,
            encoder_budget=_PATCH_BUDGET,
        )
        problems = role_problems(module, workload, Cluster(named_device(DEVICE), self.ranks, PER_NODE))
        return problems, PlanSimulator(problems, steps_of(workload, sizes, count=2))


def plans_of(problems: Problems, simulator: PlanSimulator) -> dict[str, ModelledPlan]:
    """Contender -> the plan that is recommended in its space, with the time of the drawn steps.

    Whole experts may fit into the memory of layouts alone that training does not run, which nothing plays by itself.
    """
    costs = {name: ModelledCosts(problems, space) for name, space in CONTENDERS.items()}
    chosen = {name: choose_plans(each, simulator).recommended.chosen for name, each in costs.items()}
    return dict(zip(chosen, simulator.simulated(list(chosen.values())), strict=True))


def measure(cell: ExpertCell, folder: Path) -> dict[str, Any]:
    """Plans and runs of one cell."""
    data = cell.records(folder)
    problems, simulator = cell.question(data)
    plans = plans_of(problems, simulator)
    stretch = cell.seconds / plans[DIVIDED].seconds
    found: dict[str, Any] = {"machine": machine(), "stretch": stretch}
    for name, plan in plans.items():
        run = run_planned(
            plan.allocation(PER_NODE),
            problems,
            stretch,
            data,
            folder / name,
            samples=cell.samples,
            deadline=_DEADLINE,
        )
        found[name] = {"plan": describe(plan), "planned": plan.seconds, **run}
        print(f"{cell.ranks} ranks, {name}: {found[name]}", flush=True)
    return found


def gain(found: Mapping[str, Any], kind: str) -> float:
    """How many times as long a step takes with whole experts."""
    return float(found[WHOLE][kind] / found[DIVIDED][kind])


def text(results: Mapping[str, Any]) -> str:
    """The table: gains planned, simulated and measured, and the layouts."""
    rows = [
        [
            name,
            *(f"{each[DIVIDED][kind]:.2f} / {each[WHOLE][kind]:.2f}" for kind in _KINDS),
            *(f"x {gain(each, kind):.2f}" for kind in _KINDS),
            *(f"{gain(each, 'step') / gain(each, kind) - 1:+.1%}" for kind in _KINDS[:2]),
            f"{max(each[contender]['runtime'] for contender in CONTENDERS):.1%}",
        ]
        for name, each in results.items()
    ]
    kinds = ("drawn", "own", "run")
    head = [
        "",
        *kinds,
        *(f"gain: {kind}" for kind in kinds),
        "run beside drawn",
        "beside own",
        "CPU time of the runtime",
    ]
    layouts = [
        f"- {name}, {contender}: {each[contender]['plan']}"
        for name, each in results.items()
        for contender in CONTENDERS
    ]
    parts = [
        f"Seconds of a step of {MODEL} on {DEVICE}, experts divided / whole: planned on steps that are *drawn* from "
        "the data, planned on the run's *own* steps, and of the *run*. Ranks sleep for what the planner's model says, "
        "and rows pass between ranks that share experts: the runtime is tried, and not the planner's claim.",
        table(head, rows),
        "\n".join(layouts),
        "\n".join(dict.fromkeys(machine_line(each["machine"]) for each in results.values())),
    ]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", nargs="*", type=int, default=[8, 16], help="of each cell (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=30.0, help="of a stretched step (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="8 ranks only")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results", help="folder of the results")
    options = parser.parse_args()
    cells = [ExpertCell(ranks, options.seconds) for ranks in ([8] if options.quick else options.ranks)]
    file = options.out / f"{_NAME}.json"
    results: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    for cell in cells:
        with tempfile.TemporaryDirectory(prefix="benchmark-") as temporary:
            results[f"{cell.ranks} ranks"] = measure(cell, Path(temporary))
        write_results(options.out, _NAME, results, text(results))
    print(f"\n{text(results)}\nWritten to {options.out}.")


if __name__ == "__main__":
    main()
