"""Does a step take what `flowtrain plan` says? Random mixed plans and context ranks, by real processes that sleep.

python benchmarks/emulated_plans.py                      ten cells of either kind and a step of few, long samples
python benchmarks/emulated_plans.py --kinds mixed --cells 3 --seconds 20     some of it; other results are kept

Every cell draws a public model, devices, what trains, pictures and texts. Its plan is what `flowtrain plan` predicts
for these records, played by its simulator; what runs are the plan's ranks, packer, pool and collectives on the same
records, in steps stretched until what the runtime itself needs is small beside them.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ["OMP_NUM_THREADS"] = "1"  # of every process, since two of them share two cores

from benchmarks.launch import machine
from benchmarks.modules import ROOT
from benchmarks.plan_cells import KINDS, PlanCell, drawn_cells, measure
from benchmarks.report import machine_line, table, write_results

_NAME = "emulated-plans"


def main() -> None:
    """Measure, print, and write the results."""
    options = parse()
    file = options.out / f"{_NAME}.json"
    results: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    with tempfile.TemporaryDirectory(prefix="benchmark-") as temporary:
        for kind in options.kinds:
            for cell in drawn_cells(kind, Path(temporary), options.cells, options.seed):
                results[cell.name] = {**measured(cell, options.seconds), "machine": machine()}
                print(f"{cell.name}: {results[cell.name]}", flush=True)
                write_results(options.out, _NAME, results, text(results))
    print(f"\n{text(results)}\nWritten to {options.out}.")


def measured(cell: PlanCell, seconds: float) -> dict[str, Any]:
    """One cell in figures; times are those of the device."""
    run = measure(cell, seconds)
    return {"kind": cell.kind, "what": cell.what, "plan": cell.layouts, "planned": cell.planned, **run}


def text(results: dict[str, Any]) -> str:
    """The table of all cells, the middle of their differences and the largest."""
    rows = [
        [
            name,
            f"{run['planned']:.3f}",
            f"{run['simulated']:.3f}",
            f"{run['step']:.3f}",
            f"{run['step'] / run['planned'] - 1:+.1%}",
            f"{run['step'] / run['simulated'] - 1:+.1%}",
            f"{run['cores']:.0%} of {os.cpu_count()}",
        ]
        for name, run in results.items()
    ]
    head = ["cell", "planned s", "simulated s", "measured s", "beside planned", "beside simulated", "cores of ranks"]
    lines = [table(head, rows), "", "Simulated: the run's own steps. Planned: steps drawn from the same records."]
    for kind in KINDS:
        off = [abs(run["step"] / run["planned"] - 1) for run in results.values() if run["kind"] == kind]
        if off:
            near = sum(each <= 0.1 for each in off)
            lines.append(f"- {kind}: {near} of {len(off)} within 10 %, the farthest {max(off):.1%}.")
    lines += ["", *(f"- {name}: {run['what']} {run['plan']}" for name, run in results.items())]
    dates = dict.fromkeys(machine_line(run["machine"]) for run in results.values())
    return "\n".join([*lines, "", *dates])


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS, help="which cells")
    parser.add_argument("--cells", type=int, default=10, help="of each kind that is drawn (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=10.0, help="of a stretched step (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results", help="folder of the results")
    return parser.parse_args()


if __name__ == "__main__":
    main()
