"""Samples per second of flowtrain beside Lightning's DDP, on this machine.

python benchmarks/train.py                 four variants, three modules, two processes: about half an hour
python benchmarks/train.py --emulate 8     the runtime's overhead over 8 ranks whose computing is sleep: minutes
python benchmarks/train.py --quick         any of the two at a tiny size, to see that it runs
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ["OMP_NUM_THREADS"] = "1"  # of every process, since two of them share two cores

from benchmarks import variants
from benchmarks.emulate import emulate
from benchmarks.launch import launch, machine
from benchmarks.measure import read_ranks, throughput
from benchmarks.modules import ROOT, Work, training_records
from benchmarks.report import draw_bars, machine_line, table, write_results
from benchmarks.variants import VARIANTS, Job

BALANCES = ("1:4", "1:1", "3:1")
"""The modules that are trained."""

DEADLINE = 900.0
"""Seconds for one run, on a machine that may be busy otherwise."""

Runs = dict[str, dict[str, list[dict[str, float]]]]
"""Module -> variant -> figures of each round."""


def main() -> None:
    """Measure, print, and write the results."""
    options = parse()
    if options.emulate:
        emulate(options.emulate, options.out, options.rounds, options.steps, options.quick)
    else:
        train(options.out, options.rounds, options.steps, options.quick)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--emulate", type=int, metavar="N", help="emulate N ranks, from 2")
    parser.add_argument("--rounds", type=int, default=3, help="how often the variants take turns")
    parser.add_argument("--steps", type=int, default=24, help="measured steps of each run")
    parser.add_argument("--quick", action="store_true", help="one round of a tiny size; the figures mean nothing")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results", help="folder of the results")
    return parser.parse_args()


def train(out: Path, rounds: int, steps: int, quick: bool) -> None:
    """Four variants of three modules in turns."""
    modules = ["tiny"] if quick else list(BALANCES)
    where, records = machine(), training_records()
    runs: Runs = {module: {variant: [] for variant in VARIANTS} for module in modules}
    with tempfile.TemporaryDirectory(prefix="benchmark-") as temporary:
        Work(records, Path(temporary) / "index").data().setup("fit")  # writes the index, once for all runs
        for number in range(1 if quick else rounds):
            for module in modules:
                for variant in VARIANTS:
                    folder = Path(temporary) / f"{module}-{variant}-{number}".replace(":", "-")
                    job = Job(
                        variant=variant,
                        module=module,
                        records=records,
                        folder=folder,
                        cache=Path(temporary) / "index",
                        warmup=1 if quick else 4,
                        steps=2 if quick else steps,
                        global_batch_size=8 if quick else 32,
                    )
                    launch(variants.train, job, 2, folder, DEADLINE)
                    figures = throughput(read_ranks(folder))
                    runs[module][variant].append(figures)
                    print(f"round {number + 1}, {module}, {variant}: {figures['samples_per_second']:.1f} samples/s")
    text = f"{machine_line(where)}\n\n" + "\n".join(module_table(module, runs[module]) for module in modules)
    results = {"machine": where, "records": records.name, "steps": steps, "runs": runs}
    write_results(out, "train", results, text)
    medians = {m: {v: typical(runs[m][v])["samples_per_second"] for v in VARIANTS} for m in modules}
    draw_bars(out / "train.png", medians, VARIANTS, "samples per second")
    print(f"\n{text}\nWritten to {out}.")


def typical(rounds: list[dict[str, float]]) -> dict[str, float]:
    """The median of every figure."""
    return {name: median(figures[name] for figures in rounds) for name in rounds[0]}


def ratio(runs: dict[str, list[dict[str, float]]], variant: str, other: str) -> float:
    """Median over the rounds of samples/s of one variant over another's in the same round."""
    pairs = zip(runs[variant], runs[other], strict=True)
    return median(a["samples_per_second"] / b["samples_per_second"] for a, b in pairs)


def module_table(module: str, runs: dict[str, list[dict[str, float]]]) -> str:
    """One module's variants as a table."""
    rows = []
    for variant, name in VARIANTS.items():
        figures = typical(runs[variant])
        stalls = [_percent(figures, f"{role}_stall") for role in ("encoder", "backbone")]
        rows.append(
            [
                name,
                f"{figures['samples_per_second']:.1f}",
                f"{figures['targets_per_second']:.0f}",
                f"{_percent(figures, 'token_padding')} / {_percent(figures, 'patch_padding')}",
                " / ".join(stalls),
                f"{ratio(runs, variant, 'padded'):.2f}",
                f"{ratio(runs, variant, 'packed'):.2f}",
            ]
        )
    apart = typical(runs["separate"])
    balance = apart["encoder_compute_seconds"] / apart["backbone_compute_seconds"]
    head = [
        f"encoder : backbone = {module} (measured {balance:.2f} : 1)",
        "samples/s",
        "target tokens/s",
        "padding: tokens / patches",
        "stall: encoder / backbone",
        "x padded",
        "x packed",
    ]
    return table(head, rows)


def _percent(figures: dict[str, Any], name: str) -> str:
    return f"{figures[name]:.0%}" if name in figures else "-"


if __name__ == "__main__":
    main()
