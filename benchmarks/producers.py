"""Slow decoding beside a training rank that waits: local workers and Ray's producers, in one run.

python benchmarks/producers.py             4K JPEGs: some minutes
python benchmarks/producers.py --quick     small pictures, to see that it runs

The rank sleeps where it would train, a fifth of what one process takes to make a step; loaders really read, decode,
resize, tokenise and pack, on whatever processors there are. Processor seconds are those of all processes of a loader,
Ray's own included, from the third step on: starting costs are told apart.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import psutil
from PIL import Image

from benchmarks.launch import machine
from benchmarks.modules import ROOT, TOKENIZER
from benchmarks.report import machine_line, table, write_results
from flowtrain_lightning.data import FlowDataModule, ImageProcessor, IndexConfig

SAMPLES = 4
"""Of a step, each with one picture."""

WARM_STEPS = 2
SLEEP_SHARE = 0.2
"""Of the seconds that one process takes to make a step."""

VARIANTS: dict[str, dict[str, Any]] = {
    "no worker": {"num_workers": 0},
    "2 workers": {"num_workers": 2},
    "2 producers": {"num_workers": 2, "producers": "ray"},
    "4 producers": {"num_workers": 4, "producers": "ray"},
}


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=16, help="steps of each run")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each loader, in turns")
    parser.add_argument("--quick", action="store_true", help="small pictures; the figures mean nothing")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results", help="folder of the results")
    options = parser.parse_args()
    os.environ.pop("RAY_ADDRESS", None)
    where = machine()
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="benchmark-") as temporary:
        steps = 4 if options.quick else options.steps
        file = write_pictures(Path(temporary), steps * SAMPLES, (270, 480) if options.quick else (2160, 3840))
        alone = run("no worker", file, 4, 0.0)
        sleep = SLEEP_SHARE * alone["step_seconds"]
        for _ in range(1 if options.quick else options.rounds):
            for variant in VARIANTS:
                runs.append(run(variant, file, steps, sleep))
                print(json.dumps(runs[-1]), flush=True)
    import ray

    text = f"{machine_line(where)} Ray {ray.__version__}.\n\n{results_table(runs)}\n{meaning(sleep)}"
    write_results(
        options.out, "producers", {"machine": where, "ray": ray.__version__, "sleep": sleep, "runs": runs}, text
    )
    print(f"\n{text}\nWritten to {options.out}.")


def write_pictures(folder: Path, count: int, shape: tuple[int, int]) -> Path:
    """Records of one picture each: soft colours with grain, as photographs have."""
    generator = np.random.default_rng(0)
    coarse = generator.integers(0, 256, (9, 16, 3), dtype=np.uint8)
    soft = np.asarray(Image.fromarray(coarse).resize(shape[::-1], Image.Resampling.BICUBIC), dtype=np.int16)
    records = []
    for number in range(count):
        grain = generator.integers(-12, 13, soft.shape, dtype=np.int16)
        name = f"{number}.jpg"
        Image.fromarray(np.clip(soft + grain, 0, 255).astype(np.uint8)).save(folder / name, quality=90)
        turns = [
            {"role": "user", "content": "<image>What is it?"},
            {"role": "assistant", "content": f"Picture {number}."},
        ]
        records.append(json.dumps({"images": [{"path": name}], "messages": turns}) + "\n")
    file = folder / "train.jsonl"
    file.write_text("".join(records))
    return file


def run(variant: str, file: Path, steps: int, sleep: float) -> dict[str, Any]:
    """Read steps as a rank would that sleeps where it would train; the seconds of clock and processors."""
    before, began = processor_seconds(), time.perf_counter()
    data = FlowDataModule(
        file,
        tokenizer=TOKENIZER,
        images=ImageProcessor(max_pixels=512 * 512),
        token_budget=4096,
        global_batch_size=SAMPLES,
        index=IndexConfig(cache_dir=file.parent / "index"),
        **VARIANTS[variant],
    )
    data.setup("fit")
    batches = iter(data.train_dataloader())
    stalls: list[float] = []
    start_seconds = start_processor = 0.0
    measured, first = before, began
    for step in range(steps):
        asked = time.perf_counter()
        next(batches)
        stalls.append(time.perf_counter() - asked)
        if step == WARM_STEPS - 1:
            measured, first = processor_seconds(), time.perf_counter()
            start_seconds, start_processor = first - began, spent(before, measured)
        time.sleep(sleep)
    seconds, processor = time.perf_counter() - first, spent(measured, processor_seconds())
    data.teardown()
    samples = (steps - WARM_STEPS) * SAMPLES
    return {
        "variant": variant,
        "samples_per_second": samples / seconds,
        "stall": sum(stalls[WARM_STEPS:]) / seconds,
        "step_seconds": seconds / (steps - WARM_STEPS),
        "processor_seconds_per_sample": processor / samples,
        "start_seconds": start_seconds,
        "start_processor_seconds": start_processor,
    }


def processor_seconds() -> dict[int, float]:
    """Of this process and all that come from it, by their numbers."""
    found = {}
    own = psutil.Process()
    for process in (own, *own.children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue
        found[process.pid] = times.user + times.system
    return found


def spent(before: dict[int, float], after: dict[int, float]) -> float:
    """Seconds between two moments, of all processes that live at the second one."""
    return sum(seconds - before.get(process, 0.0) for process, seconds in after.items())


def results_table(runs: list[dict[str, Any]]) -> str:
    """A row for each loader: means over its runs, and processor seconds beside those without a worker."""
    rows = []

    def mean(variant: str, name: str) -> float:
        return statistics.mean(float(each[name]) for each in runs if each["variant"] == variant)

    for variant in VARIANTS:
        processor = mean(variant, "processor_seconds_per_sample")
        rows.append(
            [
                variant,
                f"{mean(variant, 'samples_per_second'):.2f}",
                f"{100 * mean(variant, 'stall'):.0f} %",
                f"{processor:.3f} s",
                f"{processor / mean('no worker', 'processor_seconds_per_sample'):.2f}",
                f"{mean(variant, 'start_seconds'):.1f} s",
                f"{mean(variant, 'start_processor_seconds'):.1f} s",
            ]
        )
    head = [
        "loader",
        "samples/s",
        "stall",
        "processor a sample",
        "to none",
        "first steps after",
        "processor until then",
    ]
    return table(head, rows)


def meaning(sleep: float) -> str:
    """What the table shows, and what it does not."""
    return (
        f"A rank sleeps {sleep:.2f} s a step of {SAMPLES} samples, a fifth of what one process takes to make it. On "
        "one machine producers have no more processors than local workers, and four processes get more of one that "
        "others use than two: samples a second and stalls say little here. The table shows what Ray costs (`to none`), "
        "and that starting it takes long, not what processors of other nodes gain.\n"
    )


if __name__ == "__main__":
    main()
