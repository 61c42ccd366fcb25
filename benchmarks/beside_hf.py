"""Fine-tuning a Qwen2.5-VL beside what people do it with today: transformers' Trainer and TRL's SFTTrainer.

python benchmarks/beside_hf.py             two processes, three rounds in turns, then losses: about ten minutes
python benchmarks/beside_hf.py --quick     the same at a tiny size, to see that it runs

The same small model with random weights, opened by its folder's name, and the same real records in the same steps.
Whoever trains learns the same tokens; rates, clipping and schedule are alike. Needs what the extra `beside-hf` names.
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
os.environ["TOKENIZERS_PARALLELISM"] = "false"

from benchmarks.hf_model import write_model, write_records
from benchmarks.hf_variants import VARIANTS, Job, start_once, train
from benchmarks.launch import launch, machine
from benchmarks.measure import read_ranks
from benchmarks.modules import ROOT
from benchmarks.report import machine_line, table, write_results

DEADLINE = 900.0
"""Seconds for one run, on a machine that may be busy otherwise."""

LONGEST = 4500
"""Characters of the longest record."""

COMPARED = [("flowtrain", 1), ("flowtrain", 2), ("trainer", 1), ("sft", 1), ("trainer", 2)]
"""Whose losses stand beside each other: variant and number of processes."""


def main() -> None:
    """Measure, print, and write the results."""
    options = _parse()
    rounds, steps, batch, size = options.rounds, options.steps, 16, "small"
    if options.quick:
        rounds, steps, batch, size = 1, 2, 4, "tiny"
    warmup = 1 if options.quick else 2
    where = machine()
    with tempfile.TemporaryDirectory(prefix="benchmark-") as temporary:
        folder = Path(temporary)
        write_model(folder / "model", size)
        write_records(folder / "train.jsonl", (warmup + steps) * batch, 500 if options.quick else LONGEST)

        def job_of(variant: str, ranks: int, name: str, losses: bool = False) -> Job:
            return Job(
                variant=variant,
                model=folder / "model",
                records=folder / "train.jsonl",
                folder=folder / name,
                ranks=ranks,
                warmup=warmup,
                steps=warmup + steps,
                batch_size=batch,
                losses=losses,
            )

        def run(variant: str, ranks: int, name: str, losses: bool = False) -> list[dict[str, Any]]:
            job = job_of(variant, ranks, name, losses)
            launch(train, job, ranks, job.folder, DEADLINE)
            return read_ranks(job.folder)

        start_once(job_of("flowtrain", 2, "first-start"))
        runs: dict[str, list[dict[str, float]]] = {variant: [] for variant in VARIANTS}
        for number in range(rounds):
            for variant in VARIANTS:
                figures = cost(run(variant, 2, f"{variant}-{number}"), steps * batch)
                runs[variant].append(figures)
                print(f"round {number + 1}, {variant}: {figures['samples_per_second']:.2f} samples/s", flush=True)
        told = {
            f"{VARIANTS[variant]}, {ranks}": of_steps(run(variant, ranks, f"{variant}-losses-{ranks}", losses=True))
            for variant, ranks in COMPARED
        }
    text = f"{machine_line(where)}\n\n{cost_table(runs)}\n{loss_table(told)}"
    write_results(options.out, "beside-hf", {"machine": where, "runs": runs, "losses": told}, text)
    print(f"\n{text}\nWritten to {options.out}.")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="how often the variants take turns")
    parser.add_argument("--steps", type=int, default=8, help="measured steps of each run, of 16 samples")
    parser.add_argument("--quick", action="store_true", help="one round of a tiny size; the figures mean nothing")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results", help="folder of the results")
    return parser.parse_args()


def cost(ranks: list[dict[str, Any]], samples: int) -> dict[str, float]:
    """What a run's samples cost."""
    return {
        "samples_per_second": samples / max(rank["seconds"] for rank in ranks),
        "cpu_seconds_per_sample": sum(rank["cpu_seconds"] for rank in ranks) / samples,
        "peak_bytes": max(rank["peak_bytes"] for rank in ranks),
    }


def of_steps(ranks: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Of every step, the loss summed over all target tokens through their number, and what the trainer says it is."""
    steps = list(zip(*(rank["losses"] for rank in ranks), strict=True))
    return {
        "loss": [sum(total for total, _, _ in step) / sum(number for _, number, _ in step) for step in steps],
        "said": [step[0][2] for step in steps],
    }


def cost_table(runs: dict[str, list[dict[str, float]]]) -> str:
    """Medians of all rounds; ratios are medians of the ratios within a round."""
    lines = []
    for variant, name in VARIANTS.items():
        figures = {key: median(run[key] for run in runs[variant]) for key in runs[variant][0]}
        ratios = {
            peer: median(
                own["samples_per_second"] / other["samples_per_second"]
                for own, other in zip(runs[variant], runs[peer], strict=True)
            )
            for peer in ("trainer", "sft")
        }
        lines.append(
            [
                name,
                f"{figures['samples_per_second']:.2f}",
                f"{figures['cpu_seconds_per_sample']:.3f}",
                f"{figures['peak_bytes'] / 2**20:.0f}",
                f"{ratios['trainer']:.2f}",
                f"{ratios['sft']:.2f}",
            ]
        )
    head = ["two processes", "samples/s", "CPU s per sample", "peak MB of a rank", "x Trainer", "x SFTTrainer"]
    return table(head, lines)


def loss_table(told: dict[str, dict[str, list[float]]]) -> str:
    """The losses of some steps, and how far each trainer is from flowtrain on one process, relatively and at most."""
    first = told[f"{VARIANTS['flowtrain']}, 1"]["loss"]
    shown = sorted({0, 1, len(first) // 2, len(first) - 1})
    lines = []
    for name, found in told.items():
        for kind, what in (("loss", "sum through number"), ("said", "as it says")):
            if kind == "said" and not name.startswith(VARIANTS["trainer"]):
                continue
            apart = max(abs(own - other) / other for own, other in zip(found[kind], first, strict=True))
            lines.append([f"{name}: {what}", *(f"{found[kind][step]:.6f}" for step in shown), f"{apart:.1e}"])
    return table(["loss, processes", *(f"step {step + 1}" for step in shown), "apart"], lines)


if __name__ == "__main__":
    main()
