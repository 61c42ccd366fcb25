"""Packs real lengths with this project's packer and with others, in one run: quality and time, as table, JSON, PNG.

python -m benchmarks.packing [--samples 100000] [--out packing-benchmark]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.packing_data import TABLES, Lengths, load
from benchmarks.packing_papers import WlbQueue
from benchmarks.packing_peers import step_packers, window_packers
from benchmarks.packing_signatures import Bins
from flowtrain_lightning.packing import CostModel
from flowtrain_lightning.packing.judging import judge
from flowtrain_lightning.packing.metrics import encoder_idle, measure
from flowtrain_lightning.packing.microbatches import Objective, pack_microbatches
from flowtrain_lightning.packing.offline import OfflineSettings, Semantics, pack_offline
from flowtrain_lightning.packing.plan import FloatArray, IntArray

RANKS, POSITIONS, ENCODERS = 8, 4, 2
COST = CostModel(1.0, 1 / 24_576, 0.0)
WINDOWS = (256, 1_000, 10_000, 100_000)
PATIENCE = 40.0
"""Seconds after which a peer's larger windows are not tried."""
COLUMNS = ("pad", "imb", "row", "idle_sync", "idle_acc", "encoder_idle", "idle_two", "mixcv", "max_delay", "us")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--solver-seconds", type=float, default=10.0)
    parser.add_argument("--out", type=Path, default=Path("packing-benchmark"))
    options = parser.parse_args()
    results: list[dict[str, Any]] = []
    cases = [("mix", "qwen", TABLES, 16_384), ("long documents", "qwen", TABLES[1:2], 32_768)]
    cases.append(("coarse tiles", "tiles", TABLES, 4_096))
    for name, rule, tables, budget in cases:
        lengths = load(rule, tables, options.samples if name == "mix" else options.samples // 2, budget)
        for row in ours(lengths, budget):
            results.append({"data": name, **row})
            show(results[-1])
        peers = (
            others(lengths, budget, options.solver_seconds)
            if name == "mix"
            else wlb(lengths, budget, 0.88 if budget == 4_096 else 0.985)
        )
        for row in peers:
            results.append({"data": name, **row})
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
    cases: list[tuple[Semantics, Objective, int]] = [
        ("tokens", "sync", 8),
        ("tokens", "sync", 40),
        ("tokens", "sync", 0),
        ("tokens", "accumulate", 8),
        ("tokens", "accumulate", 0),
        ("samples", "sync", 0),
        ("samples", "accumulate", 0),
    ]
    for semantics, objective, delay in cases:
        settings = OfflineSettings(
            budget,
            RANKS,
            COST,
            POSITIONS,
            semantics,
            objective,
            ENCODERS,
            global_batch_size=max(RANKS, int(0.97 * RANKS * POSITIONS * budget / lengths.tokens.mean())),
            max_delay=delay,
        )
        arguments = (lengths.tokens, lengths.media_start, lengths.media_cost, settings)
        seconds = min(pack_offline(*arguments).seconds for _ in range(3))
        plan = pack_offline(*arguments)
        figures = judge(plan, *arguments[:3], settings)
        name = f"this project: {semantics}, {objective}" + (f", delay {delay}" if semantics == "tokens" else "")
        per_window = {}
        if semantics == "tokens" and objective == "sync" and delay:
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
    from dataclasses import replace

    alone = replace(settings, semantics="samples", global_batch_size=min(window, 1_000))
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
        yield {**figures, "name": name, "window": used, "us": windows[used], "windows": windows}
    for name, (balance, fill, most) in step_packers(solver_seconds).items():
        yield in_steps(name, balance, fill, most, lengths, budget)
    # The solvers have time for two steps only, which may be harder or easier than the others.
    yield in_steps("this project: sync, the steps of the solvers", own_step, 0.97, 2, lengths, budget)
    yield from wlb(lengths, budget)


def in_steps(name: str, balance: Any, fill: float, most: int | None, lengths: Lengths, budget: int) -> dict[str, Any]:
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
    """This project's microbatches of one step, row by row."""
    found = pack_microbatches(tokens, ranks=RANKS, token_budget=budget, cost=COST, objective="sync")
    return [members.tolist() for row in zip(*found, strict=True) for members in row]


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


def level(step: Bins, costs: np.ndarray[Any, Any]) -> Bins:
    """The bins of every row dealt to the ranks so that their totals are alike too."""
    totals = np.zeros(RANKS)
    dealt: Bins = []
    for start in range(0, len(step), RANKS):
        row = sorted(step[start : start + RANKS], key=lambda members: -costs[np.array(members, dtype=int)].sum())
        columns = np.argsort(totals, kind="stable")
        placed: Bins = [[] for _ in range(RANKS)]
        for column, members in zip(columns.tolist(), row, strict=True):
            placed[column] = members
            totals[column] += costs[np.array(members, dtype=int)].sum()
        dealt += placed
    return dealt


def score(steps: list[Bins], lengths: Lengths, budget: int) -> dict[str, Any]:
    """The metrics of bins; the media of a bin are encoded by the rank that reads it."""
    shape = (len(steps), POSITIONS, RANKS)
    quantities = (COST.of_each(lengths.tokens), lengths.encoder_cost, lengths.tokens, np.ones(len(lengths.tokens)))
    grids = [
        np.array([[values[np.array(b, dtype=int)].sum() for b in step] for step in steps]).reshape(shape)
        for values in quantities
    ]
    figures: dict[str, Any] = dict(measure(grids[0], grids[1], grids[2], grids[3], budget).as_dict())
    return figures | {"encoder_idle": encoder_idle(grids[1].sum(axis=1)), "max_delay": 0, "steps": len(steps)}


def longest_wait(steps: list[Bins], count: int) -> int:
    """Steps that a sample waited at most, drawn when the first sample behind it in the stream was used, or itself."""
    step_of = np.full(count, len(steps))
    for number, step in enumerate(steps):
        step_of[[item for members in step for item in members]] = number
    drawn = np.minimum.accumulate(step_of[::-1])[::-1]
    return int((step_of - drawn)[step_of < len(steps)].max(initial=0))


def random_order(lengths: Lengths, budget: int) -> float:
    """``mixcv`` where steps are cut from the stream as it comes."""
    ends = np.cumsum(lengths.tokens)
    cuts = np.searchsorted(ends, np.arange(0, ends[-1], 0.985 * RANKS * POSITIONS * budget))
    counts = np.diff(cuts)
    return float(counts.std() / counts.mean())


def show(row: dict[str, Any]) -> None:
    print(
        f"{row['data']:<15}{row['name']:<40}" + "".join(_cell(row.get(column)).rjust(10) for column in COLUMNS),
        flush=True,
    )


def table(results: list[dict[str, Any]]) -> str:
    head = ["data", "packer", "window", *COLUMNS, "bound"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in results:
        cells = [row["data"], row["name"], str(row["window"])]
        cells += [_cell(row.get(column)) for column in (*COLUMNS, "bound")]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.3f}" if isinstance(value, float) and value < 100 else f"{value:.0f}"


def draw(results: list[dict[str, Any]], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = [row for row in results if row["data"] == "mix"]
    figure = Figure(figsize=(9, 6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for row in rows:
        own = row["name"].startswith("this")
        axes.scatter(max(row["idle_sync"], 1e-3), row["us"], color="#2a78d6" if own else "#8a8a85", zorder=3)
        axes.annotate(
            row["name"], (max(row["idle_sync"], 1e-3), row["us"]), fontsize=7, xytext=(4, 3), textcoords="offset points"
        )
    axes.set(xscale="log", yscale="log", xlabel="idle at every microbatch, %", ylabel="microseconds per sample")
    axes.set_title("Mix: waiting ranks and packing time", loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=140)


if __name__ == "__main__":
    main()
