"""Few long samples a step: what it gains to share sequences and to deal the tower freely, beside what others do.

python benchmarks/long_samples.py                every cell simulated and run: three quarters of an hour
python benchmarks/long_samples.py --cells 64K    the same for cells with 64K in their names; others' runs are kept
python benchmarks/long_samples.py --cells 128K --seconds 20    longer steps, in which the loaders' own work is smaller
python benchmarks/long_samples.py --simulate     none is run; runs that there are are kept
python benchmarks/long_samples.py --quick        a run of short samples and steps, to see that it runs

Qwen2.5-VL on H100, samples of 32K to 128K tokens, one for every four ranks. What runs are real processes that sleep for
as long as the planner's model says, in steps stretched until what the runtime itself needs is small beside them. Runs
of 4, 8 and 16 ranks go on beside each other, since ranks sleep nearly always. The towers of two baselines are ones that
no run here has, so that their costs stand in for them (`SharedTower`).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ["OMP_NUM_THREADS"] = "1"  # of every process, since two of them share two cores

from benchmarks import laid_out
from benchmarks.laid_out import LaidOutJob
from benchmarks.launch import launch, machine
from benchmarks.layout_cells import as_run, measured, simulated_seconds
from benchmarks.layout_plans import describe
from benchmarks.long_cells import CONTENDERS, OURS, STEPS, Contender, LongCell
from benchmarks.modules import ROOT
from benchmarks.report import machine_line, table, write_results
from benchmarks.stretched_costs import StretchedCosts
from flowtrain_lightning.data import PackingConfig

CELLS = [
    LongCell(model, tokens * 1024, ranks, frozen)
    for model, tokens, ranks, frozen in product(
        ("qwen2.5-vl-7b", "qwen2.5-vl-3b"), (32, 64, 128), (8, 16), (False, True)
    )
]
_NAME = "long-samples"
_WARMUP = 2  # steps in which context ranks are compared
_WRITING_SECONDS = 2.0  # that a rank takes at most to write what it measured
_BFLOAT16 = 2  # bytes
_DEADLINE = 300.0  # seconds of a run


@dataclass(frozen=True)
class Run:
    """One contender of a cell, which runs.

    Attributes:
        cell: name of the cell.
        contender: one of `CONTENDERS`.
        job: what ranks do.
        stretch: seconds of a run for each of the device's.
    """

    cell: str
    contender: str
    job: LaidOutJob
    stretch: float

    @property
    def found(self) -> dict[str, float]:
        """Seconds of a step, measured and ideal, in those of the device, and the runtime's share of it."""
        run = measured(self.job)
        own = simulated_seconds(self.job) / self.stretch
        return {"step": run["step"] / self.stretch, "own": own, "runtime": run["runtime"], "stretch": self.stretch}


def main() -> None:
    """Measure, print, and write the results."""
    options = parse()
    file = options.out / f"{_NAME}.json"
    results: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    cells = [each for each in CELLS if all(words in each.name for words in options.cells)]
    cells = [LongCell("qwen2.5-vl-3b", 8192, 4, frozen=False)] if options.quick else cells
    runs: list[Run] = []
    with tempfile.TemporaryDirectory(prefix="benchmark-") as temporary:
        for cell in cells:
            data = cell.records(Path(temporary))
            contenders = cell.question(data).contenders()
            found = results.setdefault(cell.name, {})
            for name, contender in contenders.items():
                planned = {"plan": describe(contender.plan), "ideal": contender.simulated}
                found[name] = found.get(name, {}) | planned
                if not options.simulate:
                    folder = Path(temporary) / cell.name / name
                    runs.append(run_of(contender, name, cell, data, folder, options.seconds))
            found[OURS]["planned"] = contenders[OURS].plan.seconds
        where = machine()
        for run in emulate(runs, Path(temporary)):
            results[run.cell][run.contender] |= {**run.found, "machine": where}
            print(f"{run.cell}, {run.contender}: {results[run.cell][run.contender]}", flush=True)
            write_results(options.out, _NAME, results, text(results))
    write_results(options.out, _NAME, results, text(results))
    print(f"\n{text(results)}\nWritten to {options.out}.")


def run_of(contender: Contender, name: str, cell: LongCell, data: Path, folder: Path, seconds: float) -> Run:
    """The run of a contender, whose step takes so many seconds where nothing takes time but what its costs say."""
    stretch = seconds / contender.simulated
    job = LaidOutJob(
        allocation=as_run(contender.allocation),
        costs=StretchedCosts(contender.costs, stretch, contender.costs.encoder_trains),
        packing=PackingConfig(),  # by no profile, as planned
        encoder_first=False,
        data=data,
        folder=folder,
        global_batch_size=cell.samples,
        token_budget=cell.tokens,
        warmup=_WARMUP,
        steps=STEPS - _WARMUP,
        step_bytes=int(2 * cell.samples * cell.tokens * laid_out.WIDTH * _BFLOAT16),
    )
    return Run(cell.name, name, job, stretch)


def emulate(runs: Sequence[Run], folder: Path) -> Iterator[Run]:
    """Runs all, and gives those that have ended: such of as many ranks one after another, in processes that they share.

    Raises:
        RuntimeError: some have failed; what they printed is above.
    """
    fork, families, left = multiprocessing.get_context("fork"), [], [*runs]
    for ranks, of_ranks in groupby(sorted((run.job for run in runs), key=_ranks), _ranks):
        jobs = list(of_ranks)
        arguments = (laid_out.train_all, jobs, ranks, folder / f"{ranks} ranks", _DEADLINE * len(jobs))
        families.append(fork.Process(target=launch, args=arguments))
        families[-1].start()
    while left:
        at_work = any(family.is_alive() for family in families)
        ended = [run for run in left if len([*run.job.folder.glob("rank*.json")]) == _ranks(run.job)]
        time.sleep(_WRITING_SECONDS)
        yield from ended
        left = [run for run in left if run not in ended]
        if not at_work and not ended:
            raise RuntimeError("Runs have failed; what they printed is above.")
    for family in families:
        family.join()


def _ranks(job: LaidOutJob) -> int:
    return job.allocation.size


def text(results: Mapping[str, Any]) -> str:
    """The tables: what was run, what was simulated, and the layouts."""
    run = {name: cell for name, cell in results.items() if "step" in cell[OURS]}
    parts = [
        "Seconds of a step (x the recommended plan). *One layout*: of tensor ranks and shards for both halves. *Tower "
        "repeated*, *sliced*: ranks share sequences, and each encodes all media of theirs, or shares the tower's "
        "tokens too; no run here has such towers, whose batches take what those of the whole group would. Each "
        "contender has the fastest of its layouts. Samples are alike: a step has one for every four ranks, and seven "
        "eighths of its tokens are of clips, in moments of 512 rows of features.",
    ]
    if run:
        parts += [
            "Run by ranks that sleep; behind it what that is more than simulated:",
            table(["", *CONTENDERS, *_RUN_HEAD], _run_rows(run)),
        ]
    simulated = [[name, *(_cell(cell, each, "ideal") for each in CONTENDERS)] for name, cell in results.items()]
    parts += ["Simulated:", table(["", *CONTENDERS], simulated), "Layouts:"]
    layouts = [
        f"- {name}, {each}: {cell[each]['plan']}"
        for name, cell in results.items()
        for each in CONTENDERS
        if each in cell
    ]
    dates = dict.fromkeys(
        machine_line(each["machine"]) for cell in run.values() for each in cell.values() if "machine" in each
    )
    return "\n\n".join(part.strip() for part in [*parts, "\n".join(layouts), "\n".join(dates)]) + "\n"


_RUN_HEAD = ("beside planned", "CPU time of the runtime in a step")


def _run_rows(run: Mapping[str, Any]) -> list[list[str]]:
    return [
        [
            name,
            *(
                f"{_cell(cell, each, 'step')} ({cell[each]['step'] / cell[each]['own'] - 1:+.1%})"
                for each in CONTENDERS
            ),
            f"{cell[OURS]['step'] / cell[OURS]['planned'] - 1:+.1%}",
            f"{max(cell[each]['runtime'] for each in CONTENDERS):.1%}",
        ]
        for name, cell in run.items()
        if all("step" in cell[each] for each in CONTENDERS)
    ]


def _cell(cell: Mapping[str, Any], contender: str, kind: str) -> str:
    if contender not in cell:
        return "-"
    seconds = cell[contender][kind]
    return f"{seconds:.2f}" if contender == OURS else f"{seconds:.2f} (x {seconds / cell[OURS][kind]:.2f})"


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", nargs="+", default=[], metavar="WORDS", help="only those whose names have all")
    parser.add_argument("--simulate", action="store_true", help="none is run")
    parser.add_argument("--seconds", type=float, default=10.0, help="of a stretched step (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="short samples; the figures mean nothing")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results", help="folder of the results")
    return parser.parse_args()


if __name__ == "__main__":
    main()
