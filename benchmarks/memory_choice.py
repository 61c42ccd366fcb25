"""The choice of what every stage keeps, computes again or moves to host memory, once the order of works is known.

Between forward and backward of a batch a stage's activations are kept, or computed again, or moved to host memory and
back, or some of its layers do the one and some the other. Each choice takes time and leaves room.
The cheapest choices that never exceed the limit are an integer program for each store, as in DIP (2504.14145).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from flowtrain_lightning.packing.searched.chain_graph import ChainGraph
from flowtrain_lightning.packing.searched.searched_order import ListedOrder
from flowtrain_lightning.packing.step_plan import BoolArray, FloatArray, IntArray

_GAP = 0.02
"""Within which an answer is good enough: the last percents take most of the time."""

_NODES = 50
"""Of the tree of a store's program, after which its best answer counts: by a clock, luck would decide."""


@dataclass(frozen=True)
class MemoryChoices:
    """Ways to keep what forwards leave for their backwards, the same number for each.

    Attributes:
        forwards: ``[pairs]`` the forwards that keep something.
        seconds: ``[pairs, choices]`` what each way adds to forward and backward together.
        room: ``[pairs, choices]`` what it keeps.
    """

    forwards: IntArray
    seconds: FloatArray
    room: FloatArray


class Layer(NamedTuple):
    """The activations of one layer of a stage, for one batch.

    Attributes:
        forward: seconds in which it computes them again.
        room: of all of them.
        entry: of what comes in, from which they are computed again.
        moving: seconds that it takes to move them to host memory and back, beyond what happens beside computing; None
            where they are not to be moved.
    """

    forward: float
    room: float
    entry: float
    moving: float | None = None


def choices_of(graph: ChainGraph, layers: Sequence[tuple[Layer, float]], steps: int = 4) -> MemoryChoices:
    """Choices for each pair: so many of ``steps`` parts of its layers computed again, or moved, and the rest kept.

    Args:
        graph: of the step.
        layers: ``[works]`` a layer of each one's stage, and how many it has; if need be, on average.
        steps: into how many parts layers are divided.
    """
    pairs = np.flatnonzero(graph.room > 0)
    shares = [part / steps for part in range(steps + 1)]
    seconds, room = [], []
    for work in pairs.tolist():
        layer, count = layers[work]
        moving = layer.forward if layer.moving is None else layer.moving
        moved = 0.0 if layer.moving is not None else layer.entry
        ways = [(share * layer.forward, layer.room + share * (layer.entry - layer.room)) for share in shares]
        ways += [(share * moving, layer.room + share * (moved - layer.room)) for share in shares[1:]]
        seconds.append([count * time for time, _ in ways])
        room.append([count * kept for _, kept in ways])
    return MemoryChoices(pairs, np.array(seconds), np.array(room))


def chosen_memory(graph: ChainGraph, listed: ListedOrder, choices: MemoryChoices, limits: FloatArray) -> IntArray:
    """``[pairs]`` the choice for each: together the quickest that never keep more than a store's limit.

    Args:
        graph: of the step.
        listed: the order of its works.
        choices: of each pair.
        limits: ``[stores]`` what may be kept in each.

    Raises:
        ValueError: even what keeps least exceeds a limit.
    """
    begins = np.empty(len(graph), dtype=np.int64)
    begins[listed.order] = np.arange(len(graph))
    ends = np.full(len(graph), len(graph), dtype=np.int64)
    backwards = np.flatnonzero(graph.is_backward)
    ends[graph.forward_of[backwards]] = begins[backwards]
    found = np.empty(len(choices.forwards), dtype=np.int64)
    for store in np.unique(graph.stores[choices.forwards]).tolist():
        own = np.flatnonzero(graph.stores[choices.forwards] == store)
        pairs = choices.forwards[own]
        open_at = (begins[pairs] <= begins[pairs][:, None]) & (ends[pairs] > begins[pairs][:, None])
        found[own] = _chosen(
            choices.seconds[own], choices.room[own], open_at[_most_held(open_at)], float(limits[store])
        )
    return found


def with_choices(graph: ChainGraph, choices: MemoryChoices, chosen: IntArray) -> ChainGraph:
    """The graph with the seconds and the room of what was chosen; what it takes comes with the backward."""
    every = np.arange(len(chosen))
    seconds, room, more = graph.seconds.copy(), graph.room.copy(), np.zeros(len(graph))
    room[choices.forwards] = choices.room[every, chosen]
    more[choices.forwards] = choices.seconds[every, chosen]
    backwards = np.flatnonzero(graph.is_backward)
    seconds[backwards] += more[graph.forward_of[backwards]]
    return replace(graph, seconds=seconds, room=room)


def _most_held(open_at: BoolArray) -> IntArray:
    """The moments that bind: at no other one are all the same pairs open, and more."""
    common = open_at.astype(np.int64) @ open_at.T.astype(np.int64)
    within = common == np.diag(common)[:, None]
    np.fill_diagonal(within, val=False)  # no two are alike, as each has one pair that opens
    return np.flatnonzero(~within.any(axis=1))


def _chosen(seconds: FloatArray, room: FloatArray, open_at: BoolArray, limit: float) -> IntArray:
    """``[pairs]`` the choices of one store, by an integer program; or what a greedy rule finds, if it found none."""
    pairs, ways = seconds.shape
    least = room.min(axis=1)
    if (open_at @ least > limit * (1 + 1e-9)).any():
        raise ValueError(
            f"Stages keep {(open_at @ least).max():.3g} at once even where they keep least, but the limit is "
            f"{limit:.3g}. Let fewer batches be open."
        )
    number, at = np.nonzero(open_at)
    rows, columns = np.repeat(number, ways), (at[:, None] * ways + np.arange(ways)).ravel()
    held = coo_array((room[at].ravel(), (rows, columns)), shape=(len(open_at), pairs * ways))
    one = coo_array((np.ones(pairs * ways), (np.repeat(np.arange(pairs), ways), np.arange(pairs * ways))))
    answer = milp(
        seconds.ravel(),
        integrality=np.ones(pairs * ways),
        bounds=Bounds(0, 1),
        constraints=[LinearConstraint(held.tocsc(), -np.inf, limit), LinearConstraint(one.tocsc(), 1, 1)],
        options={"mip_rel_gap": _GAP, "node_limit": _NODES},
    )
    by_rule = np.array(list(_greedy(seconds, room, open_at, limit)))
    if answer.x is None:
        return by_rule
    solved = answer.x.reshape(pairs, ways).argmax(axis=1)
    every = np.arange(pairs)
    fits = (open_at @ room[every, solved] <= limit * (1 + 1e-6)).all()
    better = fits and seconds[every, solved].sum() < seconds[every, by_rule].sum()
    return solved if better else by_rule


def _greedy(seconds: FloatArray, room: FloatArray, open_at: BoolArray, limit: float) -> Iterator[int]:
    """For one pair after another the quickest way for which there is room beside the least of the others."""
    least = room.argmin(axis=1)
    held = open_at @ room[np.arange(len(room)), least]
    for pair, way in enumerate(least.tolist()):
        free = (limit - held[open_at[:, pair]]).min(initial=np.inf) + room[pair, way]
        fits = np.flatnonzero(room[pair] <= free)
        chosen = int(fits[seconds[pair, fits].argmin()]) if len(fits) else way
        held[open_at[:, pair]] += room[pair, chosen] - room[pair, way]
        yield chosen
