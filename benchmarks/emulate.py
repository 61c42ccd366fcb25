"""What the runtime costs over many ranks: real processes, lanes and pool, computing replaced by sleep."""

from __future__ import annotations

import os
import pickle
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks import schedules
from benchmarks.emulated_records import emulated_data, write_records
from benchmarks.emulation import WIDTH, EmulatedCost
from benchmarks.ideal import step_ends
from benchmarks.launch import launch, machine
from benchmarks.measure import read_ranks
from benchmarks.precedence import may_take_precedence
from benchmarks.report import draw_schedules, machine_line, table, write_results
from benchmarks.schedules import SCHEDULES, EmulatedJob
from flowtrain_lightning.callbacks.timeline_recorder import read_timelines

DEADLINE = 900.0
TOKEN_BUDGET = 1024
MICROBATCH_SECONDS = 0.05
ENCODER_SHARE = 0.85
"""Work of an encoder rank to work of a backbone rank: nearly matched, as an allocator would have it."""

_BACKBONE_RANKS_PER_ENCODER = 3
_MICROBATCHES = 8
_FILLED = 0.93  # of the token budget, on average
_BFLOAT16 = 2  # bytes
_ROOM = 1.5  # steps and encoder ranks are not all alike


def emulate(ranks: int, out: Path, rounds: int, steps: int, quick: bool) -> None:
    """All schedules in turns; prints and writes ``emulate-<ranks>``.

    Args:
        ranks: processes, at least 2; a quarter of them encode.
        out: folder of the results.
        rounds: how often the schedules take turns.
        steps: measured steps of each run.
        quick: a tiny size and one round, to see that it runs.
    """
    where = machine()
    runs: dict[str, list[dict[str, float]]] = {schedule: [] for schedule in SCHEDULES}
    timelines = {}
    with tempfile.TemporaryDirectory(prefix="benchmark-") as temporary:
        job = plan_job(ranks, Path(temporary), 2 if quick else steps, quick)
        for number in range(1 if quick else rounds):
            for schedule in SCHEDULES:
                folder = Path(temporary) / f"{schedule}-{number}"
                runs[schedule].append(run_schedule(_scheduled(job, schedule, folder)))
                timelines[SCHEDULES[schedule]] = read_timelines(folder / "timeline")
                told = runs[schedule][-1]
                print(
                    f"round {number + 1}, {schedule}: {told['step_seconds'] * 1e3:.1f} ms a step, ideal "
                    f"{told['ideal_seconds'] * 1e3:.1f} ms, CPU of the ranks per microbatch "
                    f"{told['user_seconds_per_microbatch'] * 1e3:.2f} ms user, "
                    f"{told['system_seconds_per_microbatch'] * 1e3:.2f} ms system"
                )
    text = f"{describe(job)}\n{machine_line(where)}\n\n{schedule_table(runs)}"
    settings = {name: value for name, value in asdict(job).items() if name not in ("schedule", "data", "folder")}
    write_results(out, f"emulate-{ranks}", {"machine": where, "job": settings, "runs": runs}, text)
    draw_schedules(out / f"emulate-{ranks}.png", timelines, job.warmup + job.steps // 2)
    print(f"\n{text}\nWritten to {out}.")


def _scheduled(job: EmulatedJob, schedule: str, folder: Path) -> EmulatedJob:
    only_encode = max(1, job.encoder_ranks // 2) if schedule == "mixed" else job.encoder_ranks
    return replace(job, schedule=schedule, folder=folder, encoder_ranks=only_encode)


def plan_job(ranks: int, temporary: Path, steps: int, quick: bool, encoder_ranks: int | None = None) -> EmulatedJob:
    """Data, and costs by which microbatches take ``MICROBATCH_SECONDS`` and both sides have about the same to do.

    Args:
        ranks: processes.
        temporary: where the data are written, and what a run writes.
        steps: that are measured.
        quick: a tiny size.
        encoder_ranks: between which and the other ranks the work is balanced; by default a quarter.
    """
    encoder_ranks = encoder_ranks or max(1, ranks // (_BACKBONE_RANKS_PER_ENCODER + 1))
    backbone_ranks = ranks - encoder_ranks
    data = temporary / "data"
    write_records(data, 200 if quick else 3000)
    module = emulated_data(data, 1, TOKEN_BUDGET)
    module.setup("fit")
    source = module.train_dataloader().steps.samples.source
    sizes = source.sizes(np.arange(len(source)))
    microbatches = 2 if quick else _MICROBATCHES
    tokens = backbone_ranks * microbatches * TOKEN_BUDGET * _FILLED
    samples = int(tokens / sizes.tokens.mean())
    per_token = MICROBATCH_SECONDS / (TOKEN_BUDGET * _FILLED)
    patches = samples * sizes.media_patches.sum() / len(sizes)
    per_patch = ENCODER_SHARE * MICROBATCH_SECONDS * microbatches * encoder_ranks / patches
    features = samples * sizes.media_rows.sum() / len(sizes) * WIDTH * _BFLOAT16
    return EmulatedJob(
        schedule="flowtrain",
        ranks=ranks,
        encoder_ranks=encoder_ranks,
        cost=EmulatedCost(float(per_patch), per_token),
        data=data,
        folder=temporary,
        global_batch_size=samples,
        token_budget=TOKEN_BUDGET,
        warmup=1 if quick else 4,
        steps=steps,
        step_bytes=int(_ROOM * features / encoder_ranks),
    )


def run_schedule(job: EmulatedJob) -> dict[str, float]:
    """One run: seconds of a step, measured and ideal, and what lanes spent in a step, in seconds per rank.

    ``delay_seconds`` are those of a step in which ranks, all together, could have run but had no processor.
    """
    folder = job.folder
    folder.mkdir(parents=True)
    schedules.expect_encoders(folder, job.encoder_ranks)
    launch(schedules.train, job, job.ranks, folder, DEADLINE)
    ranks = read_ranks(folder)
    ends: list[float] = ranks[0]["ends"]
    plans = pickle.loads((folder / "plans.pickle").read_bytes())
    ideal = step_ends(plans, job.rules)
    measured = (ends[-1] - ends[job.warmup - 1]) / job.steps
    return {
        "step_seconds": measured,
        "ideal_seconds": (ideal[-1] - ideal[job.warmup - 1]) / job.steps,
        "samples_per_second": job.global_batch_size / measured,
        "cores_busy": ranks[0]["cores_busy"],
        "delay_seconds": sum(rank["delay_seconds"] for rank in ranks) / job.steps,
        **_cpu_per_microbatch(ranks),
        **_spent(ranks, job.steps),
    }


def _spent(ranks: list[dict[str, Any]], steps: int) -> dict[str, float]:
    spent = {}
    for role in ("encoder", "backbone"):
        own = [rank["lanes"][role] for rank in ranks if role in rank["lanes"]]
        for kind in ("compute", "stall", "communication"):
            spent[f"{role}_{kind}_seconds"] = sum(kinds.get(kind, 0.0) for kinds in own) / (len(own) * steps)
    return spent


def _cpu_per_microbatch(ranks: list[dict[str, Any]]) -> dict[str, float]:
    """CPU time of all ranks' training threads per microbatch, in seconds; what stands for computing is left out."""
    microbatches = sum(rank["counts"].get("microbatches", 0) for rank in ranks)
    return {
        f"{kind}_seconds_per_microbatch": sum(rank[f"{kind}_seconds"] for rank in ranks) / microbatches
        for kind in ("user", "system")
    }


def describe(job: EmulatedJob) -> str:
    """What was emulated, in words."""
    return (
        f"{job.ranks} ranks ({job.ranks - job.encoder_ranks} backbone + {job.encoder_ranks} encoder where separate), "
        f"{job.global_batch_size} samples a step, microbatches of about {MICROBATCH_SECONDS * 1e3:.0f} ms, "
        f"{WIDTH * _BFLOAT16} bytes per row of features. Computing is sleep; features and gradients are real, checked. "
        + (
            "Ranks run ahead of everything else on the machine, loaders behind."
            if may_take_precedence()
            else "Real-time priorities are not allowed here: ranks wait for cores behind loaders and other programs."
        )
    )


def schedule_table(runs: dict[str, list[dict[str, float]]]) -> str:
    """The schedules side by side, medians over the rounds."""
    base = median(run["step_seconds"] for run in runs["flowtrain"])
    rows = []
    for schedule, name in SCHEDULES.items():
        figures = {key: median(run[key] for run in runs[schedule]) for key in runs[schedule][0]}
        overhead = median(run["step_seconds"] / run["ideal_seconds"] - 1 for run in runs[schedule])
        rows.append(
            [
                name,
                f"{figures['ideal_seconds'] * 1e3:.1f}",
                f"{figures['step_seconds'] * 1e3:.1f}",
                f"{overhead:.1%}",
                f"{figures['samples_per_second']:.0f}",
                f"{base / figures['step_seconds']:.2f}",
                f"{figures['cores_busy']:.1f} of {os.cpu_count()}",
                " + ".join(f"{figures[f'{kind}_seconds_per_microbatch'] * 1e3:.1f}" for kind in ("user", "system")),
            ]
        )
    head = ["schedule", "ideal ms a step", "measured ms", "overhead", "samples/s", "x flowtrain", "cores busy"]
    return table([*head, "ranks' CPU ms per microbatch: user + system"], rows)
