"""CPU time of the ranks per microbatch, of this checkout beside another one, in turns and measured from outside.

python benchmarks/compare_cpu.py --base CHECKOUT      eight emulated ranks of each checkout, three rounds

Both run their own benchmark. Their ranks' main threads are watched through `/proc`, so that nothing of what either
checkout says of itself counts. What stands for the user's computing, and what the benchmark does to measure, is timed
in both from outside as well, by their common names, and taken off: what is left are the ranks themselves.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
HERE, BASE = "this checkout", "base"

_POLL_SECONDS = 0.1
_TICK = os.sysconf("SC_CLK_TCK")

Sample = tuple[float, float, float]
"""``time.monotonic()``, and user and system seconds of a thread until then."""


def main() -> None:
    """Measure in turns, print, and write ``compare-cpu.md`` and ``.json``."""
    options = _parse()
    if options.run is not None:
        _run(options.run, options.ranks, options.steps, options.quick)
        return
    sys.path.insert(0, str(ROOT))
    from benchmarks.launch import machine
    from benchmarks.report import machine_line, table, write_results

    where, checkouts = machine(), {BASE: options.base.resolve(), HERE: ROOT}
    commits = {name: _commit(checkout) for name, checkout in checkouts.items()}
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in checkouts}
    for number in range(1 if options.quick else options.rounds):
        for name, checkout in checkouts.items():
            runs[name].append(measure(checkout, options.ranks, options.steps, options.quick))
            user, system = (1e3 * runs[name][-1][kind] for kind in ("user_seconds", "system_seconds"))
            print(f"round {number + 1}, {name}: {user:.2f} ms user, {system:.2f} ms system", flush=True)
    text = f"{machine_line(where)}\n\n{table(*_figures(runs, commits, options.ranks))}"
    results = {"machine": where, "commits": commits, "steps": options.steps, "ranks": options.ranks, "runs": runs}
    write_results(options.out, "compare-cpu", results, text)
    print(f"\n{text}")


def _figures(
    runs: dict[str, list[dict[str, float]]], commits: dict[str, str], ranks: int
) -> tuple[list[str], list[list[str]]]:
    """Head and rows of the table: medians over the rounds, and of what each round is to the base's beside it."""
    rows = []
    for name, rounds in runs.items():
        user, system, aside = (median(run[f"{kind}_seconds"] for run in rounds) for kind in ("user", "system", "aside"))
        pairs = list(zip(rounds, runs[BASE], strict=True))
        whole = median(_whole(run) / _whole(base) for run, base in pairs)
        own = median(_own(run) / _own(base) for run, base in pairs)
        figures = [*(f"{1e3 * seconds:.2f}" for seconds in (user, system, user + system)), f"{whole:.2f}"]
        figures += [*(f"{1e3 * seconds:.2f}" for seconds in (aside, median(map(_own, rounds)))), f"{own:.2f}"]
        rows.append([f"{name} ({commits[name]})", *figures])
    head = [f"CPU ms of {ranks} ranks per microbatch", "user", "system", "both", "x base"]
    return [*head, "the benchmark's own", "the ranks themselves", "x base"], rows


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, default=ROOT, help="the other checkout, such as one of `git worktree`")
    parser.add_argument("--ranks", type=int, default=8, help="processes; a quarter encodes")
    parser.add_argument("--rounds", type=int, default=3, help="how often the checkouts take turns")
    parser.add_argument("--steps", type=int, default=16, help="measured steps of each run")
    parser.add_argument("--quick", action="store_true", help="one round of a tiny size; the figures mean nothing")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results", help="folder of the results")
    parser.add_argument("--run", type=Path, help=argparse.SUPPRESS)  # a run of the checkout on the path, into a folder
    return parser.parse_args()


def measure(checkout: Path, ranks: int, steps: int, quick: bool) -> dict[str, float]:
    """User and system seconds of all ranks' main threads, per microbatch, in one run of a checkout."""
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        command = [sys.executable, __file__, "--run", folder, "--ranks", str(ranks), "--steps", str(steps)]
        command += ["--quick"] if quick else []
        environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, env=environment, cwd=checkout, stdout=subprocess.DEVNULL)
        samples: dict[int, list[Sample]] = {}
        while process.poll() is None:
            for rank in _children(process.pid):
                if (sample := _sample(rank)) is not None:
                    samples.setdefault(rank, []).append(sample)
            time.sleep(_POLL_SECONDS)
        if process.returncode != 0:
            raise RuntimeError(f"{checkout} ended with code {process.returncode}; its own output says why.")
        told = json.loads((Path(folder) / "told.json").read_text())
    spent = np.zeros(2)
    for of_rank in samples.values():
        times, *cpu = np.array(of_rank).T
        spent += [np.diff(np.interp(told["window"], times, seconds))[0] for seconds in cpu]
    user, system = (spent / told["microbatches"]).tolist()
    return {"user_seconds": user, "system_seconds": system, "aside_seconds": told["aside"] / told["microbatches"]}


def _run(folder: Path, ranks: int, steps: int, quick: bool) -> None:
    """In a process of its own: one run of the checkout that is first on Python's path."""
    sys.path.pop(0)  # the folder of this script
    from benchmarks.emulate import plan_job, run_schedule

    job = replace(plan_job(ranks, folder, steps, quick), schedule="flowtrain", folder=folder / "run")
    _set_aside(folder)
    run_schedule(job)
    plans = pickle.loads((job.folder / "plans.pickle").read_bytes())[job.warmup :]
    microbatches = sum(len(members) > 0 for plan in plans for rank in plan.microbatches for members in rank)
    start, end = json.loads((job.folder / "rank0.json").read_text())["window"]
    spells = [spell for file in folder.glob("aside*.json") for spell in json.loads(file.read_text())]
    aside = sum(seconds for at, seconds in spells if start < at <= end)
    (folder / "told.json").write_text(
        json.dumps({"window": (start, end), "microbatches": microbatches, "aside": aside})
    )


def _set_aside(folder: Path) -> None:
    """Times what is not the ranks' own, here and in the ranks, which are forks of this process."""
    from benchmarks.emulation import EmulatedVLM, _Encode, _Train
    from benchmarks.measure import Meter
    from benchmarks.schedules import PlanRecorder

    spells: list[tuple[float, float]] = []  # when one ended, and its seconds of this thread's CPU time

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def timing(*args: Any, **settings: Any) -> Any:
            begun = time.thread_time()
            try:
                return function(*args, **settings)
            finally:
                spells.append((time.monotonic(), time.thread_time() - begun))

        return timing

    of_objects = {
        EmulatedVLM: ("encode", "backbone_step", "on_before_optimizer_step"),
        Meter: ("on_train_batch_end",),
        PlanRecorder: ("on_train_batch_start",),
    }
    for kind, names in of_objects.items():
        for name in names:
            setattr(kind, name, timed(getattr(kind, name)))
    for function in (_Encode, _Train):
        function.backward = staticmethod(timed(function.backward))  # type: ignore[method-assign]
    ends = Meter.on_train_end

    def write(meter: Meter, trainer: Any, module: Any) -> None:
        (folder / f"aside{trainer.global_rank}.json").write_text(json.dumps(spells))
        ends(meter, trainer, module)

    Meter.on_train_end = write  # type: ignore[method-assign,assignment]


def _children(parent: int) -> list[int]:
    found = Path(f"/proc/{parent}/task/{parent}/children")
    try:
        return [int(child) for child in found.read_text().split()]
    except OSError:  # it has ended
        return []


def _sample(process: int) -> Sample | None:
    """Of the main thread; the process's other threads load and watch."""
    try:
        fields = Path(f"/proc/{process}/task/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has ended
        return None
    return time.monotonic(), int(fields[11]) / _TICK, int(fields[12]) / _TICK


def _whole(run: dict[str, float]) -> float:
    return run["user_seconds"] + run["system_seconds"]


def _own(run: dict[str, float]) -> float:
    return _whole(run) - run["aside_seconds"]


def _commit(checkout: Path) -> str:
    done = subprocess.run(
        ["git", "log", "-1", "--format=%h"], cwd=checkout, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    main()
