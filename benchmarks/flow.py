"""How much longer a step is than the work of its busiest lane, by the order of its microbatches. Costs are modelled.

python -m benchmarks.flow [--samples 20000] [--seeds 3]      some minutes with numba, see `benchmarks.packing_data`
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from statistics import mean

import numpy as np

from benchmarks.launch import machine
from benchmarks.lower_bounds import bounds_of
from benchmarks.modules import ROOT
from benchmarks.packing_data import TABLES, Lengths, load
from benchmarks.report import machine_line, table, write_results
from flowtrain_lightning.packing import CostModel
from flowtrain_lightning.packing.compiled import compile_at_once
from flowtrain_lightning.packing.evaluation import evaluate
from flowtrain_lightning.packing.offline import OfflinePlan, OfflineSettings, pack_offline
from flowtrain_lightning.packing.order import media_order
from flowtrain_lightning.packing.simulator import closed_form_time
from flowtrain_lightning.packing.step_plan import FloatArray, IntArray, SyncEvery

RANKS, BUDGET = 8, 16_384
COST = CostModel(1.0, 1 / 24_576, 0.0)
SPLITS = ((1, 1.0), (2, 1.0), (4, 1.0), (8, 1.0), (2, 0.85), (2, 0.5))
"""Encoder ranks, and what each of them has to do as a share of what a backbone rank has to do."""
MICROBATCHES = (4, 8, 16)
HEAD = (
    "microbatches a rank",
    "encoder ranks",
    "their load",
    "as packed",
    "media rising",
    "poor first and last",
    "this project",
    "its bound",
    "this project, accumulate",
)

_HEADING = """# The order in the step

`flow_gap` in percent on the mix, {ranks} backbone ranks, mean over {seeds} shuffles of {samples:,} samples. *Load* is
the work of an encoder rank over that of a backbone rank. *Poor first and last* is the order alone, without swaps;
*accumulate* is with `sync_every="step"`, the other columns with `"microbatch"`."""


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=20_000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results", help="folder of the results")
    options = parser.parse_args()
    compile_at_once()
    mixes = [load("qwen", TABLES, options.samples, BUDGET, seed) for seed in range(options.seeds)]
    results = [
        {"microbatches": microbatches, "ranks": ranks, "load": share, **gaps(mixes, microbatches, ranks, share)}
        for microbatches in MICROBATCHES
        for ranks, share in SPLITS
    ]
    lines = [
        [
            str(found["microbatches"]),
            str(found["ranks"]),
            f"{found['load']:.2f}",
            *(f"{found[name]:.2f}" for name in HEAD[3:]),
        ]
        for found in results
    ]
    where = machine()
    heading = _HEADING.format(ranks=RANKS, seeds=options.seeds, samples=options.samples)
    text = "\n\n".join([heading, table(HEAD, lines), machine_line(where)]) + "\n"
    write_results(options.out, "flow", {"machine": where, "results": results}, text)
    print(text)


def gaps(mixes: list[Lengths], microbatches: int, encoder_ranks: int, share: float = 1.0) -> dict[str, float]:
    """Every column of ``HEAD`` for one setting: flow_gap in percent, mean over the mixes."""
    found: dict[str, list[float]] = {name: [] for name in HEAD[3:]}
    for mix in mixes:
        scale = share * encoder_ranks / RANKS * float(COST.of_each(mix.tokens).sum() / mix.media_cost.sum())
        packed = _pack(mix, 0.0, microbatches, encoder_ranks, "microbatch")
        for name, order in ORDERS.items():
            found[name].append(_gap_of_order(packed, mix, scale / encoder_ranks, order))
        sync_every_values: dict[SyncEvery, str] = {"microbatch": HEAD[6], "step": HEAD[8]}
        for sync_every, name in sync_every_values.items():
            settings = _settings(microbatches, encoder_ranks, sync_every)
            plan = _pack(mix, scale, microbatches, encoder_ranks, sync_every)
            figures = evaluate(plan, mix.tokens, mix.media_start, scale * mix.media_cost, settings)
            found[name].append(figures["flow_gap"])
            if sync_every == "microbatch":
                bounds = bounds_of(plan, mix.tokens, mix.media_start, scale * mix.media_cost, settings)
                found[HEAD[7]].append(bounds["flow_bound"])
    return {name: mean(values) for name, values in found.items()}


ORDERS: dict[str, Callable[[FloatArray], IntArray]] = {
    HEAD[3]: lambda media: np.arange(len(media)),
    HEAD[4]: lambda media: np.argsort(media, kind="stable"),
    HEAD[5]: media_order,
}
"""The positions as they are, and put in order by how much media each reads."""


def _settings(microbatches: int, encoder_ranks: int, sync_every: SyncEvery) -> OfflineSettings:
    return OfflineSettings(
        token_budget=BUDGET,
        ranks=RANKS,
        cost=COST,
        microbatches=microbatches,
        balance_group=RANKS,
        sync_every=sync_every,
        encoder_ranks=encoder_ranks,
    )


def _pack(mix: Lengths, scale: float, microbatches: int, encoder_ranks: int, sync_every: SyncEvery) -> OfflinePlan:
    settings = _settings(microbatches, encoder_ranks, sync_every)
    return pack_offline(mix.tokens, mix.media_start, scale * mix.media_cost, settings)


def _gap_of_order(plan: OfflinePlan, mix: Lengths, scale: float, order: Callable[[FloatArray], IntArray]) -> float:
    """Percent, with media dealt evenly to the encoder ranks."""
    costs, encoder = COST.of_each(mix.tokens), scale * mix.encoder_cost
    time = work = 0.0
    for step in plan.steps:
        grid, media = np.zeros((step.positions, RANKS)), np.zeros(step.positions)
        np.add.at(grid, (step.bin_of // RANKS, step.bin_of % RANKS), costs[step.samples])
        np.add.at(media, step.bin_of // RANKS, encoder[step.samples])
        time += closed_form_time(order(media), grid.max(axis=1, keepdims=True), media)
        work += max(grid.sum(axis=0).max(), media.sum())
    return 100 * (time / work - 1)


if __name__ == "__main__":
    main()
