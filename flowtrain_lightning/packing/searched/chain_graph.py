"""The works of batches that go through chains of stages and come back, as arrays that a search can play."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from flowtrain_lightning.packing.step_plan import BoolArray, FloatArray, IntArray


class TimedStage(NamedTuple):
    """A run of layers on one rank, and what a batch costs there.

    Attributes:
        rank: that computes it.
        forward: seconds.
        backward: seconds; 0 where there is none.
        room: what is kept from the forward to the backward, in the unit of the store's limit.
        store: which limit it counts against.
    """

    rank: int
    forward: float
    backward: float
    room: float
    store: int


class Chain(NamedTuple):
    """The stages of one batch, or of a part of it that goes by itself (a sub-microbatch).

    Attributes:
        unit: the microbatch that it belongs to: works of one unit are moved together.
        role: number of the role, in the order in which data flow.
        stages: in order.
        reads: numbers of the chains, listed before this one, whose results its first stage takes, and to which it
            gives gradients.
    """

    unit: int
    role: int
    stages: tuple[TimedStage, ...]
    reads: tuple[int, ...] = ()


@dataclass(frozen=True)
class ChainGraph:
    """All works of a step. Works go by their numbers; a chain's forwards come first, then its backwards.

    Attributes:
        ranks: ``[works]`` who does each.
        seconds: ``[works]`` what each takes.
        stores: ``[works]`` the store in which a forward keeps activations.
        room: ``[works]`` what a forward keeps there until its backward; 0 of a backward, and of what has none.
        forward_of: ``[works]`` the forward whose activations a backward uses; -1 of a forward.
        units: ``[works]`` the unit of its chain.
        roles: ``[works]`` the role of its chain.
        depths: ``[works]`` its stage's place in the chain.
        chains: ``[works]`` the number of its chain.
        needs: ``[works]`` the works whose results each takes.
    """

    ranks: IntArray
    seconds: FloatArray
    stores: IntArray
    room: FloatArray
    forward_of: IntArray
    units: IntArray
    roles: IntArray
    depths: IntArray
    chains: IntArray
    needs: Sequence[Sequence[int]]

    def __len__(self) -> int:
        return len(self.ranks)

    @cached_property
    def is_backward(self) -> BoolArray:
        """``[works]`` whether it is one."""
        return self.forward_of >= 0

    @cached_property
    def lacks(self) -> IntArray:
        """``[works]`` how many results each waits for."""
        return np.array([len(needed) for needed in self.needs], dtype=np.int64)

    @cached_property
    def takers(self) -> tuple[IntArray, IntArray]:
        """``[works + 1]`` where the takers of each begin in the second array; and the works that take results."""
        needed = np.array([each for own in self.needs for each in own], dtype=np.int64)
        taker = np.repeat(np.arange(len(self), dtype=np.int64), self.lacks)
        by_needed = np.argsort(needed, kind="stable")
        counts = np.bincount(needed, minlength=len(self))
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        return starts, taker[by_needed]

    @cached_property
    def most_room(self) -> FloatArray:
        """``[stores]`` the most that one work keeps: what one that is computed again takes while it runs."""
        found = np.zeros(int(self.stores.max(initial=-1)) + 1)
        np.maximum.at(found, self.stores, self.room)
        return found


def chain_graph(chains: Sequence[Chain]) -> ChainGraph:
    """The graph of some chains.

    A forward takes the result of the one before; the first of a chain the last ones of all chains that it reads. A
    backward takes its own forward's activations and the gradients of the one behind; the last stage's those of all
    chains that read it. What has no backward gets no gradients.

    Args:
        chains: each behind those that it reads.
    """
    rows: list[tuple[int, float, int, float, int, int, int, int, int]] = []
    needs: list[list[int]] = []
    forwards: list[list[int]] = []
    backwards: list[list[int]] = [[] for _ in chains]  # of each chain, from its first stage on; empty if it has none
    readers: list[list[int]] = [[] for _ in chains]

    def add(number: int, depth: int, seconds: float, room: float, forward: int, needed: list[int]) -> int:
        chain = chains[number]
        rank, store = chain.stages[depth].rank, chain.stages[depth].store
        rows.append((rank, seconds, store, room, forward, chain.unit, chain.role, depth, number))
        needs.append(needed)
        return len(rows) - 1

    for number, chain in enumerate(chains):
        before = [forwards[read][-1] for read in chain.reads]
        own: list[int] = []
        for depth, stage in enumerate(chain.stages):
            room = stage.room if stage.backward > 0 else 0.0
            own.append(add(number, depth, stage.forward, room, -1, own[-1:] or before))
        forwards.append(own)
        for read in chain.reads:
            readers[read].append(number)
    for number in reversed(range(len(chains))):
        chain = chains[number]
        answers = [(backwards[reader] or forwards[reader])[0] for reader in readers[number]]
        for depth in reversed(range(len(chain.stages))):
            if chain.stages[depth].backward <= 0:
                break
            forward = forwards[number][depth]
            behind = backwards[number][:1] or answers
            work = add(number, depth, chain.stages[depth].backward, 0.0, forward, [forward, *behind])
            backwards[number].insert(0, work)

    def column(place: int) -> IntArray:
        return np.array([row[place] for row in rows], dtype=np.int64)

    return ChainGraph(
        ranks=column(0),
        seconds=np.array([row[1] for row in rows]),
        stores=column(2),
        room=np.array([row[3] for row in rows]),
        forward_of=column(4),
        units=column(5),
        roles=column(6),
        depths=column(7),
        chains=column(8),
        needs=needs,
    )
