"""CPU time of the ranks per microbatch, of this checkout beside another one, in turns and measured from outside.

python benchmarks/compare_cpu.py --base CHECKOUT      eight emulated ranks of each checkout, three rounds

Both run their own benchmark. Their ranks' main threads are watched through `/proc`, so that nothing of what either
checkout says of itself counts. What stands for the user's computing, about the same in both, is part of it, and so is
what the benchmark does to measure. A last column says how much that is, of a checkout whose ranks tell it.
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
from dataclasses import replace
from pathlib import Path
from statistics import median

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
    lines = []
    for name, rounds in runs.items():
        user, system = (median(run[kind] for run in rounds) for kind in ("user_seconds", "system_seconds"))
        ratios = [_whole(run) / _whole(base) for run, base in zip(rounds, runs[BASE], strict=True)]
        figures = [f"{1e3 * user:.2f}", f"{1e3 * system:.2f}", f"{1e3 * (user + system):.2f}", f"{median(ratios):.2f}"]
        asides = [run["aside_seconds"] for run in rounds if "aside_seconds" in run]
        figures.append(f"{1e3 * median(asides):.2f}" if asides else "not told")
        lines.append([f"{name} ({commits[name]})", *figures])
    head = [f"CPU ms of {options.ranks} ranks per microbatch", "user", "system", "both", "x base"]
    head.append("the benchmark's own")
    text = f"{machine_line(where)}\n\n{table(head, lines)}"
    results = {"machine": where, "commits": commits, "steps": options.steps, "ranks": options.ranks, "runs": runs}
    write_results(options.out, "compare-cpu", results, text)
    print(f"\n{text}")


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
    aside = {"aside_seconds": told["aside"] / told["microbatches"]} if told["aside"] is not None else {}
    return {"user_seconds": user, "system_seconds": system, **aside}


def _run(folder: Path, ranks: int, steps: int, quick: bool) -> None:
    """In a process of its own: one run of the checkout that is first on Python's path."""
    sys.path.pop(0)  # the folder of this script
    from benchmarks.emulate import plan_job, run_schedule

    job = replace(plan_job(ranks, folder, steps, quick), schedule="flowtrain", folder=folder / "run")
    run_schedule(job)
    plans = pickle.loads((job.folder / "plans.pickle").read_bytes())[job.warmup :]
    microbatches = sum(len(members) > 0 for plan in plans for rank in plan.microbatches for members in rank)
    measured = [json.loads((job.folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]
    asides = [rank["aside_seconds"] for rank in measured if "aside_seconds" in rank]
    told = {"window": measured[0]["window"], "microbatches": microbatches, "aside": sum(asides) if asides else None}
    (folder / "told.json").write_text(json.dumps(told))


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


def _commit(checkout: Path) -> str:
    done = subprocess.run(
        ["git", "log", "-1", "--format=%h"], cwd=checkout, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    main()
