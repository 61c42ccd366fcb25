"""What a layout of a role takes: memory of a rank, and CPU seconds beside Lightning's own strategies.

python benchmarks/layouts.py            four processes, seven rounds: about 40 minutes on two cores
python benchmarks/layouts.py --quick    one round of a tiny module, to see that it runs
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any, get_args

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ["OMP_NUM_THREADS"] = "1"  # of every process, since four of them share the cores

from benchmarks import layout_runs
from benchmarks.launch import launch, machine
from benchmarks.layout_runs import LAYOUTS, RANKS, LayoutJob, Side, layer_bytes
from benchmarks.measure import read_ranks
from benchmarks.modules import ROOT, Work
from benchmarks.report import machine_line, table, write_results

DEADLINE = 900.0
"""Seconds for one run, on a machine that may be busy otherwise."""

SIDES: tuple[Side, ...] = get_args(Side)

_COPIES = 4
"""A weight, its gradient and the two states of AdamW, all of them float32."""

_DRAWINGS = ROOT / "recipes/quickstart/data/train.jsonl"


def main() -> None:
    """Measure, print, and write the results."""
    options = parse()
    where, size = machine(), "tiny" if options.quick else "400 MB"
    rounds, steps = (1, 1) if options.quick else (options.rounds, options.steps)
    with tempfile.TemporaryDirectory(prefix="benchmark-") as temporary:
        folder = Path(temporary)
        work = Work(_DRAWINGS, folder / "index", global_batch_size=4 * RANKS)
        work.data().setup("fit")  # writes the index, once for all runs
        memory = {name: _above_empty(folder, work, name, size) for name in options.layouts}
        for name, used in memory.items():
            print(f"{name}: {used / 1e6:.0f} MB a rank", flush=True)
        runs: dict[str, dict[str, list[float]]] = {name: {side: [] for side in SIDES} for name in options.layouts}
        for number in range(rounds):
            for name in options.layouts:
                for side in SIDES if number % 2 == 0 else SIDES[::-1]:
                    job = LayoutJob(side, name, size, work, folder / f"{name}-{side}-{number}", 1, steps)
                    runs[name][side].append(_cpu_per_sample(_run(job)))
                told = " beside ".join(f"{side} {runs[name][side][-1]:.3f}" for side in SIDES)
                print(f"round {number + 1}, {name}: CPU seconds a sample: {told}", flush=True)
            text = f"{machine_line(where)}\n\n{memory_table(memory, size)}\n{time_table(runs)}"
            results = {"machine": where, "steps": steps, "memory": memory, "runs": runs}
            write_results(options.out, "layouts", results, text)  # after every round: they take minutes
    print(f"\n{text}\nWritten to {options.out}.")


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS), metavar="LAYOUT")
    parser.add_argument("--rounds", type=int, default=7, help="how often the variants take turns")
    parser.add_argument("--steps", type=int, default=2, help="measured steps of each run")
    parser.add_argument("--quick", action="store_true", help="one round of a tiny size; the figures mean nothing")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results", help="folder of the results")
    return parser.parse_args()


def _run(job: LayoutJob) -> list[dict[str, Any]]:
    launch(layout_runs.train, job, RANKS, job.folder, DEADLINE)
    return read_ranks(job.folder)


def _cpu_per_sample(ranks: list[dict[str, Any]]) -> float:
    return float(sum(rank["cpu_seconds"] for rank in ranks) / sum(rank["samples"] for rank in ranks))


def _above_empty(folder: Path, work: Work, layout: str, size: str) -> float:
    """Bytes of a rank's peak, above that of the same rank with halves that hold next to nothing; of the fullest."""
    filled, empty = (
        _run(LayoutJob("flowtrain", layout, backbone, work, folder / f"memory-{layout}-{backbone}", 1, 1, True))
        for backbone in (size, "empty")
    )
    return float(max(rank["peak_bytes"] - bare["peak_bytes"] for rank, bare in zip(filled, empty, strict=True)))


def memory_table(memory: dict[str, float], size: str) -> str:
    """What each layout takes, and what it would take if a rank held its share and one gathered block."""
    whole, gathered = layer_bytes(size)
    rows = []
    for name, used in memory.items():
        sharers = LAYOUTS[name].sharers
        expected = _COPIES * whole / sharers + (gathered if sharers > 1 else 0)
        rows.append([name, f"{used / 1e6:.0f}", f"{expected / 1e6:.0f}", f"{used / expected:.2f}"])
    head = [f"backbone of {whole / 1e6:.0f} MB, {RANKS} ranks", "MB of a rank", "its share + one block", "ratio"]
    return table(head, rows)


def time_table(runs: dict[str, dict[str, list[float]]]) -> str:
    """CPU seconds of all ranks per sample, medians, and the ratio within a round with its spread."""
    rows = []
    for name, sides in runs.items():
        ratios = [ours / theirs for ours, theirs in zip(sides["flowtrain"], sides["lightning"], strict=True)]
        peer = LAYOUTS[name].strategy().__class__.__name__
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        figures = [f"{median(sides[side]):.3f}" for side in SIDES]
        rows.append([f"{name}, beside {peer}", *figures, f"{median(ratios):.2f}", spread])
    rounds = len(next(iter(runs.values()))[SIDES[0]])
    head = [f"CPU seconds a sample, {rounds} round{'s' * (rounds > 1)}", *SIDES, "ratio", "from round to round"]
    return table(head, rows)


if __name__ == "__main__":
    main()
