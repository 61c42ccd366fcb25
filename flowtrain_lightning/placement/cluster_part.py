"""A part of a large allocation, to be simulated in its place: fewer ranks of each role, each with as much to do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import log

import numpy as np

from flowtrain_lightning.allocator import Allocation, AllocationError, Layout
from flowtrain_lightning.placement.request import why_it_cannot_run

_TRIED = 256
"""Shares that are compared where none divides all roles."""

_TIMES = (1, 2, 4, 8)
"""Multiples of the wanted number of ranks that a part may have, where none has fewer."""


def part_of(allocation: Allocation, most: int) -> tuple[Allocation, float]:
    """A part of an allocation and the share of it that this is: one in so many ranks, and as many samples.

    Shares that divide the data ranks of all roles come first: every rank has as much to do then as before. Where none
    of them leaves so few ranks, data degrees are rounded, by the share that changes the ranks of a role the least.
    Where groups of ranks that need each other are too large for any such part, it may have a few times as many ranks.

    Args:
        allocation: with the trunk's ranks first or anywhere.
        most: ranks of the part.
    """
    if allocation.size <= most:
        return allocation, 1.0
    found = (next(_parts(allocation, times * most), None) for times in _TIMES)
    return next(filter(None, found), (allocation, 1.0))


def _parts(allocation: Allocation, most: int) -> Iterator[tuple[Allocation, float]]:
    """Parts with so few ranks that run, the best one first."""
    layouts = allocation.layouts
    divisors = range(1, min(layout.data for layout in layouts.values()) + 1)
    whole = (share for share in divisors if all(layout.data % share == 0 for layout in layouts.values()))
    least = allocation.size / most
    rounded = sorted(least * 2 ** np.linspace(0, 1, _TRIED), key=lambda share: (_rounding(layouts, share), share))
    for share in (*(share for share in whole if share >= least), *rounded):
        try:
            part = _with_layouts(allocation, {role: _smaller(layout, share) for role, layout in layouts.items()})
        except AllocationError:  # colocated roles that would no longer have the same ranks, say
            continue
        if part.size <= most and why_it_cannot_run(part) is None:
            yield part, float(share)


def _rounding(layouts: Mapping[str, Layout], share: float) -> float:
    """By how much, as a logarithm, a share changes the ranks of some role beyond dividing them."""
    return max(abs(log(_smaller(layout, share).data * share / layout.data)) for layout in layouts.values())


def _smaller(layout: Layout, share: float) -> Layout:
    """The layout with one in ``share`` of its data ranks: fewer replicas, or fewer ranks of each."""
    shards = layout.data // layout.replicas
    if layout.replicas > 1 and (replicas := round(layout.replicas / share)):
        return replace(layout, data=replicas * shards, replicas=replicas)
    if layout.replicas > 1 and (each := round(shards / share)) and each * share == shards:
        return replace(layout, data=layout.replicas * each)
    return replace(layout, data=max(1, round(layout.data / share)), replicas=1)


def _with_layouts(allocation: Allocation, layouts: Mapping[str, Layout]) -> Allocation:
    """The allocation with smaller layouts, the trunk's ranks first."""
    ranks, first = dict[str, tuple[int, ...]](), 0
    for role in sorted(layouts, key=lambda role: role != allocation.trunk):
        ranks[role] = tuple(range(first, first + layouts[role].ranks))
        first += layouts[role].ranks if allocation.placement == "separate" else 0
    return replace(allocation, layouts=layouts, ranks=ranks)
