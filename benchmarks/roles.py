"""Which ranks for two unlike encoders, a backbone and a generator? Real processes, whose computing is sleep.

python benchmarks/roles.py                             two mixes on 8 ranks: six minutes
python benchmarks/roles.py --mixes "one fits"          one of them; the other's results are kept
python benchmarks/roles.py --simulate                  none is run
python benchmarks/roles.py --quick                     short steps on 4 ranks, to see that it runs

Each placement has the fastest split of ranks that the simulator of a run knows, or of a batch-synchronous step the one
whose phases take least. The automatic choice is that of a run which had measured these costs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ["OMP_NUM_THREADS"] = "1"  # of every process, since two of them share two cores

import numpy as np

from benchmarks.launch import launch, machine
from benchmarks.measure import read_ranks
from benchmarks.modules import ROOT
from benchmarks.report import machine_line, table, write_results
from benchmarks.schedules import expect_encoders
from benchmarks.sleeping_roles import (
    KEPT_BATCHES,
    PooledRoles,
    RolesJob,
    SleepingCosts,
    SleepingRoles,
    roles_data,
    train,
)
from flowtrain_lightning.allocator import (
    Allocation,
    RoleGraph,
    RoleLayout,
    choose_placement,
    default_allocation,
    graph_of,
)
from flowtrain_lightning.packing import CostModel
from flowtrain_lightning.packing.cost_model import Observation
from flowtrain_lightning.packing.role_graph import GENERATED
from flowtrain_lightning.placement.measured import MeasuredCosts, Processors
from flowtrain_lightning.placement.profile import Profile, ProfileOrigin, RoleProfile
from flowtrain_lightning.placement.run_costs import first_steps

OWN, POOLED, TOGETHER, UNIFORM, SYNCHRONOUS = "own ranks", "pooled", "colocated", "one layout", "batch-synchronous"
KINDS = {
    OWN: "every role on ranks of its own",
    POOLED: "both encoders in one role, on ranks of its own",
    TOGETHER: "all roles on all ranks, each in its own layout",
    UNIFORM: "all roles on all ranks, all in shards (FSDP2)",
    SYNCHRONOUS: "every role on ranks of its own; the backbone waits until a step is encoded",
}
"""Kind of placement -> what it is."""

WITHIN = 0.03
"""Aim: how far the automatic choice may be behind the fastest."""

_NAME = "roles"
_RANKS, _SAMPLES = 8, 160
_WARMUP, _STEPS = 1, 3
_STEP_SECONDS = 3.0  # of work of each rank in a step
_DEADLINE = 240.0
_SHARDED = RoleLayout(shard="fsdp")
_WEIGHT_BYTES = 16  # of a weight in float32, its gradient and AdamW's states


@dataclass(frozen=True)
class Mix:
    """What is emulated.

    Attributes:
        shares: of both encoders, the backbone and the generator of all work. A patch of a picture costs what one of a
            sound does, of which there are a third as many.
        weights: half -> billions of weights.
        memory: bytes of each device.
        what: in words.
    """

    shares: tuple[float, float, float]
    weights: Mapping[str, float]
    memory: float
    what: str


HALVES = tuple(SleepingRoles.halves)
MIXES = {
    "all fit": Mix(
        (0.35, 0.40, 0.25),
        dict(zip(HALVES, (0.6, 0.3, 1.5, 1.0), strict=True)),
        80e9,
        "all halves fit on a device together",
    ),
    "one fits": Mix(
        (0.37, 0.38, 0.25),
        dict(zip(HALVES, (0.6, 0.3, 3.0, 2.0), strict=True)),
        80e9,
        "each half fits on a device, but not all of them, so that ranks with all roles hold shards",
    ),
}


def main() -> None:
    """Measure, print, and write the results."""
    options = parse()
    file = options.out / f"{_NAME}.json"
    results: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    for name in options.mixes:
        with tempfile.TemporaryDirectory(prefix="benchmark-") as temporary:
            cell = Cell(MIXES[name], 4 if options.quick else _RANKS, options.quick)
            found = cell.run(Path(temporary), simulate=options.simulate)
        results[name] = {"what": cell.mix.what, "machine": machine(), **found}
        write_results(options.out, _NAME, results, text(results))
    print(f"\n{text(results)}\nWritten to {options.out}.")


@dataclass(frozen=True)
class Cell:
    """A mix on some ranks.

    Attributes:
        mix: of work and weights.
        ranks: processes, each of which stands for a device.
        quick: short steps.
    """

    mix: Mix
    ranks: int
    quick: bool

    @property
    def samples(self) -> int:
        """Of a step."""
        return 12 if self.quick else _SAMPLES

    @property
    def steps(self) -> int:
        """That are measured."""
        return 1 if self.quick else _STEPS

    def run(self, folder: Path, *, simulate: bool) -> dict[str, Any]:
        """Every placement, simulated and run; and the automatic choice."""
        costs, measured = self.costs(), self.measured()
        allocations, chosen = placements(measured, costs), choose_placement(measured[OWN]).chosen
        found: dict[str, Any] = {}
        for kind, allocation in allocations.items():
            of_graph = measured[POOLED if kind == POOLED else OWN]
            predicted = of_graph.predict(allocation)
            assert predicted is not None, "its steps can be dealt"
            told = {"layout": allocation.describe(), "simulated": predicted.seconds}
            if kind == SYNCHRONOUS:
                del told["simulated"]  # its backbone waits, which the simulator of a run does not play
            found[kind] = told if simulate else {**told, **self._run(allocation, costs, folder, kind)}
            print(f"{kind}: {found[kind]}", flush=True)
        same = next((kind for kind, each in allocations.items() if each == chosen.allocation), None)
        if same is None and not simulate:
            found["automatic"] = self._run(chosen.allocation, costs, folder, "automatic")
        return {
            "runs": found,
            "chosen": {"as": same, "layout": chosen.allocation.describe(), "simulated": chosen.seconds},
        }

    def costs(self) -> SleepingCosts:
        """What halves take, so that a rank has `_STEP_SECONDS` of work in a step where all have as much."""
        seconds = (0.4 if self.quick else _STEP_SECONDS) * self.ranks
        encoder, backbone, generator = (
            share * seconds / units for share, units in zip(self.mix.shares, self._units(), strict=True)
        )
        encoders = dict.fromkeys(("encoder", "encoder_image", "encoder_audio"), encoder)
        return SleepingCosts({**encoders, "backbone": backbone, "generator": generator})

    def _units(self) -> tuple[float, float, float]:
        """Patches of a step that are encoded, tokens, and patches that are generated, on average."""
        data = roles_data(self.samples, _WARMUP + self.steps, pooled=False)
        data.setup("fit")
        source = data.train_dataloader().steps.samples.source
        sizes, steps = source.sizes(np.arange(len(source))), _WARMUP + self.steps
        generated = int(sizes.media_patches[sizes.of_modality(GENERATED)].sum())
        encoded = int(sizes.media_patches.sum()) - generated
        return encoded / steps, int(sizes.tokens.sum()) / steps, generated / steps

    def measured(self) -> dict[str, MeasuredCosts]:
        """Costs as a run would have measured them, of the module with two encoders' roles and of that with one."""
        costs = self.costs()
        per_unit = costs.per_unit
        alone = Processors(tuple((rank,) for rank in range(self.ranks)), 1.0)
        found = {}
        for kind, module in ((OWN, SleepingRoles), (POOLED, PooledRoles)):
            weights = {**self.mix.weights, "encoder": sum(self.mix.weights[half] for half in HALVES[:2])}
            roles = {role: _half(per_unit[role], weights[role]) for role in module.halves}
            origin = ProfileOrigin("roles that sleep", "a device", {}, {"precision": "32-true"})
            profile, graph = Profile(origin, roles, 0, behind=("generator",)), graph_of(module.halves)
            steps = first_steps(roles_data(self.samples, _WARMUP + self.steps, costs, pooled=kind == POOLED))
            found[kind] = MeasuredCosts(
                profile, steps, self.ranks, alone, KEPT_BATCHES, rank_bytes=self.mix.memory, graph=graph
            )
        return found

    def _run(self, allocation: Allocation, costs: SleepingCosts, folder: Path, name: str) -> dict[str, float]:
        job = RolesJob(allocation, costs, name == SYNCHRONOUS, folder / name, self.samples, _WARMUP, self.steps)
        job.folder.mkdir()
        encoding = {rank for role in allocation.producers for rank in allocation.ranks[role]}
        expect_encoders(job.folder, len(encoding))
        launch(train, job, allocation.size, job.folder, _DEADLINE)
        ranks = read_ranks(job.folder)
        seconds = ranks[0]["ends"][-1] - ranks[0]["ends"][_WARMUP - 1]
        busy = sum(rank["family_seconds"] for rank in ranks)
        return {"step": seconds / self.steps, "cores": busy / seconds / (os.cpu_count() or 1)}


def _half(seconds: float, billions: float) -> RoleProfile:
    measured = (Observation(1.0, 1.0, seconds),)
    numbers = int(billions * 1e9)
    # Gradients and optimizers take no time here: a step has the work of its forwards and backwards.
    return RoleProfile(CostModel(seconds, 0.0, 0.0), True, numbers, 0, 0.0, 1 / 3, measured)


def placements(measured: Mapping[str, MeasuredCosts], costs: SleepingCosts) -> dict[str, Allocation]:
    """Kind -> its fastest allocation."""

    def fastest(kind: str, placement: str) -> Allocation:
        found = (one for one in measured[kind].predictions() if one.allocation.placement == placement)
        return min(found, key=lambda one: one.seconds).allocation

    graph, ranks = measured[OWN].graph, measured[OWN].ranks
    whole = default_allocation(ranks, "colocated", graph=graph)
    return {
        OWN: fastest(OWN, "separate"),
        POOLED: fastest(POOLED, "separate"),
        TOGETHER: fastest(OWN, "colocated"),
        UNIFORM: whole.with_roles(dict.fromkeys(graph.roles, _SHARDED)),
        SYNCHRONOUS: _synchronous(measured[OWN], graph),
    }


def _synchronous(measured: MeasuredCosts, graph: RoleGraph) -> Allocation:
    """Roles on ranks of their own, so that encoding a step and then all else take the least time together."""
    plans = measured.plan_steps(default_allocation(measured.ranks, "colocated", graph=graph), _WARMUP)

    def work(role: str) -> float:
        lengths = [plan.lengths(role)[batch] for plan in plans for own in plan.batches[role] for batch in own]
        return sum(measured.profile.roles[role].cost.of_set(each) for each in lengths)

    seconds = {role: work(role) for role in graph.roles}

    def phases(allocation: Allocation) -> float:
        taken = {role: seconds[role] / len(allocation.ranks[role]) for role in graph.roles}
        return max(taken[role] for role in graph.producers) + max(taken[r] for r in (graph.trunk, *graph.behind))

    apart = (one.allocation for one in measured.predictions() if one.allocation.placement == "separate")
    return min(apart, key=phases)


def text(results: Mapping[str, Any]) -> str:
    """The table, and whether the aim is reached."""
    rows, lines = [], []
    for name, cell in results.items():
        steps = {kind: run["step"] for kind, run in cell["runs"].items() if "step" in run}
        rows += [[f"{name}: {kind}", *_shown(run, steps)] for kind, run in cell["runs"].items()]
        chosen = cell["chosen"]["as"] or "automatic"
        if chosen in steps:
            late = steps[chosen] / min(steps.values()) - 1
            verdict = "reached" if late <= WITHIN else "missed"
            lines.append(f"- {name}: the automatic choice ({chosen}) is {late:.1%} behind the fastest; {verdict}.")
    layouts = [
        f"- {name}, {kind}: {run.get('layout', cell['chosen']['layout'])}"
        for name, cell in results.items()
        for kind, run in cell["runs"].items()
    ]
    parts = [
        "Seconds of a step with two encoders, a backbone and a generator. Computing is sleep; what ranks wait for is "
        "real. " + " ".join(f"*{kind}*: {what}." for kind, what in KINDS.items()),
        *(f"*{name}*: {cell['what']}." for name, cell in results.items()),
        table(["mix and placement", "simulated s", "measured s", "x fastest", "cores used"], rows),
        f"Aim: the automatic choice within {WITHIN:.0%} of the fastest.",
        "\n".join(lines),
        "Layouts:\n" + "\n".join(layouts),
        "\n".join(dict.fromkeys(machine_line(cell["machine"]) for cell in results.values())),
    ]
    return "\n\n".join(part.strip() for part in parts if part) + "\n"


def _shown(run: Mapping[str, float], steps: Mapping[str, float]) -> list[str]:
    simulated = f"{run['simulated']:.2f}" if "simulated" in run else "-"
    if "step" not in run:
        return [simulated, "-", "-", "-"]
    cores = f"{run['cores']:.0%} of {os.cpu_count()}"
    return [simulated, f"{run['step']:.2f}", f"{run['step'] / min(steps.values()):.2f}", cores]


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mixes", nargs="+", default=tuple(MIXES), choices=MIXES, help="which mixes")
    parser.add_argument("--simulate", action="store_true", help="none is run")
    parser.add_argument("--quick", action="store_true", help="short steps; the figures mean nothing")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results", help="folder of the results")
    return parser.parse_args()


if __name__ == "__main__":
    main()
