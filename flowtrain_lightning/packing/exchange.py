"""Media from one row to another, and rows into their order, so that encoder and backbone wait little for each other."""

from __future__ import annotations

import numpy as np

from flowtrain_lightning.packing.compiled import compiled
from flowtrain_lightning.packing.evening import even_out
from flowtrain_lightning.packing.microbatches import Objective, level_ranks
from flowtrain_lightning.packing.order import fastest_order, rows_time, wanted_media
from flowtrain_lightning.packing.plan import FloatArray, IntArray

_MOVABLE = 0.01
"""Where rows are even, samples with more attention than this share of a microbatch stay: their row is their like."""
_ENOUGH = 1e-3
"""A step this near to the work of its busiest lane, as a share of it, stays as it is."""
_UNEVENNESS = 2e-4
"""Share by which the backbone's time may grow through exchanges, as rows become less even."""
_QUANTA = 96
"""Parts of a step's media; less than half of one is not worth an exchange."""
_ROUNDS = 4
_SLACK = 80
"""Tokens by which two microbatches may come to differ through one exchange, where rows are to stay even."""


def flow_rows(
    bin_of: IntArray,
    tokens: IntArray,
    costs: FloatArray,
    encoder: FloatArray,
    *,
    rows: int,
    ranks: int,
    encoder_ranks: int,
    budget: int,
    objective: Objective,
) -> IntArray:
    """Order the rows of a step, and let samples of different rows change places where that makes the step shorter.

    An exchange is between microbatches of one rank; where ranks meet at every microbatch, of samples that have about as
    many tokens, so that rows stay even.

    Args:
        bin_of: ``[samples]`` the microbatch of each, ``row * ranks + rank``.
        tokens: ``[samples]`` of each.
        costs: ``[samples]`` backbone cost of each.
        encoder: ``[samples]`` encoder cost of each, in the unit of ``costs``, forward and backward.
        rows: rows of the step.
        ranks: backbone ranks.
        encoder_ranks: ranks that share the encoder cost.
        budget: the most tokens of a microbatch.
        objective: when ranks wait for each other.

    Returns:
        ``[samples]`` the microbatch of each, ``position * ranks + rank``.
    """
    encoder = encoder / encoder_ranks
    if objective == "accumulate":
        bin_of = _alike_rows(bin_of, costs, encoder, rows, ranks)
    cost, media = _per_row(bin_of, costs, encoder, rows, ranks, objective)
    order = fastest_order(cost, media)
    time = rows_time(order, cost, media)
    longest = cost.sum(axis=0).max()
    if time > max(longest, media.sum()) * (1 + _ENOUGH):
        found = _exchanged(bin_of, order, tokens, costs, encoder, cost, rows, ranks, budget, objective)
        new_cost, new_media = _per_row(found, costs, encoder, rows, ranks, objective)
        new_order = fastest_order(new_cost, new_media)
        new_longest = new_cost.sum(axis=0).max()
        if rows_time(new_order, new_cost, new_media) < time and new_longest <= longest * (1 + _UNEVENNESS):
            bin_of, order = found, new_order
    place = np.empty(rows, dtype=np.int64)
    place[order] = np.arange(rows)
    return place[bin_of // ranks] * ranks + bin_of % ranks


def _per_row(
    bin_of: IntArray, costs: FloatArray, encoder: FloatArray, rows: int, ranks: int, objective: Objective
) -> tuple[FloatArray, FloatArray]:
    """``[rows, lanes]`` time on the backbone, and ``[rows]`` on each encoder rank."""
    loads: FloatArray = np.bincount(bin_of, costs, minlength=rows * ranks).astype(np.float64)
    media: FloatArray = np.bincount(bin_of // ranks, encoder, minlength=rows).astype(np.float64)
    grid = loads.reshape(rows, ranks)
    return grid.max(axis=1, keepdims=True) if objective == "sync" else grid, media


def _alike_rows(bin_of: IntArray, costs: FloatArray, encoder: FloatArray, rows: int, ranks: int) -> IntArray:
    """Where ranks need not meet, each may have its own order: by rising media, if that makes the step shorter."""
    per_bin = np.bincount(bin_of, encoder, minlength=rows * ranks).reshape(rows, ranks)
    place = np.argsort(np.argsort(per_bin, axis=0, kind="stable"), axis=0)
    other: IntArray = (place * ranks + np.arange(ranks)).ravel()[bin_of]
    times = []
    for bins in (bin_of, other):
        cost, media = _per_row(bins, costs, encoder, rows, ranks, "accumulate")
        times.append(rows_time(fastest_order(cost, media), cost, media))
    return other if times[1] < times[0] else bin_of


def _exchanged(
    bin_of: IntArray,
    order: IntArray,
    tokens: IntArray,
    costs: FloatArray,
    encoder: FloatArray,
    cost: FloatArray,
    rows: int,
    ranks: int,
    budget: int,
    objective: Objective,
) -> IntArray:
    found = bin_of.copy()
    by_density, slack = np.lexsort((-tokens, encoder / costs)), budget
    if objective == "sync":
        # Attention: what a sample costs beyond the like number of the cheapest tokens.
        attention = costs - (costs / tokens).min() * tokens
        by_density, slack = by_density[attention[by_density] <= _MOVABLE * cost.mean()], _SLACK
    exchange_media(found, order, by_density, tokens, encoder, cost[order], ranks, budget, slack)
    if objective == "sync":
        falling = np.argsort(-tokens, kind="stable")
        evened = found[falling]
        bins = rows * ranks
        even_out(evened, np.arange(bins) // ranks, rows, tokens[falling], costs[falling], bins, budget)
        found[falling] = level_ranks(evened, costs[falling], rows, ranks)
    return found


@compiled
def exchange_media(
    bin_of: IntArray,
    order: IntArray,
    by_density: IntArray,
    tokens: IntArray,
    encoder: FloatArray,
    cost: FloatArray,
    ranks: int,
    budget: int,
    slack: int,
) -> None:
    """Exchange samples between microbatches of one rank until rows read about what :func:`wanted_media` says.

    Args:
        bin_of: ``[samples]`` the microbatch of each, ``row * ranks + rank``; changed in place.
        order: ``[rows]`` the rows in the order in which they run.
        by_density: the samples that may move, those with least media for their cost first.
        tokens: ``[samples]`` of each.
        encoder: ``[samples]`` what each costs an encoder rank, if all share it.
        cost: ``[rows, lanes]`` of the backbone, in the order in which rows run; see :func:`rows_time`.
        ranks: backbone ranks.
        budget: the most tokens of a microbatch.
        slack: tokens by which two microbatches may come to differ through one exchange.
    """
    rows = len(order)
    fill = np.zeros(rows * ranks, dtype=np.int64)
    media = np.zeros(rows, dtype=np.float64)
    place = np.empty(rows, dtype=np.int64)
    for position in range(rows):
        place[order[position]] = position
    total = 0.0
    for sample in range(len(bin_of)):
        fill[bin_of[sample]] += tokens[sample]
        media[place[bin_of[sample] // ranks]] += encoder[sample]
        total += encoder[sample]
    quantum = total / _QUANTA
    least, most = _reach(bin_of, place, by_density, tokens, encoder, media, ranks)
    for _ in range(_ROUNDS):
        missing = wanted_media(cost, media, least, most) - media
        changed = False
        by_missing = np.argsort(missing, kind="mergesort")
        for giver in by_missing:
            for taker in by_missing[::-1]:
                wanted = min(-missing[giver], missing[taker])
                if wanted < 0.5 * quantum:
                    continue
                moved = 0.0
                for rank in range(ranks):
                    rich, poor = order[giver] * ranks + rank, order[taker] * ranks + rank
                    share = (wanted - moved) / (ranks - rank)
                    moved += _exchange(bin_of, by_density, tokens, encoder, fill, rich, poor, share, budget, slack)
                media[giver] -= moved
                media[taker] += moved
                missing[giver] += moved
                missing[taker] -= moved
                changed = changed or moved > 0.5 * quantum
        for row in range(rows):
            # What a row could not reach now is out of its reach; the next round does what it can with the others.
            if missing[row] < -quantum:
                least[row] = media[row]
            elif missing[row] > quantum:
                most[row] = media[row]
        if not changed:
            break


@compiled
def _reach(
    bin_of: IntArray,
    place: IntArray,
    by_density: IntArray,
    tokens: IntArray,
    encoder: FloatArray,
    media: FloatArray,
    ranks: int,
) -> tuple[FloatArray, FloatArray]:
    """The least and the most media of each row, had it the poorest or the richest of all samples that may move."""
    movable = np.zeros(len(media), dtype=np.int64)
    fixed = media.copy()
    for sample in by_density:
        row = place[bin_of[sample] // ranks]
        movable[row] += tokens[sample]
        fixed[row] -= encoder[sample]
    least, most = fixed, fixed.copy()
    for row in range(len(media)):
        least[row] += _held(by_density, movable[row], tokens, encoder)
        most[row] += _held(by_density[::-1], movable[row], tokens, encoder)
    return least, most


@compiled
def _held(samples: IntArray, room: int, tokens: IntArray, encoder: FloatArray) -> float:
    """Encoder cost of the first of ``samples`` that have ``room`` tokens."""
    held = 0.0
    for sample in samples:
        if tokens[sample] > room:
            break
        room -= tokens[sample]
        held += encoder[sample]
    return held


@compiled
def _exchange(
    bin_of: IntArray,
    by_density: IntArray,
    tokens: IntArray,
    encoder: FloatArray,
    fill: IntArray,
    rich: int,
    poor: int,
    wanted: float,
    budget: int,
    slack: int,
) -> float:
    """The richest samples of one microbatch for the poorest of another, until about ``wanted`` has moved; what has."""
    given = by_density[bin_of[by_density] == rich][::-1]
    taken = by_density[bin_of[by_density] == poor]
    lowest = -min(slack, budget - fill[rich])
    highest = min(slack, budget - fill[poor])
    give, take, shift, moved = 0, 0, 0, 0.0
    best_give, best_take, best_shift, best_moved = 0, 0, 0, 0.0
    nearest = wanted
    while moved <= 1.5 * wanted:
        if shift <= 0:
            if give == len(given):
                break
            shift += tokens[given[give]]
            moved += encoder[given[give]]
            give += 1
        else:
            if take == len(taken):
                break
            shift -= tokens[taken[take]]
            moved -= encoder[taken[take]]
            take += 1
        distance = abs(wanted - moved) * (1.0 + 0.1 * abs(shift) / slack)
        if lowest <= shift <= highest and distance < nearest:
            best_give, best_take, best_shift, best_moved, nearest = give, take, shift, moved, distance
    bin_of[given[:best_give]] = poor
    bin_of[taken[:best_take]] = rich
    fill[poor] += best_shift
    fill[rich] -= best_shift
    return best_moved
