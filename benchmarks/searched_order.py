"""A searched order of all works beside the rules (1F1B): every rank encodes, and has a stage of the backbone.

python benchmarks/searched_order.py            2 and 4 ranks: three minutes
python benchmarks/searched_order.py --quick    one cell, to see that it runs

Records have no, one or two pictures, so that microbatches are uneven. Processes sleep for as long as the model of
the planner says of their batches, in stretched steps; features, hidden states and all gradients are real and checked.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ["OMP_NUM_THREADS"] = "1"  # of every process, since all of them share the cores

from benchmarks import staged
from benchmarks.emulated_records import emulated_data, sizes_of_records, write_records
from benchmarks.launch import machine
from benchmarks.mixes import screens
from benchmarks.modules import ROOT
from benchmarks.report import machine_line, table, write_results
from benchmarks.run_of_plan import STEPS, TOKEN_BUDGET, WARMUP, run_planned
from flowtrain_lightning.allocator import (
    Allocation,
    Cluster,
    Layout,
    Workload,
    named_device,
    named_model,
    role_problems,
)
from flowtrain_lightning.allocator.allocation import Order

PICTURES = {0: 0.4, 1: 0.3, 2: 0.3}
_PATCH_BUDGET, _DEADLINE = 16384, 600.0
_ORDERS: tuple[Order, ...] = ("rules", "searched")


@dataclass(frozen=True)
class OrderCell:
    """What is compared in one line: a backbone in as many stages as there are ranks, each of which encodes too.

    Attributes:
        model: a public one.
        ranks: processes, each of which stands for one H100 in a node of its own.
        samples: of a step.
    """

    model: str
    ranks: int
    samples: int

    @property
    def name(self) -> str:
        """Model, ranks and samples."""
        return f"{self.model}, {self.ranks} stages, {self.samples} samples"

    @property
    def allocation(self) -> Allocation:
        """By the rules."""
        both = {"encoder": Layout(data=self.ranks), "backbone": Layout(pipeline=self.ranks)}
        return Allocation("colocated", both, dict.fromkeys(both, tuple(range(self.ranks))))


CELLS = (OrderCell("qwen2.5-vl-7b", 4, 16), OrderCell("qwen2.5-vl-7b", 2, 24), OrderCell("qwen2.5-vl-32b", 4, 24))


def measure(cell: OrderCell, folder: Path, stretch: float) -> dict[str, Any]:
    """Runs of both orders.

    Args:
        cell: the cell.
        folder: for what the runs write.
        stretch: seconds of the run for one of the device.
    """
    data = folder / "records"
    count = cell.samples * (WARMUP + STEPS)
    write_records(data, count, sides=screens(), pictures=PICTURES, words=(380, 420))
    sizes = sizes_of_records(emulated_data(data, cell.samples, TOKEN_BUDGET))
    module = named_model(cell.model)
    workload = Workload(
        sizes.tokens,
        dict.fromkeys(module.encoders, sizes.media_patches),
        global_batch_size=cell.samples,
        token_budget=TOKEN_BUDGET,
        encoder_budget=_PATCH_BUDGET,
    )
    problems = role_problems(module, workload, Cluster(named_device("h100"), cell.ranks, 1), "bf16-true")
    found: dict[str, Any] = {"machine": machine()}
    for name in _ORDERS:
        allocation = replace(cell.allocation, order=name)
        run = run_planned(
            allocation,
            problems,
            stretch,
            data,
            folder / name,
            samples=cell.samples,
            deadline=_DEADLINE,
            train=staged.train,
        )
        found[name] = run
        print(f"{cell.name}, {name}: {run}", flush=True)
    return found


def text(results: Mapping[str, Any]) -> str:
    """The table: seconds of both orders, simulated and measured."""
    rows = []
    for name, each in results.items():
        pairs = [f"{each['rules'][kind]:.3f} / {each['searched'][kind]:.3f}" for kind in ("simulated", "step")]
        gains = [f"x {each['rules'][kind] / each['searched'][kind]:.3f}" for kind in ("simulated", "step")]
        off = max(abs(each[order]["step"] / each[order]["simulated"] - 1) for order in _ORDERS)
        own = max(each[order]["runtime"] for order in _ORDERS)
        rows.append([name, *pairs, *gains, f"{off:.1%}", f"{own:.1%}"])
    head = ["", "simulated", "run", "gain: simulated", "gain: run", "run beside simulated", "CPU time of the runtime"]
    parts = [
        "Seconds of a step by the rules (1F1B, encoders in what time it leaves) / in a searched order: every rank "
        "encodes and has a stage. Ranks sleep for what the planner's model says; hidden states, features and gradients "
        "are real.",
        table(head, rows),
        "\n".join(dict.fromkeys(machine_line(each["machine"]) for each in results.values())),
    ]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stretch", type=float, default=4.0, help="seconds for one of the device (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="one cell only")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results", help="folder of the results")
    options = parser.parse_args()
    results: dict[str, Any] = {}
    for cell in CELLS[:1] if options.quick else CELLS:
        with tempfile.TemporaryDirectory(prefix="benchmark-") as temporary:
            results[cell.name] = measure(cell, Path(temporary), options.stretch)
    write_results(options.out, "searched_order", results, text(results))
    print(f"\n{text(results)}\nWritten to {options.out}.")


if __name__ == "__main__":
    main()
