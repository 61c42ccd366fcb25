"""The best plan for 1, 2, 4 ... devices: ``flowtrain plan --sweep``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from flowtrain_lightning.allocator import Cluster
from flowtrain_lightning.allocator.digits import in_digits
from flowtrain_lightning.cli.plan_bill import Price, bill_of
from flowtrain_lightning.cli.plan_choice import why_plan_cannot_run
from flowtrain_lightning.cli.plan_question import PlanQuestion, best_budget
from flowtrain_lightning.cli.plan_report import batch_warning, smallest_full_batch
from flowtrain_lightning.placement.text_table import text_table


def sweep(
    question: PlanQuestion,
    tokens: float | None,
    price: Price | None,
    plot: Path | None,
    *,
    as_json: bool,
    searches: bool = False,
) -> None:
    """Print the best plan for every number of devices up to those that were asked for.

    Args:
        question: for the largest number.
        tokens: backbone tokens to train on, for hours and cost.
        price: of an hour of one device.
        plot: the picture to draw.
        as_json: print figures and not a table.
        searches: each number of devices has the token budget with which it is fastest.

    Raises:
        PlanningError: the picture cannot be drawn.
    """
    per_node, most = question.cluster.per_node, question.cluster.devices
    counts = sorted({2**power for power in range(most.bit_length())} | {most})
    found, warning = [], None
    for count in (count for count in counts if count <= per_node or count % per_node == 0):
        smaller = replace(question, cluster=Cluster(question.cluster.device, count, per_node))
        smaller = (best_budget(smaller) if searches else smaller).as_it_fits()
        found.append(_figures(smaller, tokens, price))
        if warning is None and found[-1]["placement"] is not None:
            warning = batch_warning(smaller.problems)
    if plot is not None:
        from flowtrain_lightning.cli.plots import draw_sweep

        draw_sweep(found, f"{question.module.name} on {question.cluster.device.name}", plot)
    if as_json:
        print(json.dumps(found))
        return
    table = _table(found, billed=tokens is not None, searched=searches)
    print("\n\n".join([table, *([warning] if warning is not None else [])]))


_KEYS = ("step_seconds", "samples_per_second", "mfu", "runs_today", "smallest_full_batch", "token_budget", "bill")
"""Figures of a number of devices, all None where nothing fits on these."""


def _figures(question: PlanQuestion, tokens: float | None, price: Price | None) -> dict[str, Any]:
    count = question.cluster.devices
    if not question.running and not question.costs.every_plan:
        return {"devices": count, "placement": None, **dict.fromkeys(_KEYS)}
    best = question.answer().recommended.chosen
    bill = None if tokens is None else bill_of(best, question.problems, tokens, price)
    return {
        "devices": count,
        "placement": best.name,
        "step_seconds": best.seconds,
        "samples_per_second": best.samples_per_second,
        "mfu": best.mfu,
        "runs_today": why_plan_cannot_run(best, question.problems) is None,
        "smallest_full_batch": smallest_full_batch(question.problems),
        "token_budget": question.problems.load.budget,
        "bill": None if bill is None else bill.values(),
    }


def _table(found: Sequence[dict[str, Any]], *, billed: bool, searched: bool) -> str:
    head = ["devices", "placement", "s/step", "samples/s", "MFU", "training runs it", "batch"]
    head += ["token budget"] if searched else []
    head += ["hours", "cost"] if billed else []
    return text_table(head, [_cells(each, head) for each in found])


def _cells(each: dict[str, Any], head: Sequence[str]) -> list[str]:
    if each["placement"] is None:
        return [str(each["devices"]), "does not fit", *[""] * (len(head) - 2)]
    cells = [
        str(each["devices"]),
        each["placement"],
        in_digits(each["step_seconds"], 4),
        in_digits(each["samples_per_second"], 4),
        f"{100 * each['mfu']:.1f} %",
        "yes" if each["runs_today"] else "not yet",
        "" if each["smallest_full_batch"] is None else "small",
    ]
    cells += [f"{each['token_budget']:,}"] if "token budget" in head else []
    if (bill := each["bill"]) is not None:
        cost = "" if bill["cost"] is None else f"{bill['cost']:,.0f} {bill['currency']}"
        cells += [in_digits(bill["hours"], 3), cost]
    return cells
