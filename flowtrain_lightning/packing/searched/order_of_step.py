"""One order of all works of a planned step, searched from what its batches cost: encoder batches beside stages."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from flowtrain_lightning.packing.play import play
from flowtrain_lightning.packing.policies.member_orders import member_orders
from flowtrain_lightning.packing.policies.trunk_order import trunk_order
from flowtrain_lightning.packing.searched.chain_graph import Chain, ChainGraph, TimedStage, chain_graph
from flowtrain_lightning.packing.searched.memory_choice import given_up
from flowtrain_lightning.packing.searched.searched_order import Limits, ListedOrder, searched_order
from flowtrain_lightning.packing.stage_entries import part_names
from flowtrain_lightning.packing.step_graph import BatchOf, Pass, StepGraph, Work
from flowtrain_lightning.packing.step_members import StepMembers
from flowtrain_lightning.packing.step_plan import BoolArray, FloatArray, IntArray, StepPlan
from flowtrain_lightning.packing.step_work import StepWork, TimedBatch, in_two_passes


@dataclass(frozen=True)
class SearchedStep:
    """An order of all works of a step. Each rank does its own in this order, and never blocks.

    Attributes:
        works: of all roles, where each stage is one; none comes before what it needs.
        producing: the roles that encode, or their stages.
        recomputed: batches of which nothing is kept: their forwards run again before their backwards.
        moved: those whose activations lie in host memory between the two.
    """

    works: tuple[Work, ...]
    producing: tuple[str, ...]
    recomputed: frozenset[BatchOf] = frozenset()
    moved: frozenset[BatchOf] = frozenset()

    def passes(self, name: str, member: int) -> tuple[Pass, ...]:
        """The forwards and backwards of a member of a role or stage, in order."""
        own = (work for work in self.works if work.batch.role == name and work.batch.member == member)
        return tuple((work.kind, work.batch.number) for work in own)

    def own(self, members: Collection[tuple[str, int]]) -> list[Work]:
        """The works of a rank that is these members, in order."""
        return [work for work in self.works if (work.batch.role, work.batch.member) in members]


def searched_step(
    plan: StepPlan,
    members: StepMembers,
    kept_batches: int,
    row_bytes: Mapping[str, float] = MappingProxyType({}),
    own_ranks: Collection[int] | None = None,
) -> SearchedStep:
    """Searches the order of a step. It is a function of the plan, what its batches cost, and the limits.

    As many microbatches may be open in a stage as in 1F1B, and an encoder batch that finds no room is computed again.
    Where it is not clearly shorter than what comes of the rules, these decide. Where the bytes that a rank may keep
    are limited, it is chosen of this order what each batch keeps.

    Args:
        plan: who encodes and who reads what, and what it costs.
        members: of all roles, with the rank of each.
        kept_batches: encoder batches whose activations a rank keeps.
        row_bytes: role, or stage of one -> bytes of a token or patch that it keeps from forward to backward. Nothing is
            kept where it is not known.
        own_ranks: those for whose batches it is chosen what they keep; None: all.

    Raises:
        ValueError: one batch alone keeps more than a rank may.
    """
    batches, chains, limits = _chains(plan, members, kept_batches)
    producing = [name for role in members.producers for name in _names(members, role)]
    if not chains:
        return SearchedStep((), tuple(producing))
    graph, names = chain_graph(chains), {role: _names(members, role) for role in plan.batches}
    found = searched_order(graph, limits, [_by_rules(plan, members, kept_batches, graph, batches)])
    of_works = [batches[chain] for chain in graph.chains.tolist()]
    parts = [names[batch.role][depth] for batch, depth in zip(of_works, graph.depths.tolist(), strict=True)]
    on_parts = [batch._replace(role=part) for batch, part in zip(of_works, parts, strict=True)]
    works = [Work(on_parts[n], "backward" if graph.is_backward[n] else "forward") for n in found.order.tolist()]
    again = found.recomputed | np.array([not kept_batches and part in producing for part in parts])
    moves = np.zeros(len(graph), dtype=np.bool_)
    if members.activation_bytes is not None:
        known = np.array([part in row_bytes for part in parts])
        room = np.array([row_bytes.get(part, 0.0) * plan.length(of) for part, of in zip(parts, of_works, strict=True)])
        room *= own_ranks is None or np.isin(graph.ranks, [*own_ranks])
        gone = _given_up(graph, found.order, room, again | ~known, members.activation_bytes)
        moves = gone & known & ~again & np.array([batch.role in members.moving for batch in of_works])
        again = gone & ~moves
    recomputed, moved = (frozenset(on_parts[n] for n in np.flatnonzero(each).tolist()) for each in (again, moves))
    return SearchedStep(tuple(works), tuple(producing), recomputed, moved)


def _given_up(graph: ChainGraph, order: IntArray, room: FloatArray, always: BoolArray, limit: float) -> BoolArray:
    """``[works]`` the forwards of which nothing stays on their rank, which may keep so many bytes; see `given_up`."""
    has_backward = np.zeros(len(graph), dtype=np.bool_)
    has_backward[graph.forward_of[graph.is_backward]] = True
    limits = np.full(int(graph.ranks.max()) + 1, limit)
    return given_up(graph, order, np.where(has_backward, room, 0.0), always & ~graph.is_backward, limits)


def in_searched_order(work: StepWork, searched: SearchedStep, *, trains: bool) -> StepWork:
    """The works of a step, each with its place in the order.

    Args:
        work: of all roles.
        searched: their order.
        trains: encoders do; else all of their forwards come first, as they need nothing and keep nothing.
    """
    places: dict[Work, int] = {}
    for place, each in enumerate(searched.works):
        comes_first = each.batch.role in searched.producing and not trains
        places[each] = each.batch.number - len(searched.works) if comes_first else place

    def placed(batch: TimedBatch, named: BatchOf) -> TimedBatch:
        if Work(named, "forward") not in places:  # there is nothing in it
            return batch
        # What is moved is taken to be no quicker than what is computed again.
        again = named in searched.recomputed | searched.moved and (trains or named.role not in searched.producing)
        return replace(
            batch, places=(places[Work(named, "forward")], places[Work(named, "backward")]), recomputed=again
        )

    return {
        role: [
            [placed(batch, BatchOf(role, member, number)) for number, batch in enumerate(own)]
            for member, own in enumerate(of_role)
        ]
        for role, of_role in work.items()
    }


def _names(members: StepMembers, role: str) -> tuple[str, ...]:
    """The names of a role's stages, or its own."""
    return part_names(role, members.pipeline_of(role))


def _chains(plan: StepPlan, members: StepMembers, kept_batches: int) -> tuple[list[BatchOf], list[Chain], Limits]:
    """Every batch that holds something as a chain, what encodes before what reads it; and what may be kept."""
    names = {role: _names(members, role) for role in (*members.producers, members.trunk)}
    parts = [part for of_role in names.values() for part in of_role]
    rank_of, first_store = members.searched, dict(zip(parts, _sums(members, parts), strict=True))
    most = {name: members.pipeline.stages - stage for stage, name in enumerate(names[members.trunk])}  # as 1F1B keeps
    kept = [most.get(part, kept_batches) for part in parts for _ in range(_count(members, part))]
    again = np.array([part not in most for part in parts for _ in range(_count(members, part))])
    read: dict[BatchOf, set[BatchOf]] = {}
    for entry in plan.entries:
        for reader in entry.readers:
            read.setdefault(reader, set()).add(entry.maker)
    batches, chains, number_of = list[BatchOf](), list[Chain](), dict[BatchOf, int]()
    for role in (*plan.graph.producers, plan.graph.trunk):
        is_trunk = role == plan.graph.trunk
        for member, own in enumerate(plan.batches[role]):
            for number, items in enumerate(own):
                if not len(items):
                    continue
                batch = BatchOf(role, member, number)
                passes = in_two_passes(plan.costs[role][member][number] / len(names[role]))
                forward, backward, room = passes.forward, passes.backward, 1.0
                if not is_trunk and not kept_batches:
                    backward, room = backward + forward, 0.0
                stages = tuple(
                    TimedStage(rank_of[part][member], forward, backward, room, first_store[part] + member)
                    for part in names[role]
                )
                unit = number if is_trunk else plan.turns[role][member][number][0]
                number_of[batch] = len(chains)
                chains.append(
                    Chain(unit, int(is_trunk), stages, tuple(sorted(number_of[each] for each in read.get(batch, ()))))
                )
                batches.append(batch)
    limits = Limits(np.array(kept, dtype=np.float64), np.zeros(len(kept)), again)
    return batches, chains, limits


def _count(members: StepMembers, part: str) -> int:
    return len(members.searched[part])


def _sums(members: StepMembers, parts: Sequence[str]) -> list[int]:
    """``[parts]`` the number of members of all parts before each."""
    return [sum(_count(members, before) for before in parts[:place]) for place in range(len(parts))]


def _by_rules(
    plan: StepPlan, members: StepMembers, kept_batches: int, graph: ChainGraph, batches: Sequence[BatchOf]
) -> ListedOrder:
    """The order in which ranks come to their works by the rules, if all takes as long as it is said to."""
    parts = list[tuple[str, int, tuple[Pass, ...]]]()
    recomputed = np.zeros(len(graph), dtype=np.bool_)
    number_of = {}
    for work, chain in enumerate(graph.chains.tolist()):
        batch, kind = batches[chain], "backward" if graph.is_backward[work] else "forward"
        name = _names(members, batch.role)[graph.depths[work]]
        number_of[name, batch.member, kind, batch.number] = work
    for stage, name in enumerate(_names(members, members.trunk)):
        passes = trunk_order(plan, members, stage).passes
        parts += [(name, member, passes) for member in range(members.counts[members.trunk])]
    for role in members.producers:
        for member, order in enumerate(member_orders(plan, members, role, kept_batches)):
            for name in _names(members, role):
                parts.append((name, member, order.passes))
                again = [number_of[name, member, "forward", place] for place in order.recomputed if kept_batches]
                recomputed[again] = True
    lanes: dict[int, list[list[int]]] = {}
    for name, member, passes in parts:
        keys = ((name, member, kind, number) for kind, number in passes)
        own = [number_of[key] for key in keys if key in number_of]
        lanes.setdefault(members.searched[name][member], []).append(own)
    backwards = np.flatnonzero(graph.is_backward)
    seconds, forwards = graph.seconds.copy(), graph.forward_of[backwards]
    seconds[backwards] += np.where(recomputed[forwards], seconds[forwards], 0.0)
    works = [Work(batches[chain], "forward") for chain in graph.chains.tolist()]
    played = play(StepGraph(works, graph.needs, lanes), seconds.tolist(), dict.fromkeys(lanes, 0.0))
    listed = ListedOrder(np.array(played.order, dtype=np.int64), recomputed, 0.0)
    return replace(listed, seconds=listed.takes(graph))
