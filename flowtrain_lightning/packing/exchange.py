"""Samples of different rows change places until each row reads as much media as it should: an inner loop."""

from __future__ import annotations

import numpy as np

from flowtrain_lightning.packing.compiled import compiled
from flowtrain_lightning.packing.order import wanted_media
from flowtrain_lightning.packing.plan import FloatArray, IntArray

_QUANTA = 96
"""Parts of a step's media; less than half of one is not worth an exchange."""
_ROUNDS = 4


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
                moved = _exchange_between_rows(
                    bin_of, by_density, tokens, encoder, fill, order[giver], order[taker], ranks, wanted, budget, slack
                )
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
def _exchange_between_rows(
    bin_of: IntArray,
    by_density: IntArray,
    tokens: IntArray,
    encoder: FloatArray,
    fill: IntArray,
    giver: int,
    taker: int,
    ranks: int,
    wanted: float,
    budget: int,
    slack: int,
) -> float:
    """About ``wanted`` from one row to another, a like share on every rank; what has moved."""
    moved = 0.0
    for rank in range(ranks):
        rich, poor = giver * ranks + rank, taker * ranks + rank
        share = (wanted - moved) / (ranks - rank)
        moved += _exchange(bin_of, by_density, tokens, encoder, fill, rich, poor, share, budget, slack)
    return moved


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
