"""Two encoders of unequal cost and a generator: which ranks should each have? Real processes, whose computing is sleep.

python benchmarks/emulate_roles.py             every placement in turns on 8 ranks: about five minutes
python benchmarks/emulate_roles.py --quick     the same at a tiny size, to see that it runs

Compared are ranks of their own (as measuring a module would choose them, and with one rank more or fewer for each other
role), all roles on all ranks, one layout for all as DDP has it (each rank encodes and draws for itself), and ranks of
their own whose backbone waits for a whole step's features. Encoders that share ranks apart from the backbone (mixed) do
not run beside a generator.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ["OMP_NUM_THREADS"] = "1"  # of every process, since many of them share two cores

from benchmarks.launch import launch, machine
from benchmarks.measure import read_ranks
from benchmarks.modules import ROOT
from benchmarks.report import machine_line, table, write_results
from benchmarks.schedules import expect_encoders
from benchmarks.sleeping_roles import GRAPH, SECONDS, RolesJob, roles_data, train, write_scenes
from flowtrain_lightning.allocator import Allocation, choose_placement, default_allocation
from flowtrain_lightning.packing import CostModel
from flowtrain_lightning.packing.cost_model import Observation
from flowtrain_lightning.placement.measured import MeasuredCosts, Processors
from flowtrain_lightning.placement.profile import Profile, ProfileOrigin, RoleProfile
from flowtrain_lightning.placement.run_costs import first_steps

_NAME = "emulate-roles"
_KEPT_BATCHES = 4
_DEADLINE = 240.0


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8, help="processes (default: %(default)s)")
    parser.add_argument("--stretch", type=float, default=1.0, help="times as long as usual that computing takes")
    parser.add_argument("--quick", action="store_true", help="short steps of few samples; the figures mean nothing")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results", help="folder of the results")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="benchmark-") as temporary:
        folder = Path(temporary)
        write_scenes(folder / "data", 64 if options.quick else 1024)
        job = RolesJob(
            data=folder / "data",
            folder=folder,
            ranks=options.ranks,
            stretch=options.stretch * (0.1 if options.quick else 1.0),
            samples=16 if options.quick else 128,
            warmup=1 if options.quick else 2,
            steps=2 if options.quick else 6,
        )
        runs = measured(job)
    results = {"machine": machine(), "ranks": options.ranks, "runs": runs}
    write_results(options.out, _NAME, results, text(results))
    print(f"\n{text(results)}\nWritten to {options.out}.")


def measured(job: RolesJob) -> dict[str, dict[str, Any]]:
    """Name of a placement -> seconds of a step, predicted and measured."""
    costs = MeasuredCosts(
        _profile(job.stretch),
        first_steps(roles_data(job)),
        job.ranks,
        Processors(tuple((rank,) for rank in range(job.ranks)), 1.0),
        _KEPT_BATCHES,
        graph=GRAPH,
    )
    chosen = choose_placement(costs).chosen.allocation
    runs: dict[str, dict[str, Any]] = {}
    for name, allocation in _compared(chosen, costs).items():
        first = name.startswith("batch-synchronous")
        one = replace(job, allocation=allocation, encoder_first=first, folder=job.folder / str(len(runs)))
        one.folder.mkdir()
        expect_encoders(one.folder, job.ranks)
        launch(train, one, job.ranks, one.folder, _DEADLINE)
        ends = read_ranks(one.folder)[0]["ends"]
        seconds = (ends[-1] - ends[job.warmup - 1]) / job.steps
        played = None if first or allocation is None else costs.predict(allocation)
        runs[name] = {"seconds": seconds, "predicted": None if played is None else played.seconds}
        runs[name] |= {"ranks": "" if allocation is None else _in_words(allocation), "chosen": allocation == chosen}
        print(f"{name}: {runs[name]}", flush=True)
    return runs


def _compared(chosen: Allocation, costs: MeasuredCosts) -> dict[str, Allocation | None]:
    """Name -> the allocation that runs; None is DDP."""
    together = default_allocation(chosen.size, "colocated", graph=GRAPH)
    found: dict[str, Allocation | None] = {"all roles on all ranks": together, "one layout for all (DDP)": None}
    apart = [each.allocation for each in costs.predictions() if each.allocation.placement == "separate"]
    best = min(apart, key=lambda each: _seconds(costs, each))
    found["own ranks"] = best
    counts = {role: len(best.ranks[role]) for role in (*GRAPH.producers, *GRAPH.behind)}
    for role, count in counts.items():
        for other in (count - 1, count + 1):
            if other > 0 and sum(counts.values()) - count + other < chosen.size:
                wanted = {**counts, role: other}
                found[f"own ranks, {other} for the {role}"] = default_allocation(
                    chosen.size, "separate", wanted, graph=GRAPH
                )
    found["batch-synchronous, own ranks"] = best
    return found


def _seconds(costs: MeasuredCosts, allocation: Allocation) -> float:
    played = costs.predict(allocation)
    return float("inf") if played is None else played.seconds


def _profile(stretch: float) -> Profile:
    """What measuring would find of halves that sleep."""

    def half(seconds: float) -> RoleProfile:
        cost = CostModel(linear=stretch * seconds, quadratic=0.0, constant=0.0)
        return RoleProfile(cost, True, 1, 4, 0.0, 1 / 3, (Observation(1.0, 1.0, stretch * seconds),))

    origin = ProfileOrigin("a module that sleeps", "a device", {}, {"precision": "32-true"})
    return Profile(origin, {role: half(SECONDS[role]) for role in GRAPH.roles}, 4, behind=GRAPH.behind)


def _in_words(allocation: Allocation) -> str:
    return ", ".join(f"{role} {len(ranks)}" for role, ranks in allocation.ranks.items())


def text(results: dict[str, Any]) -> str:
    """The table, and how far what is chosen is from the best."""
    runs = results["runs"]
    best = min(run["seconds"] for run in runs.values())
    rows = [
        [
            ("> " if run["chosen"] else "  ") + name,
            run["ranks"],
            "" if run["predicted"] is None else f"{run['predicted']:.3f}",
            f"{run['seconds']:.3f}",
            f"{run['seconds'] / best - 1:+.1%}",
        ]
        for name, run in runs.items()
    ]
    chosen = min(run["seconds"] for run in runs.values() if run["chosen"])
    lines = [
        f"{results['ranks']} ranks, two encoders of unequal cost, a backbone and a generator; computing is sleep.",
        machine_line(results["machine"]),
        "",
        table(["placement", "ranks", "predicted s", "measured s", "beside the best"], rows),
        "",
        f"The automatic choice (>) is {chosen / best - 1:.1%} from the best.",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
