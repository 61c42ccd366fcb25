"""Swaps samples between positions of a step until each reads about as much media as it should."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from flowtrain_lightning.packing.compiled import compiled
from flowtrain_lightning.packing.simulator import closed_form_time
from flowtrain_lightning.packing.step_plan import FloatArray, IntArray
from flowtrain_lightning.packing.step_work import FORWARD_SHARE

_QUANTA = 96
"""Parts in which a step's media are dealt to its positions; less than half of one is not worth a swap."""
_NEAR = 0.02
"""Chains this much shorter than the longest one, as a share of the step, still count."""
_ROUNDS = 4
"""Times that it is found out what positions should read, and samples are swapped."""


class _Samples(NamedTuple):
    """The samples of a step; the arrays ``bin_of`` and ``fill`` are changed in place.

    Attributes:
        bin_of: ``[samples]`` the microbatch of each, ``position * ranks + rank`` before positions were ordered.
        by_density: the samples that may be swapped, those with least media for their cost first.
        tokens: ``[samples]`` of each.
        encoder: ``[samples]`` what each costs an encoder rank, if all share it.
        fill: ``[microbatches]`` tokens of each.
        budget: the most tokens of a microbatch.
        slack: tokens by which two microbatches may come to differ through one swap.
    """

    bin_of: IntArray
    by_density: IntArray
    tokens: IntArray
    encoder: FloatArray
    fill: IntArray
    budget: int
    slack: int


@compiled
def swap_for_media(
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
    """Swap samples between microbatches of one rank until positions read about what :func:`wanted_media` says.

    Args:
        bin_of: ``[samples]`` the microbatch of each, ``position * ranks + rank``; changed in place.
        order: ``[positions]`` the positions in the order in which they run.
        by_density: the samples that may be swapped, those with least media for their cost first.
        tokens: ``[samples]`` of each.
        encoder: ``[samples]`` what each costs an encoder rank, if all share it.
        cost: ``[positions, lanes]`` of the backbone, in the order in which positions run; see
            :func:`closed_form_time`.
        ranks: backbone ranks.
        budget: the most tokens of a microbatch.
        slack: tokens by which two microbatches may come to differ through one swap.
    """
    positions = len(order)
    fill = np.zeros(positions * ranks, dtype=np.int64)
    media = np.zeros(positions, dtype=np.float64)  # in the order in which positions run, as all that follows
    turn_of = np.empty(positions, dtype=np.int64)
    for turn in range(positions):
        turn_of[order[turn]] = turn
    total = 0.0
    for sample in range(len(bin_of)):
        fill[bin_of[sample]] += tokens[sample]
        media[turn_of[bin_of[sample] // ranks]] += encoder[sample]
        total += encoder[sample]
    samples = _Samples(bin_of, by_density, tokens, encoder, fill, budget, slack)
    quantum = total / _QUANTA
    least, most = _reach(samples, turn_of, media, ranks)
    for _ in range(_ROUNDS):
        missing = wanted_media(cost, media, least, most) - media
        changed = False
        by_missing = np.argsort(missing, kind="mergesort")
        for giver in by_missing:
            for taker in by_missing[::-1]:
                wanted = min(-missing[giver], missing[taker])
                if wanted < 0.5 * quantum:
                    continue
                moved = _swap_between_positions(samples, order[giver], order[taker], ranks, wanted)
                media[giver] -= moved
                media[taker] += moved
                missing[giver] += moved
                missing[taker] -= moved
                changed = changed or moved > 0.5 * quantum
        for turn in range(positions):
            # What a position could not reach now is out of its reach; the next round does what the others can.
            if missing[turn] < -quantum:
                least[turn] = media[turn]
            elif missing[turn] > quantum:
                most[turn] = media[turn]
        if not changed:
            break


@compiled
def _reach(samples: _Samples, turn_of: IntArray, media: FloatArray, ranks: int) -> tuple[FloatArray, FloatArray]:
    """The least and the most media of each position, had it the poorest or the richest of all samples that may move."""
    movable = np.zeros(len(media), dtype=np.int64)
    fixed = media.copy()
    for sample in samples.by_density:
        turn = turn_of[samples.bin_of[sample] // ranks]
        movable[turn] += samples.tokens[sample]
        fixed[turn] -= samples.encoder[sample]
    least, most = fixed, fixed.copy()
    for turn in range(len(media)):
        least[turn] += _media_of_first(samples.by_density, movable[turn], samples)
        most[turn] += _media_of_first(samples.by_density[::-1], movable[turn], samples)
    return least, most


@compiled
def _media_of_first(chosen: IntArray, tokens: int, samples: _Samples) -> float:
    """Encoder cost of the first of ``chosen`` that have ``tokens`` tokens together."""
    media = 0.0
    for sample in chosen:
        if samples.tokens[sample] > tokens:
            break
        tokens -= samples.tokens[sample]
        media += samples.encoder[sample]
    return media


@compiled
def _swap_between_positions(samples: _Samples, giver: int, taker: int, ranks: int, wanted: float) -> float:
    """Media of about ``wanted`` from one position to another, as much on every rank; what has moved."""
    moved = 0.0
    for rank in range(ranks):
        share = (wanted - moved) / (ranks - rank)
        moved += _swap(samples, giver * ranks + rank, taker * ranks + rank, share)
    return moved


@compiled
def _swap(samples: _Samples, rich: int, poor: int, wanted: float) -> float:
    """The richest samples of one microbatch for the poorest of another, until about ``wanted`` has moved; what has."""
    tokens, encoder = samples.tokens, samples.encoder
    given = samples.by_density[samples.bin_of[samples.by_density] == rich][::-1]
    taken = samples.by_density[samples.bin_of[samples.by_density] == poor]
    lowest = -min(samples.slack, samples.budget - samples.fill[rich])
    highest = min(samples.slack, samples.budget - samples.fill[poor])
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
        distance = abs(wanted - moved) * (1.0 + 0.1 * abs(shift) / samples.slack)
        if lowest <= shift <= highest and distance < nearest:
            best_give, best_take, best_shift, best_moved, nearest = give, take, shift, moved, distance
    samples.bin_of[given[:best_give]] = poor
    samples.bin_of[taken[:best_take]] = rich
    samples.fill[poor] += best_shift
    samples.fill[rich] -= best_shift
    return best_moved


@compiled
def wanted_media(cost: FloatArray, media: FloatArray, least: FloatArray, most: FloatArray) -> FloatArray:
    """Media that each position should read for the step to be short.

    A step is as long as its longest chain: the forwards for all positions up to one, that position and the following
    ones on the backbone, and the backwards for all positions from another one on. Media move, a little at a time, from
    the position that long chains hold most of to the one that they hold least of.

    Args:
        cost: ``[positions, lanes]`` of the backbone, in order; see :func:`closed_form_time`.
        media: ``[positions]`` encoder cost on each encoder rank, forward and backward.
        least: ``[positions]`` as poor in media as each can be.
        most: ``[positions]`` as rich as each can be.

    Returns:
        ``[positions]`` the same media in all.
    """
    count = len(cost)
    order = np.arange(count)
    wanted: FloatArray = media.copy()
    best: FloatArray = media.copy()
    mean = np.zeros(count, dtype=np.float64)
    total, span = 0.0, 0.0
    for position in range(count):
        for lane in range(cost.shape[1]):
            mean[position] += cost[position, lane] / cost.shape[1]
        total += media[position]
        span += mean[position]
    quantum = total / _QUANTA
    shortest = np.inf
    for _ in range(2 * _QUANTA):
        time = closed_form_time(order, cost, wanted)
        if time < shortest:
            shortest = time
            best[:] = wanted
        weight = _weight_in_chains(mean, wanted, time, _NEAR * max(span, total))
        giver, taker = -1, -1
        for position in range(count):
            if wanted[position] - quantum >= least[position] and (giver < 0 or weight[position] > weight[giver]):
                giver = position
            if wanted[position] + quantum <= most[position] and (
                taker < 0
                or weight[position] < weight[taker]
                or (weight[position] == weight[taker] and wanted[position] < wanted[taker])
            ):
                taker = position
        if giver < 0 or taker < 0 or weight[giver] <= weight[taker]:
            break
        wanted[giver] -= quantum
        wanted[taker] += quantum
    return best


@compiled
def _weight_in_chains(cost: FloatArray, media: FloatArray, time: float, near: float) -> FloatArray:
    """``[positions]`` by how much the long chains grow with the media of each.

    Args:
        cost: ``[positions]`` of the backbone.
        media: ``[positions]`` of each encoder rank.
        time: of the step, that is of its longest chain.
        near: chains count the less the more they are shorter than ``time``, down to nothing at this much.
    """
    count = len(cost)
    forward = np.zeros(count, dtype=np.float64)
    backward = np.zeros(count, dtype=np.float64)
    before = 0.0
    for first in range(count):
        before += media[first] * FORWARD_SHARE
        after = 0.0
        for last in range(first, count):
            after += media[last] * (1.0 - FORWARD_SHARE)
        between = 0.0
        for last in range(first, count):
            between += cost[last]
            share = max(0.0, 1.0 - (time - before - between - after) / near)
            forward[first] += share * share
            backward[last] += share * share
            after -= media[last] * (1.0 - FORWARD_SHARE)
    # A chain holds the forwards of all positions up to its first, and the backwards of all from its last on.
    weight = np.zeros(count, dtype=np.float64)
    held = 0.0
    for position in range(count - 1, -1, -1):
        held += forward[position]
        weight[position] += held * FORWARD_SHARE
    held = 0.0
    for position in range(count):
        held += backward[position]
        weight[position] += held * (1.0 - FORWARD_SHARE)
    return weight
