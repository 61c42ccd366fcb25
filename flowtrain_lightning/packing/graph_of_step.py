"""Makes the graph of a step from what its members compute and from the rules of their order."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from flowtrain_lightning.packing.policies.forwards_first import forwards_first
from flowtrain_lightning.packing.policies.member_orders import joint_order
from flowtrain_lightning.packing.policies.taking_turns import Due, taking_turns
from flowtrain_lightning.packing.policies.trunk_order import in_order, order_of_stage, stage_order
from flowtrain_lightning.packing.step_graph import BatchOf, Kind, Pass, StepGraph, Work
from flowtrain_lightning.packing.step_plan import Turn
from flowtrain_lightning.packing.step_work import StepRules, StepWork, TimedBatch


class TimedGraph(NamedTuple):
    """A step, and what it takes.

    Attributes:
        graph: of the step.
        seconds: ``[works]`` what each takes.
    """

    graph: StepGraph
    seconds: list[float]


def graph_of_step(work: StepWork, rules: StepRules) -> TimedGraph:
    """The graph of a step.

    A batch's forward needs the forwards of all batches that it reads; its backward needs the backwards of all batches
    that read it, or their forwards where they have no backward.

    Args:
        work: what there is to compute.
        rules: who computes, and in which order.

    Raises:
        BlockedError: a role may keep no batch.
    """
    read = {role: _read_positions(members) for role, members in work.items() if rules.reads(role)}
    lanes = {
        (role, member): _Lane.of(batches, rules, role, read.get(role, ()))
        for role, members in work.items()
        for member, batches in enumerate(members)
    }
    works: list[Work] = []
    seconds: list[float] = []
    for (role, member), lane in lanes.items():
        for kind, number in lane.order:
            lane.numbers[kind][number] = len(works)
            works.append(Work(BatchOf(role, member, number), kind))
            seconds.append(lane.seconds(kind, number))
    needs: list[list[int]] = [[] for _ in works]
    for lane in lanes.values():
        forwards, backwards = lane.numbers["forward"], lane.numbers["backward"]
        for number, batch in enumerate(lane.batches):
            for role, member, read_as in batch.readers:
                reading, giving_back = (lanes[role, member].numbers[kind] for kind in ("forward", "backward"))
                answer = giving_back.get(read_as, reading[read_as])
                links = [(reading[read_as], forwards[number])]
                links += [(backwards[number], answer)] if number in backwards else []
                for taker, needed in links:
                    needs[taker].append(_on_the_way(needed, batch.on_the_way, works, seconds, needs))
    if rules.producers_first:
        _wait_for_all(needs, lanes, rules)
    of_ranks = {rank: list(_lanes_of_rank(members, lanes, rules)) for rank, members in _members(work, rules).items()}
    return TimedGraph(StepGraph(works, needs, of_ranks, list(_meetings(lanes, work, rules))), seconds)


def _on_the_way(needed: int, time: float, works: list[Work], seconds: list[float], needs: list[list[int]]) -> int:
    """The work at whose end the result of ``needed`` has come to its taker: one of no rank, if it takes time."""
    if not time:
        return needed
    works.append(works[needed])
    seconds.append(time)
    needs.append([needed])
    return len(works) - 1


class _Lane(NamedTuple):
    """A member's passes, in order, where nobody else decides it.

    Attributes:
        batches: of the member.
        order: of its passes.
        numbers: of the works: by kind, of each batch that has one.
    """

    batches: Sequence[TimedBatch]
    order: list[Pass]
    numbers: dict[Kind, dict[int, int]]

    @classmethod
    def of(cls, batches: Sequence[TimedBatch], rules: StepRules, role: str, read: Collection[int]) -> _Lane:
        has_backward = {number for number, batch in enumerate(batches) if batch.backward > 0}
        if any(batch.places for batch in batches):
            order: Iterable[Pass] = sorted(_both_passes(batches), key=lambda each: _place(batches, each))
        elif rules.produces(role) and rules.reads(role):
            order = in_order(len(batches), read, rules.in_flight.get(role, len(batches)))
        elif rules.produces(role):
            keeps_nothing = {n for n, batch in enumerate(batches) if batch.recomputed or n not in has_backward}
            order = forwards_first(range(len(batches)), rules.in_flight.get(role, len(batches)), keeps_nothing)
        else:  # what nobody reads waits for nobody else: its backward comes at once; but that of a stage
            closing = [number for number, batch in enumerate(batches) if batch.closes]
            count = len(batches) - len(closing)
            order = [*_passes(count, rules, role), *(("forward", number) for number in closing)]
        kept = [(kind, n) for kind, n in order if kind == "forward" or n in has_backward]
        return cls(batches, kept, {"forward": {}, "backward": {}, "weights": {}})

    def seconds(self, kind: str, number: int) -> float:
        batch = self.batches[number]
        if kind == "forward":
            return batch.forward
        if kind == "weights":
            return batch.weights
        return batch.backward - batch.weights + (batch.forward if batch.recomputed else 0.0)

    def works(self, order: Iterable[Pass]) -> list[int]:
        return [self.numbers[kind][number] for kind, number in order]


def _passes(count: int, rules: StepRules, role: str) -> Iterable[Pass]:
    """Of a member that only reads, or of its stage."""
    if role not in rules.stages:
        return in_order(count, range(count), rules.in_flight.get(role, 1))
    positions = count // rules.pipeline.chunks
    of_stage = stage_order(positions, rules.pipeline, rules.stages[role])
    return [(each.kind, each.chunk * positions + each.position) for each in of_stage]


def _both_passes(batches: Sequence[TimedBatch]) -> Iterator[Pass]:
    for number in range(len(batches)):
        yield "forward", number
        yield "backward", number


def _place(batches: Sequence[TimedBatch], each: Pass) -> tuple[float, int, bool]:
    """Of a pass in the one order of all works: what has no place comes last, the end of the step behind all."""
    number, is_backward = each[1], each[0] == "backward"
    places = batches[number].places
    return math.inf if places is None else places[is_backward], number, is_backward


_Member = tuple[str, int]
_Lanes = dict[_Member, _Lane]


def _members(work: StepWork, rules: StepRules) -> dict[int, list[_Member]]:
    """Rank -> the members that it belongs to, in order of precedence."""
    found: dict[int, list[_Member]] = {}
    for role, of_role in rules.ranks.items():
        for member, ranks in enumerate(of_role):
            for rank in ranks:
                own = found.setdefault(rank, [])
                if member < len(work.get(role, ())):
                    own.append((role, member))
    return found


def _lanes_of_rank(members: Sequence[_Member], lanes: _Lanes, rules: StepRules) -> Iterator[list[int]]:
    """A rank's works, by lanes; in one lane where its order is fixed."""
    if any(batch.places for member in members for batch in lanes[member].batches):
        of_all = ((lanes[member], each) for member in members for each in lanes[member].order)
        yield [
            lane.works([each])[0] for lane, each in sorted(of_all, key=lambda found: _place(found[0].batches, found[1]))
        ]
        return
    if not rules.in_fixed_order or len(members) < 2:
        yield from (lanes[member].works(lanes[member].order) for member in members)
        return
    producers = {member: lanes[member] for member in members if not rules.reads(member[0])}
    trained = {role: lane for (role, _), lane in producers.items() if any(b.backward > 0 for b in lane.batches)}
    frozen = [work for (role, _), lane in producers.items() if role not in trained for work in lane.works(lane.order)]
    reading = {role: lanes[role, member] for role, member in members if rules.reads(role)}
    yield [*frozen, *taking_turns(_in_turns(trained, lanes, rules), _at_positions(reading, rules))]


def _at_positions(reading: dict[str, _Lane], rules: StepRules) -> list[list[int]]:
    """The works of a rank's roles that read, by position: what is read of one is answered before its backward."""
    at: list[list[int]] = [[] for _ in range(max((len(lane.batches) for lane in reading.values()), default=0))]
    for lane in (lane for role, lane in reading.items() if role in rules.stages):
        latest = 0  # what is no forward goes behind the last one before it
        for (kind, number), work in zip(lane.order, lane.works(lane.order), strict=True):
            latest = number if kind == "forward" else latest
            at[latest].append(work)
        return at
    for passes in ("forward", "both", "backward"):
        for role, lane in reading.items():
            for (kind, number), work in zip(lane.order, lane.works(lane.order), strict=True):
                if passes == (kind if rules.produces(role) else "both"):
                    at[number if (own := lane.batches[number].position) is None else own].append(work)
    return at


def _in_turns(producers: dict[str, _Lane], lanes: _Lanes, rules: StepRules) -> list[tuple[Due, int]]:
    """The passes of what a rank makes for others, in the one order that all of its roles have, and their works."""
    turns = {role: [batch.turn for batch in lane.batches] for role, lane in producers.items()}
    until = {role: [batch.read_until for batch in lane.batches] for role, lane in producers.items()}
    for of_stage in [lane.batches for (role, _), lane in lanes.items() if role in rules.stages][:1]:
        order = order_of_stage(sum(not batch.closes for batch in of_stage), rules.pipeline)
        until = {role: [order.answered_after(position) for position in own] for role, own in until.items()}
    kept = max(1, min((rules.in_flight.get(role, len(own)) for role, own in turns.items()), default=1))
    found = []
    for role, (kind, number) in joint_order(turns, kept, until).passes:
        position = turns[role][number][0] if kind == "forward" else until[role][number]
        (work,) = producers[role].works([(kind, number)])
        found.append((Due(kind, position), work))
    return found


def _wait_for_all(needs: list[list[int]], lanes: _Lanes, rules: StepRules) -> None:
    """Lets no role that reads begin before the last forward of all that it reads."""
    for producer, consumer, _ in rules.edges:
        if rules.reads(producer):
            continue  # it goes on once those that read it have answered
        last = [
            max(lane.numbers["forward"].values())
            for (role, _), lane in lanes.items()
            if role == producer and lane.batches
        ]
        for (role, _), lane in lanes.items():
            if role == consumer and lane.batches:
                needs[lane.numbers["forward"][0]] += last


def _meetings(lanes: _Lanes, work: StepWork, rules: StepRules) -> Iterator[list[int]]:
    """What members begin together, of roles that read: batches of one position.

    It is forwards, which their backwards follow in the same order; in stages backwards too.
    """
    for role, (_, size, _) in rules.meets.items():
        of_role = work.get(role, ()) if rules.reads(role) or not rules.produces(role) else ()
        kinds: tuple[Kind, ...] = ("forward", "backward") if role in rules.stages else ("forward",)
        for first in range(0, len(of_role), size) if size > 1 else ():
            for kind in kinds:
                at: dict[Turn, list[int]] = {}
                for member in range(first, min(first + size, len(of_role))):
                    for number, work_of_batch in lanes[role, member].numbers[kind].items():
                        batch = of_role[member][number]
                        at.setdefault((number, 0) if batch.position is None else batch.turn, []).append(work_of_batch)
                yield from at.values()


def _read_positions(members: Sequence[Sequence[TimedBatch]]) -> set[int]:
    """The numbers of which some member's batch is read."""
    return {number for batches in members for number, batch in enumerate(batches) if batch.readers}
