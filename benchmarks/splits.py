"""Every split of emulated ranks, measured, beside what is predicted of it and the one that is chosen."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

from benchmarks.emulate import plan_job, run_schedule
from benchmarks.emulated_records import emulated_data
from benchmarks.launch import machine
from benchmarks.report import machine_line, table, write_results
from benchmarks.schedules import EmulatedJob
from flowtrain_lightning.allocator import BACKBONE, ENCODER, Allocation, PlacementChoice, choose_placement
from flowtrain_lightning.packing import CostModel
from flowtrain_lightning.packing.step_work import FORWARD_SHARE
from flowtrain_lightning.placement.measured import MeasuredCosts, MeasuredPrediction, Processors
from flowtrain_lightning.placement.profile import Profile, ProfileOrigin, RoleProfile
from flowtrain_lightning.placement.run_costs import first_steps

OPTIMIZER_SECONDS = 0.08
"""Of each half that a rank holds, where it costs something: on a colocated rank twice as much."""

_SCHEDULES = {"colocated": "uniform", "separate": "flowtrain", "mixed": "mixed"}
"""Placement -> the schedule that runs it."""


def compare_splits(ranks: int, out: Path, steps: int, quick: bool) -> None:
    """All allocations of the ranks under several costs; prints and writes ``allocate-<ranks>``."""
    where, results = machine(), {}
    with tempfile.TemporaryDirectory(prefix="benchmark-") as temporary:
        for encoders, optimizer in [(1, 0.0)] if quick else _costs(ranks):
            name = f"{encoders} + {ranks - encoders}" + ("" if optimizer else ", free optimizers")
            folder = Path(temporary) / f"{encoders}-{optimizer}"
            job = plan_job(ranks, folder, 2 if quick else steps, quick, encoders)
            job = replace(job, cost=replace(job.cost, optimizer=optimizer), warmup=1 if quick else 2)
            results[name] = _compare(job)
            print(f"{name}: {results[name]}")
    text = f"{machine_line(where)}\n\n{split_table(results)}"
    write_results(out, f"allocate-{ranks}", {"machine": where, "steps": steps, "costs": results}, text)
    print(f"\n{text}\nWritten to {out}.")


def _costs(ranks: int) -> list[tuple[int, float]]:
    """The encoder ranks for which the work is balanced, and what the optimizer of a half takes."""
    return [
        (max(1, ranks // 8), OPTIMIZER_SECONDS),
        (ranks // 4, OPTIMIZER_SECONDS),
        (ranks // 2, OPTIMIZER_SECONDS),
        (ranks // 4, 0.0),
    ]


def _compare(job: EmulatedJob) -> dict[str, Any]:
    choice = _choose(job)
    measured = {}
    for each in choice.predictions:
        name, allocation = _name(each.allocation), each.allocation
        run = replace(
            job,
            schedule=_SCHEDULES[allocation.placement],
            encoder_ranks=allocation.size - len(allocation.ranks[BACKBONE]),
            folder=job.folder / name.replace(" ", ""),
        )
        measured[name] = run_schedule(run)["step_seconds"]
    return {
        "predicted": {_name(each.allocation): each.seconds for each in choice.predictions},
        "measured": measured,
        "chosen": _name(choice.chosen.allocation),
    }


def _choose(job: EmulatedJob) -> PlacementChoice[MeasuredPrediction]:
    """What a run would choose that has measured these costs."""
    cost = job.cost
    roles = {
        role: RoleProfile(
            cost=CostModel(linear, 0.0, 0.0),
            trains=True,
            parameters=1,
            gradient_bytes=4,
            optimizer_seconds=cost.optimizer,
            forward_share=FORWARD_SHARE,
            measured=(),
        )
        for role, linear in ((ENCODER, cost.per_patch), (BACKBONE, cost.per_token))
    }
    profile = Profile(ProfileOrigin("emulated", "emulated", {}, {}), roles, feature_bytes=0)
    steps = first_steps(emulated_data(job.data, job.global_batch_size, job.token_budget, cost.packing))
    # Ranks sleep, so any number of them share the cores.
    cores = Processors((tuple(range(job.ranks)),), inf)
    return choose_placement(MeasuredCosts(profile, steps, job.ranks, cores, job.kept_batches))


def _name(allocation: Allocation) -> str:
    backbones = len(allocation.ranks[BACKBONE])
    split = f"{allocation.size - backbones} + {backbones}"
    return {"colocated": "colocated", "separate": split, "mixed": f"mixed {split}"}[allocation.placement]


def split_table(results: dict[str, dict[str, Any]]) -> str:
    """A line per cost, a column per allocation: predicted and measured milliseconds."""
    names = list(next(iter(results.values()))["measured"])
    lines = []
    for cost, found in results.items():
        measured, chosen = found["measured"], found["chosen"]
        best = min(measured, key=lambda name: measured[name])
        cells = [f"{1e3 * found['predicted'][name]:.0f} / {1e3 * measured[name]:.0f}" for name in names]
        lines.append([cost, *cells, chosen, best, f"{measured[chosen] / measured[best] - 1:.1%}"])
    return table(["balanced for", *names, "chosen", "fastest", "the chosen one is behind by"], lines)
