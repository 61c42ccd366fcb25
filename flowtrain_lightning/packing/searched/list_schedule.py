"""Plays chains of stages by priorities within limits of memory: a free rank begins the best that it can."""

from __future__ import annotations

from typing import Any

import numpy as np

from flowtrain_lightning.packing.compiled import compiled
from flowtrain_lightning.packing.step_plan import BoolArray, FloatArray, IntArray

_NEVER = 1e300


@compiled
def list_schedule(
    ranks: IntArray,
    seconds: FloatArray,
    stores: IntArray,
    room: FloatArray,
    forward_of: IntArray,
    starts: IntArray,
    takers: IntArray,
    lacks: IntArray,
    priority: FloatArray,
    limits: FloatArray,
    spare: FloatArray,
    again: BoolArray,
) -> Any:
    """Plays the works of a step; see `ChainGraph` for the first eight.

    A forward begins only where its store has room for what it keeps. Where no rank can go on, of all forwards that wait
    for room the one of the least priority value keeps nothing, and is computed again before its backward; its store
    then leaves ``spare`` free from the start, so that it never holds more than its limit. With that nothing can block.

    Args:
        ranks: ``[works]``.
        seconds: ``[works]``.
        stores: ``[works]``.
        room: ``[works]``.
        forward_of: ``[works]``.
        starts: ``[works + 1]``.
        takers: the works that take the result of ``work`` are ``takers[starts[work]:starts[work + 1]]``.
        lacks: ``[works]``.
        priority: ``[works]`` of those that can begin on a rank the least does.
        limits: ``[stores]`` what may be kept in each.
        spare: ``[stores]`` what a forward that is computed again takes there while it and its backward run.
        again: ``[stores]`` whether forwards of a store may be computed again.

    Returns:
        the works as they began, and ``[works]`` which forwards kept nothing; fewer than all works, if none can go on.
    """
    reserved = np.zeros(len(limits), dtype=np.bool_)
    while True:
        free = np.where(reserved, limits - spare, limits) + 1e-9
        order, recomputed, begun, full = _played(
            ranks,
            seconds,
            stores,
            room,
            forward_of,
            starts,
            takers,
            lacks,
            priority,
            free,
            again,
            reserved | (spare <= 0.0),
        )
        if full < 0:
            return order[:begun], recomputed
        reserved[full] = True


@compiled
def _played(
    ranks: IntArray,
    seconds: FloatArray,
    stores: IntArray,
    room: FloatArray,
    forward_of: IntArray,
    starts: IntArray,
    takers: IntArray,
    lacks: IntArray,
    priority: FloatArray,
    free: FloatArray,
    again: BoolArray,
    prepared: BoolArray,
) -> Any:
    """One play with so much ``free`` in each store, until a forward is to be computed again in one not ``prepared``."""
    works, count = len(ranks), int(ranks.max()) + 1
    left, held, until, order = lacks.copy(), np.zeros(len(free)), np.zeros(count), np.zeros(works, dtype=np.int64)
    ready, waiting = np.zeros((count, works), dtype=np.int64), np.zeros(count, dtype=np.int64)
    running, recomputed = np.full(count, -1, dtype=np.int64), np.zeros(works, dtype=np.bool_)
    for work in np.flatnonzero(left == 0):
        _wait(int(work), ranks[work], ready, waiting)
    now, begun, ended = 0.0, 0, 0
    while ended < works:
        next_end = _NEVER
        for rank in range(count):
            if running[rank] < 0:
                place = _best(ready[rank, : waiting[rank]], stores, room, priority, held, free, recomputed)
                if place >= 0:
                    work = ready[rank, place]
                    waiting[rank] -= 1
                    ready[rank, place] = ready[rank, waiting[rank]]
                    running[rank], forward = work, forward_of[work]
                    again_first = seconds[forward] if forward >= 0 and recomputed[forward] else 0.0
                    until[rank] = now + again_first + seconds[work]
                    held[stores[work]] += 0.0 if recomputed[work] else room[work]
                    order[begun] = work
                    begun += 1
            if running[rank] >= 0:
                next_end = min(next_end, until[rank])
        if next_end == _NEVER:
            chosen = _least(ready, waiting, stores, priority, again)
            if chosen < 0:
                return order, recomputed, begun, -1
            if not prepared[stores[chosen]]:
                return order, recomputed, begun, stores[chosen]
            recomputed[chosen] = True
            continue
        now = next_end
        for rank in range(count):
            if running[rank] >= 0 and until[rank] <= now:
                work, running[rank] = running[rank], -1
                ended += 1
                forward = forward_of[work]
                if forward >= 0 and not recomputed[forward]:
                    held[stores[forward]] -= room[forward]
                for taker in takers[starts[work] : starts[work + 1]]:
                    left[taker] -= 1
                    if left[taker] == 0:
                        _wait(taker, ranks[taker], ready, waiting)
    return order, recomputed, begun, -1


@compiled
def _wait(work: int, rank: int, ready: IntArray, waiting: IntArray) -> None:
    """Puts a work that has all that it needs to those of its rank."""
    ready[rank, waiting[rank]] = work
    waiting[rank] += 1


@compiled
def _best(
    ready: IntArray,
    stores: IntArray,
    room: FloatArray,
    priority: FloatArray,
    held: FloatArray,
    free: FloatArray,
    recomputed: BoolArray,
) -> int:
    """The place of the first of a rank's works for which there is room; -1 for none."""
    best, least = -1, _NEVER
    for place in range(len(ready)):
        work = ready[place]
        if priority[work] < least:
            store = stores[work]
            if recomputed[work] or room[work] == 0.0 or held[store] + room[work] <= free[store]:
                best, least = place, priority[work]
    return best


@compiled
def _least(ready: IntArray, waiting: IntArray, stores: IntArray, priority: FloatArray, again: BoolArray) -> int:
    """The first of all works that wait for room and may be computed again; -1 for none."""
    chosen, least = -1, _NEVER
    for rank in range(len(waiting)):
        for place in range(waiting[rank]):
            work = ready[rank, place]
            if priority[work] < least and again[stores[work]]:
                chosen, least = work, priority[work]
    return chosen


@compiled
def seconds_in_order(
    order: IntArray,
    ranks: IntArray,
    seconds: FloatArray,
    forward_of: IntArray,
    starts: IntArray,
    takers: IntArray,
    recomputed: BoolArray,
) -> float:
    """Seconds of a step whose ranks do their works in a fixed order, and wait for the next one.

    Args:
        order: of all works, none before what it needs.
        ranks: ``[works]``.
        seconds: ``[works]``, which need not be those that the order was made for.
        forward_of: ``[works]``.
        starts: see `list_schedule`.
        takers: see there.
        recomputed: ``[works]`` forwards that are computed again before their backward.
    """
    free = np.zeros(int(ranks.max()) + 1)
    arrived = np.zeros(len(order))
    longest = 0.0
    for index in range(len(order)):
        work = order[index]
        rank, forward = ranks[work], forward_of[work]
        again_first = seconds[forward] if forward >= 0 and recomputed[forward] else 0.0
        end = max(free[rank], arrived[work]) + again_first + seconds[work]
        free[rank] = end
        longest = max(longest, end)
        for place in range(starts[work], starts[work + 1]):
            arrived[takers[place]] = max(arrived[takers[place]], end)
    return longest
