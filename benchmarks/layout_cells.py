"""One module on some ranks: the planner's best placement of every kind, each one run."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from benchmarks import laid_out
from benchmarks.emulated_records import emulated_data, write_records
from benchmarks.laid_out import LaidOutJob
from benchmarks.launch import launch
from benchmarks.measure import read_ranks
from benchmarks.mixes import MIXES, Mix
from benchmarks.modelled_costs import modelled_cost
from benchmarks.schedules import expect_encoders
from flowtrain_lightning.allocator import (
    BACKBONE,
    ENCODER,
    Cluster,
    ModelledCosts,
    NoPlanError,
    SearchSpace,
    Workload,
    choose_placement,
    named_device,
    named_model,
    role_problems,
)
from flowtrain_lightning.allocator.placements import ModelledPlan, Problems
from flowtrain_lightning.cli.plan_choice import choose_plans, why_plan_cannot_run
from flowtrain_lightning.placement.measured import MeasuredCosts

UNSHARDED, SYNCHRONOUS = "uniform, unsharded", "batch-synchronous"

KINDS = (UNSHARDED, "uniform", "colocated", "separate", "mixed", SYNCHRONOUS)
"""What is run: the best plan of every kind; of uniform ones also the best whose weights are not sharded, as Megatron-LM
keeps them; and the separate plan again, in which the backbone waits until a whole step is encoded."""

_DEADLINE = 400.0
_PER_NODE = 8
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
        return 0.5 if self.quick else 0.35 * self.ranks


@dataclass(frozen=True)
class ExactCosts(ModelledCosts):
    """The planner's costs where they are the true ones, so that no faster plan is passed over for a plainer one."""

    margin: ClassVar[float] = 0.0


class CertainChoice:
    """A choice among plans with times that are as sure as those that a run predicts by what it has measured."""

    margin = MeasuredCosts.margin

    def __init__(self, plans: tuple[ModelledPlan, ...]) -> None:
        self._plans = plans

    def predictions(self) -> tuple[ModelledPlan, ...]:
        """The plans."""
        return self._plans


def measure_cell(cell: Cell, folder: Path) -> dict[str, Any]:
    """Plans and runs of one cell, and which of them would be chosen."""
    mix = MIXES[cell.mix]
    write_records(folder, 200 if cell.quick else 2048, sides=mix.sides, pictures={1: 1.0}, words=mix.words)
    problems = problems_of(mix, cell, folder)
    plans, chosen = best_plans(problems)
    stretch = cell.wanted_seconds / min(plan.seconds for plan in plans.values())
    runs: dict[str, Any] = {}
    for kind in KINDS:
        source = "separate" if kind == SYNCHRONOUS else kind
        if source not in plans:
            continue
        plan = plans[source].allocation(_PER_NODE).describe()
        said = {"plan": plan, "predicted": plans[source].seconds}
        # Where the best layouts of two kinds are equal, it is one run; but none is batch-synchronous by itself.
        same = None if kind == SYNCHRONOUS else next((r for r in runs.values() if said.items() <= r.items()), None)
        run = same or _settled_run(cell, problems, plans[source], stretch, folder, kind)
        runs[kind] = {**run, **said}
        print(f"{cell.name}, {kind}: {runs[kind]}", flush=True)
    return {"mix": asdict(mix), "samples": cell.samples, "runs": runs, "chosen": chosen}


def problems_of(mix: Mix, cell: Cell, folder: Path) -> Problems:
    """What is planned for: the module on the devices, with the records' own sizes."""
    module = named_model(mix.model)
    if not mix.tower_trains:
        module = module.with_frozen("encoder")
    data = emulated_data(folder, cell.samples, _TOKEN_BUDGET)
    data.setup("fit")
    source = data.train_dataloader().steps.samples.source
    sizes = source.sizes(np.arange(len(source)))
    workload = Workload(
        sizes.tokens,
        dict.fromkeys(module.encoders, sizes.media_patches),
        global_batch_size=cell.samples,
        token_budget=_TOKEN_BUDGET,
        encoder_budget=_PATCH_BUDGET,
    )
    return role_problems(module, workload, Cluster(named_device(mix.device), cell.ranks, _PER_NODE))


def best_plans(problems: Problems) -> tuple[dict[str, ModelledPlan], dict[str, str]]:
    """The fastest plan of every kind that training runs, and the kind that would be chosen.

    Returns:
        kind -> plan; and the choices, of the planner with its doubts about times and of one without.
    """
    plans = {}
    without_stages = SearchSpace(pipeline=(1,))
    for unsharded in (True, False):
        space = replace(without_stages, shard=("replicate",), context=(1,)) if unsharded else without_stages
        try:
            found = choose_plans(ExactCosts(problems, space)).recommended
        except NoPlanError:
            continue
        for plan in found.predictions:
            if why_plan_cannot_run(plan, problems) is None and (not unsharded or plan.kind == "uniform"):
                plans[UNSHARDED if unsharded else plan.kind] = plan
    free = tuple(plan for kind, plan in plans.items() if kind != UNSHARDED)
    certain = choose_placement(CertainChoice(free)).chosen.kind
    return plans, {"planner": found.chosen.kind, "certain": certain}


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
    allocation = replace(plan.allocation(_PER_NODE), recompute={})  # it is in the costs, and there are no blocks
    expect_encoders(folder, len(allocation.ranks[ENCODER]))
    cost = modelled_cost(problems, plan.chosen, stretch)
    tokens = problems[BACKBONE].load.tokens * cell.samples / problems[BACKBONE].load.items
    job = LaidOutJob(
        allocation=allocation,
        cost=replace(cost, encoder_trains=True) if first else cost,  # whoever trains does not work ahead
        encoder_first=first,
        data=data,
        folder=folder,
        global_batch_size=cell.samples,
        token_budget=_TOKEN_BUDGET,
        warmup=1 if cell.quick else 2,
        steps=2 if cell.quick else 4,
        step_bytes=int(2 * tokens * laid_out.WIDTH * _BFLOAT16),
    )
    return {**run_job(job), "stretch": stretch}


def run_job(job: LaidOutJob) -> dict[str, float]:
    """Seconds of a step, and the share of the cores that ranks took."""
    launch(laid_out.train, job, job.allocation.size, job.folder, _DEADLINE)
    ranks = read_ranks(job.folder)
    ends = ranks[0]["ends"]
    seconds = ends[-1] - ends[job.warmup - 1]
    busy = sum(rank["family_seconds"] for rank in ranks)
    return {"step": seconds / job.steps, "cores": busy / seconds / (os.cpu_count() or 1)}
