"""The choice of what every forward keeps for its backward, once the order of works is known.

Between forward and backward of a batch a stage's activations are kept, or computed again, or moved to host memory and
back, or some of its layers do the one and some the other. Each way takes time and leaves room. The cheapest ways that
never exceed the limit are an integer program for each store, as in DIP (2504.14145).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from flowtrain_lightning.packing.searched.chain_graph import ChainGraph
from flowtrain_lightning.packing.step_plan import BoolArray, FloatArray, IntArray, PackingError

_GAP = 0.02
"""Within which an answer is good enough: the last percents take most of the time."""

_NODES = 50
"""Of the tree of a store's program, after which its best answer counts: by a clock, luck would decide."""


@dataclass(frozen=True)
class MemoryChoices:
    """Ways to keep what forwards leave for their backwards, the same number for each.

    Attributes:
        forwards: ``[pairs]`` the forwards that keep something.
        seconds: ``[pairs, ways]`` what each way adds to forward and backward together.
        room: ``[pairs, ways]`` what it keeps between them.
        working: ``[pairs]`` what is there at least while forward or backward run, whatever is kept between them.
    """

    forwards: IntArray
    seconds: FloatArray
    room: FloatArray
    working: FloatArray


def chosen_memory(graph: ChainGraph, order: IntArray, choices: MemoryChoices, limits: FloatArray) -> IntArray:
    """``[pairs]`` the way for each: together the quickest that never hold more than a store's limit.

    Args:
        graph: of the step.
        order: its works as they begin.
        choices: of each pair.
        limits: ``[stores]`` what may be held in each.

    Raises:
        ValueError: even what holds least exceeds a limit.
    """
    begins = np.empty(len(graph), dtype=np.int64)
    begins[order] = np.arange(len(graph))
    ends = np.full(len(graph), len(graph), dtype=np.int64)
    backwards = np.flatnonzero(graph.is_backward)
    ends[graph.forward_of[backwards]] = begins[backwards]
    found = np.empty(len(choices.forwards), dtype=np.int64)
    for store in np.unique(graph.stores[choices.forwards]).tolist():
        own = np.flatnonzero(graph.stores[choices.forwards] == store)
        pairs = choices.forwards[own]
        held = _held(begins[pairs], ends[pairs], choices.room[own], choices.working[own])
        found[own] = _chosen(choices.seconds[own], held, float(limits[store]))
    return found


def given_up(graph: ChainGraph, order: IntArray, room: FloatArray, always: BoolArray, limits: FloatArray) -> BoolArray:
    """``[works]`` the forwards of which nothing is kept, so that no rank ever holds more than its limit.

    Giving one up takes its forward once more. While a forward or a backward runs, all that it keeps is there.

    Args:
        graph: of the step.
        order: its works as they begin.
        room: ``[works]`` what each forward keeps until its backward, 0 of a backward.
        always: ``[works]`` forwards of which nothing is kept in any case.
        limits: ``[ranks]`` what each rank may hold.

    Raises:
        PackingError: one work alone holds more than its rank may.
    """
    pairs = np.flatnonzero(room > 0)
    if (room > limits[graph.ranks] * (1 + 1e-9)).any():
        raise PackingError(
            f"A batch keeps {room.max():,.0f} bytes for its backward, but activation_bytes is {limits.min():,.0f}: one "
            "batch alone finds no room. Raise it, or set a smaller token_budget or encoder_budget."
        )
    again = np.where(always[pairs], 0.0, graph.seconds[pairs])
    kept = np.where(always[pairs], 0.0, room[pairs])
    nothing = np.zeros(len(pairs))
    choices = MemoryChoices(
        pairs, np.column_stack([nothing, again]), np.column_stack([kept, nothing]), working=room[pairs]
    )
    found: BoolArray = always.copy()
    chosen = chosen_memory(replace(graph, stores=graph.ranks), order, choices, limits)
    found[pairs[chosen == 1]] = True
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


def _held(begins: IntArray, ends: IntArray, room: FloatArray, working: FloatArray) -> FloatArray:
    """``[moments, pairs, ways]`` what each pair holds when a forward or a backward runs, at the moments that bind.

    Args:
        begins: ``[pairs]`` places of the forwards.
        ends: ``[pairs]`` places of the backwards.
        room: see `MemoryChoices`.
        working: see there.
    """
    pairs = len(begins)
    at, owner = np.concatenate([begins, ends]), np.tile(np.arange(pairs), 2)
    is_open = (begins <= at[:, None]) & (ends > at[:, None])
    works = np.zeros((len(at), pairs), dtype=np.bool_)
    works[np.arange(len(at)), owner] = True
    works &= working > room.min(axis=1)  # else it holds no more than between the two
    moments = np.unique(np.concatenate([is_open | works, works], axis=1), axis=0)
    moments = moments[_most_held(moments)]
    is_open, works = moments[:, :pairs], moments[:, pairs:]
    at_work = np.maximum(room, working[:, None])
    found: FloatArray = np.where(works[:, :, None], at_work, np.where(is_open[:, :, None], room, 0.0))
    return found


def _most_held(moments: BoolArray) -> IntArray:
    """Those that bind: at no other one are all the same pairs open, or at work, and more."""
    numbers = moments.astype(np.float64)
    within = numbers @ numbers.T == numbers.sum(axis=1)[:, None]
    np.fill_diagonal(within, val=False)  # no two are alike
    return np.flatnonzero(~within.any(axis=1))


def _chosen(seconds: FloatArray, held: FloatArray, limit: float) -> IntArray:
    """``[pairs]`` the ways of one store, by an integer program; or what a greedy rule finds, if it found none."""
    moments, pairs, ways = held.shape
    least = held.min(axis=2).sum(axis=1).max(initial=0.0)
    if least > limit * (1 + 1e-9):
        raise ValueError(
            f"Batches hold {least:.3g} at once even where they keep least, but the limit is {limit:.3g}. Let fewer "
            "batches be open."
        )
    by_rule = np.array(list(_greedy(seconds, held, limit)))
    if not seconds[np.arange(pairs), by_rule].any():  # nothing has to give way
        return by_rule
    choices = coo_array(held.reshape(moments, pairs * ways) / limit)  # the solver's tolerance is absolute
    one = coo_array((np.ones(pairs * ways), (np.repeat(np.arange(pairs), ways), np.arange(pairs * ways))))
    answer = milp(
        seconds.ravel(),
        integrality=np.ones(pairs * ways),
        bounds=Bounds(0, 1),
        constraints=[LinearConstraint(choices.tocsc(), -np.inf, 1), LinearConstraint(one.tocsc(), 1, 1)],
        options={"mip_rel_gap": _GAP, "node_limit": _NODES},
    )
    if answer.x is None:
        return by_rule
    solved = answer.x.reshape(pairs, ways).argmax(axis=1)
    every = np.arange(pairs)
    fits = (held[:, every, solved].sum(axis=1) <= limit * (1 + 1e-9)).all()
    better = fits and seconds[every, solved].sum() < seconds[every, by_rule].sum()
    return solved if better else by_rule


def _greedy(seconds: FloatArray, held: FloatArray, limit: float) -> Iterator[int]:
    """For one pair after another the quickest way for which there is room beside the least of the others."""
    least = held.sum(axis=0).argmin(axis=1)
    now = held[:, np.arange(held.shape[1]), least].sum(axis=1)
    for pair, way in enumerate(least.tolist()):
        others = now - held[:, pair, way]
        fits = np.flatnonzero((others[:, None] + held[:, pair] <= limit * (1 + 1e-9)).all(axis=0))
        chosen = int(fits[seconds[pair, fits].argmin()]) if len(fits) else way
        now = others + held[:, pair, chosen]
        yield chosen
