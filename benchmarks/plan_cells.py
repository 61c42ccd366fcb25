"""Cells of `emulated_plans.py`: records and a module that are drawn, the plan for them, and a run of that plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import laid_out
from benchmarks.emulated_records import emulated_data, sizes_of_records, write_records
from benchmarks.laid_out import LaidOutJob
from benchmarks.layout_cells import as_run, run_job, simulated_seconds
from benchmarks.layout_plans import describe
from benchmarks.stretched_costs import StretchedCosts
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
from flowtrain_lightning.cli.plan_choice import running_plans
from flowtrain_lightning.data import PackingConfig
from flowtrain_lightning.packing import IntArray
from flowtrain_lightning.placement.drawn_steps import steps_of
from flowtrain_lightning.placement.layout_costs import ModelledLayoutCosts
from flowtrain_lightning.placement.simulated_plans import PlanSimulator

MIXED, CONTEXT, LONG = "mixed", "colocated, context", "few long samples"

KINDS = (MIXED, CONTEXT, LONG)
"""What is looked at: plans in which some ranks only encode, plans whose ranks all encode and share the backbone's
sequences, and of the latter one of four samples of 32,768 tokens on eight ranks."""

_MODELS = ("smolvlm-2.2b", "qwen2-vl-2b", "qwen2.5-vl-3b", "qwen2.5-vl-7b")
_SPACES = {
    MIXED: SearchSpace(pipeline=(1,), shard=("replicate", "fsdp")),
    CONTEXT: SearchSpace(tensor=(1,), pipeline=(1,), context=(2, 4), shard=("replicate", "fsdp")),
    LONG: SearchSpace(tensor=(1,), pipeline=(1,), context=(2,), shard=("fsdp",)),
}
_WARMUP, _STEPS = 2, 10  # context ranks are compared in the first two
_PICTURES = 64
_BFLOAT16 = 2  # bytes


@dataclass(frozen=True)
class PlanCell:
    """A plan and the records that it is for.

    Attributes:
        kind: one of `KINDS`.
        name: kind and number.
        what: the records and the module in a sentence.
        folder: of the records.
        problems: what was planned for.
        plan: of the kind the fastest that training runs.
        planned: seconds of its step as `flowtrain plan` prints them.
    """

    kind: str
    name: str
    what: str
    folder: Path
    problems: Problems
    plan: ModelledPlan
    planned: float

    @property
    def layouts(self) -> str:
        """The plan's ranks and layouts."""
        return describe(self.plan)


@dataclass(frozen=True)
class _Draw:
    """What decides about a cell: see `write_records` for the records."""

    model: str
    device: str
    ranks: int
    frozen: bool
    samples: int
    token_budget: int
    sides: IntArray
    pictures: dict[int, float]
    words: tuple[int, int]

    @property
    def what(self) -> str:
        """In a sentence."""
        rows = self.sides.prod(1)
        return (
            f"{self.model}{', tower frozen,' if self.frozen else ''} on {self.ranks} {self.device}; {self.samples} "
            f"samples a step of up to {max(self.pictures)} pictures of {rows.min()} to {rows.max()} tokens and "
            f"{self.words[0]} to {self.words[1]} words; microbatches of {self.token_budget} tokens."
        )


def drawn_cells(kind: str, folder: Path, count: int, seed: int) -> Iterator[PlanCell]:
    """So many cells of a kind; a draw for which nothing of the kind fits is drawn again.

    Args:
        kind: one of `KINDS`; of the last there is one.
        folder: where records are written.
        count: how many.
        seed: of what is drawn.
    """
    draw, found = np.random.default_rng([seed, KINDS.index(kind)]), 0
    while found < (1 if kind == LONG else count):
        drawn = _few_long() if kind == LONG else _mixed(draw) if kind == MIXED else _shared(draw)
        cell = _cell(kind, found, drawn, folder / f"{KINDS.index(kind)}-{found}")
        if cell is not None:
            found += 1
            yield cell


def measure(cell: PlanCell, seconds: float) -> dict[str, Any]:
    """Run a cell's plan; seconds of a step, in those of the device, and the share of the cores that ranks took.

    Args:
        cell: what to run.
        seconds: of a stretched step.
    """
    planned = cell.plan.allocation(cell.problems.cluster.per_node)
    costs, stretch = ModelledLayoutCosts(cell.problems, planned), seconds / cell.planned
    load, folder = cell.problems.load, cell.folder / "run"
    folder.mkdir()
    job = LaidOutJob(
        allocation=as_run(planned),
        costs=StretchedCosts(costs, stretch, costs.encoder_trains),
        packing=PackingConfig(),  # by no profile, as planned
        encoder_first=False,
        data=cell.folder,
        folder=folder,
        global_batch_size=int(load.items),
        token_budget=load.budget,
        warmup=_WARMUP,
        steps=_STEPS,
        step_bytes=int(2 * load.tokens * laid_out.WIDTH * _BFLOAT16),
    )
    run = run_job(job)
    return {**run, "step": run["step"] / stretch, "simulated": simulated_seconds(job) / stretch, "stretch": stretch}


def _cell(kind: str, number: int, drawn: _Draw, folder: Path) -> PlanCell | None:
    """The records, and the plan for them; None where none of the kind runs."""
    records = drawn.samples * (_WARMUP + _STEPS)
    write_records(folder, records, sides=drawn.sides, pictures=drawn.pictures, words=drawn.words)
    data = emulated_data(folder, drawn.samples, drawn.token_budget)
    sizes = sizes_of_records(data)
    module = named_model(drawn.model)
    if drawn.frozen:
        module = module.with_frozen("encoder")
    media = dict.fromkeys(module.encoders, sizes.media_patches)
    workload = Workload(sizes.tokens, media, drawn.samples, drawn.token_budget)
    device = named_device(drawn.device)
    problems = role_problems(module, workload, Cluster(device, drawn.ranks, device.per_node))
    wanted = "mixed" if kind == MIXED else "colocated"
    running = running_plans(ModelledCosts(problems, _SPACES[kind]))
    plan = next((one for one in running if one.kind == wanted), None)
    if plan is None:
        return None
    (played,) = PlanSimulator(problems, steps_of(workload, sizes)).simulated([plan])
    return PlanCell(kind, f"{kind} {number}", drawn.what, folder, problems, plan, played.seconds)


def _mixed(draw: np.random.Generator) -> _Draw:
    """Few ranks, samples of pictures, mostly large ones, and short texts."""
    ranks, budget = int(draw.choice([3, 4, 6])), int(draw.choice([4096, 8192]))
    return _Draw(
        model=str(draw.choice(_MODELS)),
        device=str(draw.choice(["h100", "h200"])),
        ranks=ranks,
        frozen=draw.random() < 0.3,
        samples=ranks * int(draw.choice([2, 4, 8])),
        token_budget=budget,
        sides=_sides(draw, draw.uniform(5.0, 7.0), draw.uniform(0.1, 0.6), budget // 4),
        pictures={1: 0.7, 2: 0.3},
        words=(20, int(draw.integers(60, 600))),
    )


def _shared(draw: np.random.Generator) -> _Draw:
    """Few samples a rank, of which each is long enough to be shared."""
    ranks = int(draw.choice([4, 8]))
    return _Draw(
        model=str(draw.choice(_MODELS)),
        device="h200",
        ranks=ranks,
        frozen=draw.random() < 0.3,
        samples=int(ranks * draw.choice([0.5, 1.0, 2.0])),
        token_budget=16384,
        sides=_sides(draw, draw.uniform(6.5, 7.5), draw.uniform(0.1, 0.4), 2500),
        pictures={int(count): 1 / 3 for count in draw.choice(np.arange(1, 6), 3, replace=False)},
        words=(100, int(draw.integers(1000, 3000))),
    )


def _few_long() -> _Draw:
    """Four samples of 32,768 tokens on eight ranks that train everything; two thirds of the tokens are pictures'."""
    words = 32768 - 6 * 3600
    return _Draw(
        model="qwen2.5-vl-7b",
        device="h200",
        ranks=8,
        frozen=False,
        samples=4,
        token_budget=32768,
        sides=np.full((1, 2), 60),
        pictures={6: 1.0},
        words=(words - 80, words - 79),
    )


def _sides(draw: np.random.Generator, middle: float, spread: float, most: int) -> IntArray:
    """``[pictures, 2]`` height and width in rows of features, of log-normal areas."""
    rows = np.clip(np.exp(draw.normal(middle, spread, _PICTURES)), 16, most)
    height = np.sqrt(rows * draw.uniform(0.5, 2.0, _PICTURES))
    sides: IntArray = np.maximum(1, np.rint(np.stack([height, rows / height], 1))).astype(np.int64)
    return sides
