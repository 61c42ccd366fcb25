"""How long the training loop waits for its next step, which has to be planned and loaded before it can run.

python benchmarks/waiting.py               both batch_unit, without and with a worker, two processes: some minutes
python benchmarks/waiting.py --quick       at a tiny size, to see that it runs

Waiting is what Lightning's loop spends between asking the loader for a batch and having it. The first step of a run is
left out: nothing runs yet behind which it could be loaded.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ["OMP_NUM_THREADS"] = "1"  # of every process, since two of them share two cores

import lightning as L
import numpy as np
from lightning.pytorch.profilers import Profiler

from benchmarks.launch import launch, machine
from benchmarks.modules import IMAGES, ROOT, SEED, TOKENIZER, packed_module, training_records
from benchmarks.report import machine_line, table, write_results
from flowtrain_lightning import FlowTrainStrategy
from flowtrain_lightning.data import FlowDataModule, IndexConfig, TokenSteps

DEADLINE = 600.0
"""Seconds for one run, on a machine that may be busy otherwise."""

TOKEN_BUDGET, SAMPLES, MICROBATCHES = 512, 32, 8
"""Of a step: as many microbatches with `tokens` as its samples make with `samples`."""

ROLES = ("backbone", "encoder")


@dataclass(frozen=True)
class Job:
    """What one run does.

    Attributes:
        batch_unit: what a step has a fixed number of.
        workers: processes that load, for each rank.
        module: one of ``benchmarks.modules.MODULES``.
        steps: how many, in one epoch.
        records: the training file.
        folder: where the ranks write.
        cache: folder of the data's index.
    """

    batch_unit: str
    workers: int
    module: str
    steps: int
    records: Path
    folder: Path
    cache: Path

    def data(self) -> FlowDataModule:
        """The data module."""
        return FlowDataModule(
            self.records,
            tokenizer=TOKENIZER,
            images=IMAGES,
            global_batch_size=SAMPLES,
            token_budget=TOKEN_BUDGET,
            seed=SEED,
            index=IndexConfig(too_long="drop", cache_dir=self.cache),
            num_workers=self.workers,
            token_steps=TokenSteps(MICROBATCHES) if self.batch_unit == "tokens" else None,
        )


class Stopwatch(Profiler):
    """Times what Lightning's loop spends waiting for batches, and with them."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: dict[str, list[float]] = {"train_dataloader_next": [], "run_training_batch": []}
        self._begun: dict[str, float] = {}

    def start(self, action_name: str) -> None:
        """Notes when an action begins."""
        self._begun[action_name] = time.perf_counter()

    def stop(self, action_name: str) -> None:
        """Adds what it took."""
        name = action_name.rpartition(".")[2]
        if name in self.seconds:
            self.seconds[name].append(time.perf_counter() - self._begun[action_name])


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--module", default="1:1", help="balance of encoder and backbone, see benchmarks/modules.py")
    parser.add_argument("--steps", type=int, default=25, help="steps of each run, within one epoch")
    parser.add_argument("--quick", action="store_true", help="a tiny size; the figures mean nothing")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results", help="folder of the results")
    options = parser.parse_args()
    where, records = machine(), training_records()
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="benchmark-") as temporary:
        for batch_unit in ("samples", "tokens"):
            for workers in (0, 1):
                folder = Path(temporary) / f"{batch_unit}-{workers}"
                module, steps = ("tiny", 4) if options.quick else (options.module, options.steps)
                job = Job(batch_unit, workers, module, steps, records, folder, Path(temporary) / "index")
                job.data().setup("fit")  # writes the index, once for all runs
                launch(train, job, len(ROLES), folder, DEADLINE)
                runs += [figures(job, rank) for rank in range(len(ROLES))]
                print(f"{batch_unit}, {workers} workers: {runs[-2]['total_ms']:.1f} ms, {runs[-1]['total_ms']:.1f} ms")
    text = f"{machine_line(where)}\n\n{waiting_table(runs)}"
    write_results(options.out, "waiting", {"machine": where, "records": records.name, "runs": runs}, text)
    print(f"\n{text}\nWritten to {options.out}.")


def train(job: Job) -> None:
    """Train, as one of two ranks, and write what was timed."""
    stopwatch = Stopwatch()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=FlowTrainStrategy(encoder_ranks=1, placement="separate"),
        max_epochs=1,
        limit_train_batches=job.steps,
        profiler=stopwatch,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=job.folder,
    )
    L.seed_everything(SEED, verbose=False)
    trainer.fit(packed_module(job.module), job.data())
    (job.folder / f"rank{trainer.global_rank}.json").write_text(json.dumps(stopwatch.seconds))


def figures(job: Job, rank: int) -> dict[str, Any]:
    """What one rank waited, in milliseconds and as a share of the time of all steps but the first."""
    seconds = json.loads((job.folder / f"rank{rank}.json").read_text())
    waits = np.array(seconds["train_dataloader_next"][: job.steps])
    ran = np.array(seconds["run_training_batch"])
    return {
        "batch_unit": job.batch_unit,
        "workers": job.workers,
        "role": ROLES[rank],
        "first_ms": 1e3 * float(waits[0]),
        "median_ms": 1e3 * float(np.median(waits[1:])),
        "p99_ms": 1e3 * float(np.percentile(waits[1:], 99)),
        "total_ms": 1e3 * float(waits[1:].sum()),
        "step_ms": 1e3 * float(np.median(ran[1:])),
        "share": float(waits[1:].sum() / (waits[1:].sum() + ran[1:].sum())),
    }


def waiting_table(runs: list[dict[str, Any]]) -> str:
    """All runs as a table."""
    head = ["batch unit", "workers", "rank", "a step takes", "first wait", "median", "p99", "all waits", "share"]
    rows = [
        [
            run["batch_unit"],
            str(run["workers"]),
            run["role"],
            *(f"{run[name]:.{digits}f} ms" for name, digits in (("step_ms", 0), ("first_ms", 0))),
            *(f"{run[name]:.2f} ms" for name in ("median_ms", "p99_ms", "total_ms")),
            f"{100 * run['share']:.2f} %",
        ]
        for run in runs
    ]
    return table(head, rows)


if __name__ == "__main__":
    main()
