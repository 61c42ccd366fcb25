"""Which placement is fastest where costs depend on layouts? Real processes, whose computing is sleep.

python benchmarks/emulate_layouts.py                          four mixes on 8 and on 16 ranks: three quarters of an hour
python benchmarks/emulate_layouts.py --ranks 8 --mixes "6B, documents"     some of it; other results are kept
python benchmarks/emulate_layouts.py --quick                  any of it at a tiny size, to see that it runs

What a forward and a backward take in a layout is what the planner's model of a public module on a real device says: an
encoder that has the tensor degree of the backbone takes what that takes it.
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
from benchmarks.layout_cells import Cell, measure_cell
from benchmarks.layout_report import cells_text
from benchmarks.mixes import MIXES
from benchmarks.modules import ROOT
from benchmarks.report import write_results

RANKS = (8, 16)

_NAME = "emulate-layouts"


def main() -> None:
    """Measure, print, and write the results."""
    options = parse()
    file = options.out / f"{_NAME}.json"
    results: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    with tempfile.TemporaryDirectory(prefix="benchmark-") as temporary:
        for ranks in options.ranks:
            for mix in options.mixes:
                cell = Cell(mix, ranks, options.quick)
                found = measure_cell(cell, Path(temporary) / cell.name.replace(" ", "-"))
                results[cell.name] = {**found, "machine": machine()}
                write_results(options.out, _NAME, results, cells_text(results))
    print(f"\n{cells_text(results)}\nWritten to {options.out}.")


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS, help="numbers of ranks")
    parser.add_argument("--mixes", nargs="+", default=tuple(MIXES), choices=MIXES, help="which mixes")
    parser.add_argument("--quick", action="store_true", help="short steps of few samples; the figures mean nothing")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results", help="folder of the results")
    return parser.parse_args()


if __name__ == "__main__":
    main()
