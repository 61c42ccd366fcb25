"""One module and its data on some ranks: a run of every plan that is compared."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import laid_out
from benchmarks.emulated_records import emulated_data, sizes_of_records, write_records
from benchmarks.laid_out import LaidOutJob
from benchmarks.launch import launch
from benchmarks.layout_plans import KINDS, PER_NODE, RECOMMENDED, SYNCHRONOUS, best_plans, choice_of_a_run, describe
from benchmarks.measure import read_ranks
from benchmarks.mixes import MIXES, Mix
from benchmarks.schedules import expect_encoders
from benchmarks.stretched_costs import StretchedCosts, packing_by
from flowtrain_lightning.allocator import (
    ENCODER,
    Allocation,
    Cluster,
    Layout,
    Workload,
    named_device,
    named_model,
    role_problems,
)
from flowtrain_lightning.allocator.modelled_plan import ModelledPlan
from flowtrain_lightning.allocator.role_problem import Problems
from flowtrain_lightning.placement.layout_costs import ModelledLayoutCosts
from flowtrain_lightning.placement.run_costs import first_steps
from flowtrain_lightning.placement.simulation import simulate

_DEADLINE = 400.0
_TOKEN_BUDGET = 8192
_PATCH_BUDGET = 16384
_BFLOAT16 = 2  # bytes
_MOST_CORES = 0.5  # of all
_ATTEMPTS = 3


@dataclass(frozen=True)
class Cell:
    """What is compared in one line of the table.

    Attributes:
        mix: a key of `MIXES`.
        ranks: processes, each of which stands for one device.
        quick: few samples and short steps.
    """

    mix: str
    ranks: int
    quick: bool = False

    @property
    def name(self) -> str:
        """Mix and ranks."""
        return f"{self.mix}; {self.ranks} ranks"

    @property
    def samples(self) -> int:
        """Of a step."""
        return 8 * self.ranks if self.quick else 256

    @property
    def wanted_seconds(self) -> float:
        """Of the fastest plan's step: the more ranks share the cores, the longer."""
        return 0.5 if self.quick else 0.7 * self.ranks


def measure_cell(cell: Cell, folder: Path) -> dict[str, Any]:
    """Plans and runs of one cell, and which of them would be chosen."""
    mix = MIXES[cell.mix]
    write_records(folder, 200 if cell.quick else 2048, sides=mix.sides, pictures={1: 1.0}, words=mix.words)
    problems = problems_of(mix, cell, folder)
    plans = best_plans(problems)
    stretch = cell.wanted_seconds / min(plan.seconds for plan in plans.values())
    runs: dict[str, Any] = {}
    for kind in KINDS:
        if kind not in plans:
            continue
        said = {"plan": describe(plans[kind]), "predicted": plans[kind].seconds}
        # Where the best layouts of two kinds are equal, it is one run; but none waits for whole steps by itself.
        same = None if kind == SYNCHRONOUS else next((r for r in runs.values() if said.items() <= r.items()), None)
        run = same or _settled_run(cell, problems, plans[kind], stretch, folder, kind)
        runs[kind] = {**run, **said}
        print(f"{cell.name}, {kind}: {runs[kind]}", flush=True)
    simulated = {kind: run["simulated"] for kind, run in runs.items() if "simulated" in run}
    chosen = {"run": choice_of_a_run(plans, simulated), "planner": plans[RECOMMENDED].kind}
    return {"mix": asdict(mix), "samples": cell.samples, "runs": runs, "chosen": chosen}


def problems_of(mix: Mix, cell: Cell, folder: Path) -> Problems:
    """What is planned for: the module on the devices, with the records' own sizes."""
    module = named_model(mix.model)
    if not mix.tower_trains:
        module = module.with_frozen("encoder")
    data = emulated_data(folder, cell.samples, _TOKEN_BUDGET)
    sizes = sizes_of_records(data)
    workload = Workload(
        sizes.tokens,
        dict.fromkeys(module.encoders, sizes.media_patches),
        global_batch_size=cell.samples,
        token_budget=_TOKEN_BUDGET,
        encoder_budget=_PATCH_BUDGET,
    )
    return role_problems(module, workload, Cluster(named_device(mix.device), cell.ranks, PER_NODE))


def _settled_run(
    cell: Cell, problems: Problems, plan: ModelledPlan, stretch: float, folder: Path, kind: str
) -> dict[str, float]:
    """A run in which the ranks need less than half of the cores: times are stretched until it is so."""
    for attempt in range(_ATTEMPTS):
        run = run_plan(cell, problems, plan, stretch, folder, f"{kind}-{attempt}", first=kind == SYNCHRONOUS)
        if run["cores"] < _MOST_CORES or cell.quick:
            break
        stretch *= 2
    return run


def run_plan(
    cell: Cell,
    problems: Problems,
    plan: ModelledPlan,
    stretch: float,
    data: Path,
    name: str,
    *,
    first: bool = False,
) -> dict[str, float]:
    """One run of a plan: seconds of a step, in those of the device, and the share of the cores that ranks took."""
    folder = data / name
    folder.mkdir(parents=True)
    planned = plan.allocation(PER_NODE)
    costs, allocation = ModelledLayoutCosts(problems, planned), as_run(planned)
    expect_encoders(folder, len(allocation.ranks[ENCODER]))
    tokens = problems.load.tokens * cell.samples / problems.load.items
    job = LaidOutJob(
        allocation=allocation,
        costs=StretchedCosts(costs, stretch, encoder_trains=costs.encoder_trains or first),
        packing=packing_by(costs, problems),
        encoder_first=first,
        data=data,
        folder=folder,
        global_batch_size=cell.samples,
        token_budget=_TOKEN_BUDGET,
        warmup=1 if cell.quick else 2,
        steps=2 if cell.quick else 4,
        step_bytes=int(2 * tokens * laid_out.WIDTH * _BFLOAT16),
    )
    run = {**run_job(job), "stretch": stretch}
    return run if first else {**run, "simulated": simulated_seconds(job) / stretch}


def as_run(planned: Allocation) -> Allocation:
    """The allocation of ranks that sleep, in whose costs it is to compute again and to share the optimizer's states."""

    def whole(layout: Layout) -> Layout:
        return replace(layout, shard="replicate") if layout.shard == "zero1" else layout

    return replace(planned, layouts={role: whole(each) for role, each in planned.layouts.items()}, recompute={})


def simulated_seconds(job: LaidOutJob) -> float:
    """Seconds of the job's measured steps, if nothing took time but what its costs say."""
    data = emulated_data(job.data, job.global_batch_size, job.token_budget, job.packing)
    plans = first_steps(data)(job.allocation, job.warmup + job.steps)
    seconds = simulate(plans, job.allocation, job.costs, laid_out.KEPT_BATCHES).seconds
    return float(np.mean(seconds[job.warmup :]))


def run_job(
    job: LaidOutJob, deadline: float = _DEADLINE, train: Callable[[LaidOutJob], None] = laid_out.train
) -> dict[str, float]:
    """Runs a job; see `measured`.

    Args:
        job: what to run.
        deadline: seconds after which it has failed.
        train: what each rank does.
    """
    launch(train, job, job.allocation.size, job.folder, deadline)
    return measured(job)


def measured(job: LaidOutJob) -> dict[str, float]:
    """Seconds of a step, and the shares of the cores and of a rank's time that ranks took.

    ``cores`` counts all processes of the ranks, ``runtime`` the threads that train, without what stands for computing.

    Args:
        job: that has run.
    """
    ranks = read_ranks(job.folder)
    ends = ranks[0]["ends"]
    seconds = ends[-1] - ends[job.warmup - 1]
    busy = sum(rank["family_seconds"] for rank in ranks)
    own = sum(rank["user_seconds"] + rank["system_seconds"] for rank in ranks)
    return {
        "step": seconds / job.steps,
        "cores": busy / seconds / (os.cpu_count() or 1),
        "runtime": own / seconds / len(ranks),
    }
