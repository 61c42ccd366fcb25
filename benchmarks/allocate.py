"""Is the allocation that flowtrain takes by itself the fastest one? Predictions, and plans, beside measurements.

python benchmarks/allocate.py                 six modules on two processes, really trained: about twelve minutes
python benchmarks/allocate.py --emulate 8     every split of 8 ranks whose computing is sleep: about ten minutes
python benchmarks/allocate.py --quick         any of the two at a tiny size, to see that it runs
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ["OMP_NUM_THREADS"] = "1"  # of every process, since two of them share two cores

import torch

from benchmarks import variants
from benchmarks.calibrated import planned_seconds
from benchmarks.launch import launch, machine
from benchmarks.measure import read_ranks, throughput
from benchmarks.modules import ROOT, Work, packed_module, training_records
from benchmarks.report import machine_line, table, write_results
from benchmarks.splits import compare_splits
from benchmarks.variants import Job
from flowtrain_lightning.allocator import PlacementChoice, choose_placement
from flowtrain_lightning.placement.measured import MeasuredCosts, MeasuredPrediction
from flowtrain_lightning.placement.module_profile import profile_module
from flowtrain_lightning.placement.profile import Profile, read_profile, write_profile
from flowtrain_lightning.placement.run_costs import first_steps, processors_of

MODULES = {"1:4": 32, "1:2": 32, "1:1": 32, "3:1": 32, "frozen": 8, "vocabulary": 8}
"""Modules of `benchmarks.modules`, and the samples of a step.

The last two have an encoder that does not train, and many weights for few tokens. Where both ranks hold the backbone,
both update all of its weights, and they sum all of its gradients; a single backbone rank updates them once and sums
nothing. What decides is whether the encoder keeps its own rank busy meanwhile: that of *frozen* does not, while that of
*vocabulary*, a vision transformer of 24 million weights beside a small language model with a large table of tokens, has
as much to do as the backbone.
"""

MOST_SAMPLES = max(MODULES.values())
"""Of a step; runs with smaller ones have as many more, since a few samples are not like the data."""

PLACEMENTS = {"separate": "1 + 1", "colocated": "colocated x2"}
"""Variants of `benchmarks.variants`, and what they are in tables."""

TIE = 0.05
"""Measurements that differ by less are a tie."""

KEPT_BATCHES = 4  # the strategy's default
PROFILE_SECONDS = 8.0  # as at a run's start
DEADLINE = 900.0


def main() -> None:
    """Predict, measure, print, and write the results."""
    options = parse()
    if options.emulate:
        compare_splits(options.emulate, options.out, options.steps, options.quick)
    else:
        compare_placements(options.out, options.rounds, options.steps, options.quick)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--emulate", type=int, metavar="N", help="every split of N emulated ranks, from 2")
    parser.add_argument("--rounds", type=int, default=3, help="how often the placements take turns")
    parser.add_argument(
        "--steps", type=int, default=8, help=f"measured steps of each run, if of {MOST_SAMPLES} samples"
    )
    parser.add_argument("--quick", action="store_true", help="one round of a tiny size; the figures mean nothing")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results", help="folder of the results")
    return parser.parse_args()


def compare_placements(out: Path, rounds: int, steps: int, quick: bool) -> None:
    """Both placements of every module in turns, and what was predicted of them."""
    where, results = machine(), {}
    with tempfile.TemporaryDirectory(prefix="benchmark-") as temporary:
        work = Work(training_records(), Path(temporary) / "index")
        work.data().setup("fit")  # writes the index, once for all runs
        for module, samples in {"tiny": 8}.items() if quick else MODULES.items():
            sized = replace(work, global_batch_size=samples)
            profile = _profile(module, sized, Path(temporary) / f"{module}-profile".replace(":", "-"))
            results[module] = {
                "predicted": _predicted(sized, profile),
                "planned": planned_seconds(module, sized, profile),
                "measured": _measured(module, sized, Path(temporary), 1 if quick else rounds, 2 if quick else steps),
            }
            print(f"{module}: {results[module]}")
    text = f"{machine_line(where)}\n\n{placement_table(results)}"
    write_results(out, "allocate", {"machine": where, "rounds": rounds, "steps": steps, "modules": results}, text)
    print(f"\n{text}\nWritten to {out}.")


def _profile(module: str, work: Work, folder: Path) -> Profile:
    """What the halves take in a process of their own."""
    launch(_write_profile, (module, work, folder), 1, folder, DEADLINE)
    return read_profile(folder / "profile.json")


def _predicted(work: Work, profile: Profile) -> dict[str, float]:
    """Placement -> seconds of a step, and the one that a run would take."""
    choice = choose(work, profile)
    found: dict[str, float] = {each.allocation.placement: each.seconds for each in choice.predictions}
    return {**found, "chosen": list(PLACEMENTS).index(choice.chosen.allocation.placement)}


def _write_profile(job: tuple[str, Work, Path]) -> None:
    module, work, folder = job
    torch.set_num_threads(1)
    profile = profile_module(
        packed_module(module), work.data(), accelerator="cpu", seconds=PROFILE_SECONDS, progress=False
    )
    write_profile(profile, folder / "profile.json")


def choose(work: Work, profile: Profile) -> PlacementChoice[MeasuredPrediction]:
    """What a run on two ranks of one thread each would choose."""
    cores = replace(processors_of(torch.device("cpu"), 2, 1), capacity=float(len(os.sched_getaffinity(0))))
    return choose_placement(MeasuredCosts(profile, first_steps(work.data()), 2, cores, KEPT_BATCHES))


def _measured(module: str, work: Work, temporary: Path, rounds: int, steps: int) -> dict[str, list[float]]:
    """Placement -> seconds of a step in every round, of as many samples for every module."""
    seconds: dict[str, list[float]] = {placement: [] for placement in PLACEMENTS}
    for number in range(rounds):
        for placement in PLACEMENTS:
            folder = temporary / f"{module}-{placement}-{number}".replace(":", "-")
            job = Job(
                variant=placement,
                module=module,
                records=work.records,
                folder=folder,
                cache=work.cache,
                warmup=2,
                steps=steps * MOST_SAMPLES // work.global_batch_size,
                global_batch_size=work.global_batch_size,
            )
            launch(variants.train, job, 2, folder, DEADLINE)
            seconds[placement].append(work.global_batch_size / throughput(read_ranks(folder))["samples_per_second"])
    return seconds


def placement_table(results: dict[str, dict[str, Any]]) -> str:
    """A line per module: what was measured, predicted by a run's own costs and planned by the models of time."""
    lines = []
    for module, found in results.items():
        cells = [module]
        medians = {placement: median(found["measured"][placement]) for placement in PLACEMENTS}
        for placement, seconds in medians.items():
            said = [found[by][placement] for by in ("predicted", "planned")]
            cells += [f"{1e3 * seconds:.0f}", *(f"{1e3 * one:.0f} ({one / seconds - 1:+.0%})" for one in said)]
        chosen = list(PLACEMENTS)[found["predicted"]["chosen"]]
        fastest = min(medians, key=lambda placement: medians[placement])
        lead = max(medians.values()) / medians[fastest] - 1
        verdict = "tie" if lead < TIE else "right" if chosen == fastest else "wrong"
        lines.append([*cells, PLACEMENTS[chosen], f"{PLACEMENTS[fastest]} (by {lead:.0%})", verdict])
    heads = [f"{name}: {what}" for name in PLACEMENTS.values() for what in ("measured ms", "predicted", "planned")]
    return table(["encoder : backbone", *heads, "chosen", "fastest", "the choice was"], lines)


if __name__ == "__main__":
    main()
