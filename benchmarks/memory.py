"""Whether a long run keeps its size: memory, descriptors and threads of every rank over many steps.

python benchmarks/memory.py                30,000 steps of a tiny module: about half an hour
python benchmarks/memory.py --quick        40 steps, to see that it runs

Growth is the slope of a line through the second half of a run; the first half fills caches. Where it is within its own
error, nothing grows.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ["OMP_NUM_THREADS"] = "1"

import lightning as L
import numpy as np
from scipy import stats

from benchmarks.launch import launch, machine
from benchmarks.modules import ROOT, Work, packed_module, training_records
from benchmarks.report import machine_line, table, write_results
from flowtrain_lightning import FlowTrainStrategy

RANKS = {"separate": ("backbone 0", "encoder 0"), "colocated": ("both 0", "both 1")}
"""Placement -> its two ranks."""

STRATEGIES: dict[str, Callable[[], FlowTrainStrategy]] = {
    "separate": lambda: FlowTrainStrategy(encoder_ranks=1, placement="separate"),
    "colocated": lambda: FlowTrainStrategy(placement="colocated"),
}

SAMPLES = 200
"""How often a run is looked at."""

_PAGE_KB = os.sysconf("SC_PAGE_SIZE") / 1024


@dataclass(frozen=True)
class Job:
    """One run: its placement, steps, training file, folder for what the ranks write, and folder of the data's index."""

    placement: str
    steps: int
    records: Path
    folder: Path
    cache: Path


class Size(L.Callback):
    """Writes step, KB of memory, descriptors and threads of this process, again and again."""

    def __init__(self, file: Path, every: int) -> None:
        self._file = file
        self._every = every

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step % self._every == 0:
            resident = int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_KB
            descriptors, threads = (len(os.listdir(f"/proc/self/{kind}")) for kind in ("fd", "task"))
            with self._file.open("a") as file:
                file.write(json.dumps([trainer.global_step, resident, descriptors, threads]) + "\n")


def train(job: Job) -> None:
    """Train, as one of two ranks."""
    file = job.folder / f"size{os.environ['LOCAL_RANK']}.jsonl"
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=STRATEGIES[job.placement](),
        max_steps=job.steps,
        use_distributed_sampler=False,
        callbacks=[Size(file, max(1, job.steps // SAMPLES))],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=job.folder,
    )
    L.seed_everything(1, verbose=False)
    trainer.fit(packed_module("tiny"), Work(job.records, job.cache, global_batch_size=4).data())


def growth(samples: np.ndarray) -> dict[str, float]:
    """What the second half of a run's samples says.

    Args:
        samples: ``[samples, 4]``: step, KB of memory, descriptors, threads.
    """
    half = samples[len(samples) // 2 :]
    line = stats.linregress(half[:, 0], half[:, 1])
    return {
        "steps": float(samples[-1, 0]),
        "first_mb": float(half[0, 1] / 1024),
        "last_mb": float(half[-1, 1] / 1024),
        "kb_per_step": float(line.slope),
        "error": float(line.stderr),
        "descriptors": float(half[-1, 2] - half[0, 2]),
        "threads": float(half[-1, 3] - half[0, 3]),
    }


def main() -> None:
    """Run, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30_000, help="of each run")
    parser.add_argument("--placement", choices=RANKS, nargs="+", default=list(RANKS), help="which runs")
    parser.add_argument("--deadline", type=float, default=7200.0, help="seconds of each run")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results", help="folder of the results")
    parser.add_argument("--quick", action="store_true", help="one run of 40 steps; the figures mean nothing")
    options = parser.parse_args()
    if options.quick:
        options.steps, options.placement = 40, ["separate"]
    where, records, found = machine(), training_records(), {}
    with tempfile.TemporaryDirectory(prefix="benchmark-") as temporary:
        Work(records, Path(temporary) / "index").data().setup("fit")
        for placement in options.placement:
            job = Job(placement, options.steps, records, Path(temporary) / placement, Path(temporary) / "index")
            launch(train, job, 2, job.folder, options.deadline)
            for rank, label in enumerate(RANKS[placement]):
                lines = (job.folder / f"size{rank}.jsonl").read_text().splitlines()
                found[f"{placement}, {label}"] = growth(np.array([json.loads(line) for line in lines]))
    head = ["rank", "steps", "MB at half", "MB at the end", "KB per step", "descriptors", "threads"]
    rows = [
        [
            name,
            f"{each['steps']:,.0f}",
            f"{each['first_mb']:.1f}",
            f"{each['last_mb']:.1f}",
            f"{each['kb_per_step']:+.3f} ± {each['error']:.3f}",
            f"{each['descriptors']:+.0f}",
            f"{each['threads']:+.0f}",
        ]
        for name, each in found.items()
    ]
    text = f"{machine_line(where)}\n\n{table(head, rows)}"
    write_results(options.out, "memory", {"machine": where, "ranks": found}, text)
    print(text)


if __name__ == "__main__":
    main()
