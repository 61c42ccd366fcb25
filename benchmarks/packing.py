"""Packs real lengths with this project's packer and with others, in one run: quality and time, as table, JSON, PNG.

python -m benchmarks.packing [--samples 100000] [--out packing-benchmark]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lower_bounds import bounds_of
from benchmarks.packing_data import TABLES, Lengths, load
from benchmarks.packing_papers import WlbQueue
from benchmarks.packing_peers import step_packers, window_packers
from benchmarks.packing_report import draw, show, table
from benchmarks.packing_scores import COST, POSITIONS, RANKS, level, longest_wait, random_order, score
from benchmarks.packing_signatures import Bins, StepPacker, WindowPacker
from flowtrain_lightning.packing.compiled import compile_at_once
from flowtrain_lightning.packing.evaluation import evaluate
from flowtrain_lightning.packing.microbatches import pack_microbatches
from flowtrain_lightning.packing.offline import OfflineSettings, pack_offline
from flowtrain_lightning.packing.step_plan import FloatArray, IntArray, SyncEvery

ENCODERS = 2
"""Encoder ranks."""
WINDOWS = (256, 1_000, 10_000, 100_000)
PATIENCE = 40.0
"""Seconds after which a peer's larger windows are not tried."""


def main() -> None:
    """Pack, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--solver-seconds", type=float, default=10.0)
    parser.add_argument("--out", type=Path, default=Path("packing-benchmark"))
    options = parser.parse_args()
    compile_at_once()
    results: list[dict[str, Any]] = []
    cases = [("mix", "qwen", TABLES, 16_384), ("long documents", "qwen", TABLES[1:2], 32_768)]
    cases.append(("coarse tiles", "tiles", TABLES, 4_096))
    for name, rule, tables, budget in cases:
        lengths = load(rule, tables, options.samples if name == "mix" else options.samples // 2, budget)
        for result in ours(lengths, budget):
            results.append({"data": name, **result})
            show(results[-1])
        peers = (
            others(lengths, budget, options.solver_seconds)
            if name == "mix"
            else wlb(lengths, budget, 0.88 if budget == 4_096 else 0.985)
        )
        for result in peers:
            results.append({"data": name, **result})
            show(results[-1])
    mix = load("qwen", TABLES, options.samples, 16_384)
    order = random_order(mix, 16_384)
    print(f"mixcv of random order: {order:.4f}")
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "packing.json").write_text(json.dumps({"random_mixcv": order, "results": results}, indent=1))
    (options.out / "packing.md").write_text(table(results))
    draw(results, options.out / "packing.png")


def ours(lengths: Lengths, budget: int) -> Iterator[dict[str, Any]]:
    """This project, in its settings, and over windows."""
    cases: list[tuple[str, SyncEvery, int]] = [
        ("tokens", "microbatch", 8),
        ("tokens", "microbatch", 40),
        ("tokens", "microbatch", 0),
        ("tokens", "step", 8),
        ("tokens", "step", 0),
        ("samples", "microbatch", 0),
        ("samples", "step", 0),
    ]
    samples = max(RANKS, int(0.97 * RANKS * POSITIONS * budget / lengths.tokens.mean()))
    for batch_unit, sync_every, delay in cases:
        settings = OfflineSettings(
            budget,
            RANKS,
            COST,
            POSITIONS if batch_unit == "tokens" else None,
            sync_every,
            ENCODERS,
            samples if batch_unit == "samples" else None,
            max_delay=delay,
        )
        arguments = (lengths.tokens, lengths.media_start, lengths.media_cost, settings)
        seconds = min(pack_offline(*arguments).seconds for _ in range(3))
        plan = pack_offline(*arguments)
        figures = evaluate(plan, *arguments[:3], settings) | bounds_of(plan, *arguments)
        name = f"this project: {batch_unit}, {sync_every}" + (f", delay {delay}" if batch_unit == "tokens" else "")
        per_window = {}
        if batch_unit == "tokens" and sync_every == "microbatch" and delay:
            per_window = {window: ours_in_windows(lengths, window, settings) for window in WINDOWS}
        yield {
            **figures,
            "name": name,
            "window": "stream",
            "max_delay": figures["max_delay_seen"],
            "us": 1e6 * seconds / len(lengths.tokens),
            "windows": per_window,
        }


def ours_in_windows(lengths: Lengths, window: int, settings: OfflineSettings) -> float:
    """Microseconds per sample where each window is packed alone, as one step of samples."""
    alone = replace(settings, microbatches=None, global_batch_size=min(window, 1_000))
    taken = 0.0
    count = min(len(lengths.tokens) // window, 20)
    for number in range(count):
        part = slice(number * window, (number + 1) * window)
        starts = lengths.media_start[part.start : part.stop + 1]
        media = lengths.media_cost[starts[0] : starts[-1]]
        taken += pack_offline(lengths.tokens[part], starts - starts[0], media, alone).seconds
    return 1e6 * taken / max(1, count * window)


def others(lengths: Lengths, budget: int, solver_seconds: float) -> Iterator[dict[str, Any]]:
    """Everybody else."""
    generator = np.random.default_rng(0)
    for name, pack in window_packers().items():
        yield in_windows(name, pack, lengths, budget, generator)
    for name, (balance, fill, most) in step_packers(solver_seconds).items():
        yield in_steps(name, balance, fill, most, lengths, budget)
    # The solvers have time for two steps only, which may be harder or easier than the others.
    yield in_steps("this project: microbatch, the steps of the solvers", own_step, 0.97, 2, lengths, budget)
    yield from wlb(lengths, budget)


def in_windows(
    name: str, pack: WindowPacker, lengths: Lengths, budget: int, generator: np.random.Generator
) -> dict[str, Any]:
    """A packer of windows: the bins of the largest one that it can take, shuffled where its paper says so."""
    windows: dict[int, float] = {}
    bins: Bins = []
    used = 0
    for window in WINDOWS:
        count = max(1, min(20, len(lengths.tokens) // window)) if window <= len(lengths.tokens) else 0
        if count == 0 or (windows and windows[used] * window / 1e6 > PATIENCE):
            continue
        parts = [lengths.tokens[i * window : (i + 1) * window] for i in range(count)]
        begin = time.perf_counter()
        found = [pack(part, budget) for part in parts]
        windows[window] = 1e6 * (time.perf_counter() - begin) / (count * window)
        if window >= 1_000:
            bins = [[item + i * window for item in b] for i, each in enumerate(found) for b in each]
            used = window
        used = used or window
    order = range(len(bins)) if "*" in name else generator.permutation(len(bins)).tolist()
    bins = [bins[number] for number in order]
    whole = len(bins) // (RANKS * POSITIONS) * RANKS * POSITIONS
    costs = COST.of_each(lengths.tokens)
    steps = [level(bins[i : i + RANKS * POSITIONS], costs) for i in range(0, whole, RANKS * POSITIONS)]
    figures = {**score(steps, lengths, budget), "max_delay": longest_wait(steps, len(lengths.tokens))}
    return {**figures, "name": name, "window": used, "us": windows[used], "windows": windows}


def in_steps(
    name: str, balance: StepPacker, fill: float, most: int | None, lengths: Lengths, budget: int
) -> dict[str, Any]:
    """A packer of steps: ``most`` steps of the stream, each of so many samples as fill its bins to a share."""
    steps: list[Bins] = []
    ends = np.cumsum(lengths.tokens)
    start, taken = 0, 0.0
    while most is None or len(steps) < most:
        goal = (ends[start - 1] if start else 0) + fill * RANKS * POSITIONS * budget
        end = int(np.searchsorted(ends, goal))
        if end >= len(ends):
            break
        tokens = lengths.tokens[start:end]
        begin = time.perf_counter()
        found = balance(tokens, COST.of_each(tokens), RANKS * POSITIONS, budget)
        taken += time.perf_counter() - begin
        if not name.startswith("verl"):
            costs = [COST.of_each(tokens[np.array(members, dtype=int)]).sum() for members in found]
            found = level(
                [found[number] for number in np.argsort(-np.array(costs), kind="stable")], COST.of_each(tokens)
            )
        steps.append([[start + item for item in members] for members in found])
        start = end
    return {**score(steps, lengths, budget), "name": name, "window": "step", "us": 1e6 * taken / start, "windows": {}}


def own_step(tokens: IntArray, costs: FloatArray, bins: int, budget: int) -> Bins:
    """This project's microbatches of one step, position by position."""
    found = pack_microbatches(tokens, ranks=RANKS, token_budget=budget, cost=COST, sync_every="microbatch")
    return [members.tolist() for of_ranks in zip(*found, strict=True) for members in of_ranks]


def wlb(lengths: Lengths, budget: int, full: float = 0.985) -> Iterator[dict[str, Any]]:
    """WLB-LLM with a full and a less full budget, without and with a limit of delay; its queues tuned for each."""
    costs = COST.of_each(lengths.tokens)
    for fill, limit, outlier, levels in [
        (full, None, 0.35, 8),
        (full - 0.035, None, 0.97, 6),
        (full, 8, 0.35, 3),
        (full - 0.035, 8, 0.97, 1),
    ]:
        queue = WlbQueue(RANKS, fill, limit, outlier, levels)
        begin = time.perf_counter()
        steps, waited = queue.pack(lengths.tokens, costs, RANKS * POSITIONS, budget)
        us = 1e6 * (time.perf_counter() - begin) / len(lengths.tokens)
        name = f"WLB-LLM*, {100 * fill:g} % fill" + ("" if limit is None else f", delay {limit}")
        if steps:
            figures = score([level(step, costs) for step in steps], lengths, budget)
            yield {**figures, "name": name, "window": "stream", "max_delay": waited, "us": us}


if __name__ == "__main__":
    main()
