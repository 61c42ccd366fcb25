"""The work of each role's members in a step: its seconds, and the rules of its order."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import NamedTuple

from flowtrain_lightning.packing.role_graph import Edge
from flowtrain_lightning.packing.stage_entries import chunk_names, part_names, stage_name
from flowtrain_lightning.packing.stage_schedule import ONE_STAGE, StageSchedule
from flowtrain_lightning.packing.step_graph import BatchOf, Meeting, any_binds
from flowtrain_lightning.packing.step_plan import IntArray, StepPlan, Turn

FORWARD_SHARE = 1 / 3
"""The forward's share of what a batch costs that has a backward, too: a backward is two forwards."""


STEPS_AHEAD = 8
"""How many later steps ranks may have begun that only produce and do not train: a bound on loaded pixels where few of
these steps hold media."""


class PassTimes(NamedTuple):
    """Seconds of the two passes over a batch.

    Attributes:
        forward: time of the forward.
        backward: time of the backward; 0 where there is none.
        weights: what of it can be left for later, the gradients of weights.
    """

    forward: float
    backward: float
    weights: float = 0.0


@dataclass(frozen=True)
class TimedBatch:
    """Seconds and readers of one batch of a member.

    Attributes:
        forward: time of its forward.
        backward: time of its backward; 0 where there is none.
        readers: the batches that read its rows.
        recomputed: nothing is kept of its forward, which runs again before its backward.
        before: batches of its member, for the same position, that come before it.
        on_the_way: time until its rows are with its readers; their gradients take as long to come back.
        closes: it is the end of a step, behind all passes of its member.
        weights: time of what its backward leaves for later, which is a part of ``backward``.
        position: of the batches whose rows it reads; None of what reads nothing, or one batch at each position.
        places: of its forward and its backward in one order of all works of the step; None where its role's rules say
            when they come.
        read_at: of what the next stage of its role reads, the positions of the first and the last batches that read
            what comes of it; None where those are its readers.
    """

    forward: float
    backward: float
    readers: tuple[BatchOf, ...] = ()
    recomputed: bool = False
    before: int = 0
    on_the_way: float = 0.0
    closes: bool = False
    weights: float = 0.0
    position: int | None = None
    places: tuple[int, int] | None = None
    read_at: tuple[int, int] | None = None

    @property
    def turn(self) -> Turn:
        """When one that is read, or that reads from a position, is due."""
        return self._read_between[0] if self.position is None else self.position, self.before

    @property
    def read_until(self) -> int:
        """The position of the last of its readers."""
        return self._read_between[1]

    @property
    def _read_between(self) -> tuple[int, int]:
        if self.read_at is not None:
            return self.read_at
        positions = [reader.number for reader in self.readers]
        return min(positions), max(positions)

    @property
    def seconds(self) -> float:
        """Of forward and backward; one that is computed again does not count."""
        return self.forward + self.backward


StepWork = Mapping[str, Sequence[Sequence[TimedBatch]]]
"""The works of one step: role -> ``[member][number]``."""


def step_work(
    plan: StepPlan,
    seconds: Mapping[str, Callable[[IntArray], PassTimes]],
    recomputed: Mapping[str, Sequence[Collection[int]]] | None = None,
    pipelines: Mapping[str, StageSchedule] = MappingProxyType({}),
    on_the_way: Callable[[str, IntArray], float] = lambda role, lengths: 0.0,
) -> StepWork:
    """Lists the work of a plan's members, the trunk's first; batches of media that are empty are left out.

    Of a role in stages each stage is a role of its own: it reads what the one before makes of a batch, and all stages
    of the trunk read features. It has a batch for each of its chunks and positions, chunk by chunk. What is generated
    is listed as what is encoded is, with the positions from which it is read.

    Args:
        plan: who encodes and who reads what.
        seconds: role or chunk (`chunk_names`) -> what a batch of it takes, by the lengths of its items
            (`StepPlan.lengths`).
        recomputed: role that encodes -> the numbers of each member's recomputed batches; None for none.
        pipelines: role -> its stages; without roles that have none.
        on_the_way: seconds until a batch's hidden states are with the next stage of a role, by the lengths of its
            items.
    """
    again, readers = recomputed or {}, _readers(plan, pipelines)

    def timed(batch: BatchOf, items: IntArray, run: int) -> TimedBatch:
        role, member, number = batch
        pipeline, lengths = pipelines.get(role, ONE_STAGE), plan.lengths(role)[items]
        name = (chunk_names(role, pipeline) or (role,))[run]
        found = _timed(seconds[name], lengths, splits=pipeline.splits)
        if run + 1 == pipeline.runs:
            found = replace(found, readers=tuple(readers.get(batch, ())))
        else:
            leaves = pipeline.stage_of(run + 1) != pipeline.stage_of(run) and len(items) > 0
            on = on_the_way(role, lengths) if leaves else 0.0
            found = replace(found, readers=(_in_run(plan, batch, run + 1, pipeline),), on_the_way=on)
        if role == plan.graph.trunk:
            return found
        positions = [reader.number for reader in readers.get(batch, ())] if run + 1 < pipeline.runs else []
        position, before = plan.turns[role][member][number]
        return replace(
            found,
            recomputed=role in again and number in again[role][member],
            before=before,
            position=position if role in plan.graph.behind else None,
            read_at=(min(positions), max(positions)) if positions else None,
        )

    return {
        part: [
            [
                timed(BatchOf(role, member, number), items, pipelines.get(role, ONE_STAGE).number(stage, chunk))
                for chunk in range(pipelines.get(role, ONE_STAGE).chunks)
                for number, items in enumerate(own)
                if len(items) or role == plan.graph.trunk
            ]
            for member, own in enumerate(plan.batches[role])
        ]
        for role in (plan.graph.trunk, *plan.graph.producers, *plan.graph.behind)
        for stage, part in enumerate(part_names(role, pipelines.get(role, ONE_STAGE)))
    }


def _readers(plan: StepPlan, pipelines: Mapping[str, StageSchedule]) -> dict[BatchOf, list[BatchOf]]:
    """Batch -> those that read its rows, in every run of layers."""
    found: dict[BatchOf, list[BatchOf]] = {}
    for entry in plan.entries:
        found.setdefault(entry.maker, []).extend(
            _in_run(plan, each, run, pipeline)
            for each in entry.readers
            for pipeline in [pipelines.get(each.role, ONE_STAGE)]
            for run in range(pipeline.runs)
        )
    return found


def _in_run(plan: StepPlan, batch: BatchOf, run: int, pipeline: StageSchedule) -> BatchOf:
    """A batch as that of the stage that has a run of layers, and of the run; as it is without stages."""
    if pipeline.stages == 1:
        return batch
    place = run // pipeline.stages * len(plan.batches[batch.role][batch.member]) + batch.number
    return batch._replace(role=stage_name(batch.role, pipeline.stage_of(run)), number=place)


def _timed(seconds: Callable[[IntArray], PassTimes], lengths: IntArray, *, splits: bool = False) -> TimedBatch:
    """A batch of items of these lengths; nothing is computed for one without any."""
    forward, backward, weights = seconds(lengths) if len(lengths) else (0.0, 0.0, 0.0)
    return TimedBatch(forward, backward, weights=weights if splits else 0.0)


def in_two_passes(time: float) -> PassTimes:
    """The passes of a batch of which only the time of both together is known."""
    return PassTimes(time * FORWARD_SHARE, time * (1 - FORWARD_SHARE))


@dataclass(frozen=True)
class StepRules:
    """The ranks that compute, and the rules of their order.

    Attributes:
        ranks: role -> the ranks of each member, which share its work. A rank of several roles does what it can of the
            first one before it turns to the next. Stages are roles here.
        edges: which role reads from which; from one stage to the next there is none, since all of them end a step.
        in_flight: role -> batches of a member whose activations may be kept at a time; where it is missing no limit
            holds for a role that is read, and one for others. Of a role that reads and is read, those that may be open.
        meets: role -> which of its ranks begin a pass together, each by itself where it is missing. Where any do, ranks
            of several roles have a fixed order, see `taking_turns`.
        producers_first: no role that reads begins before all that it reads is there.
        steps_ahead: later steps that ranks which only produce may have begun; 0 where they train.
        stages: role that is one -> its number.
        pipeline: all stages, and how they work.
    """

    ranks: Mapping[str, Sequence[tuple[int, ...]]]
    edges: Sequence[Edge]
    in_flight: Mapping[str, int] = field(default_factory=dict)
    meets: Mapping[str, Meeting] = field(default_factory=dict)
    producers_first: bool = False
    steps_ahead: int = 0
    stages: Mapping[str, int] = field(default_factory=dict)
    pipeline: StageSchedule = ONE_STAGE

    @classmethod
    def separate(
        cls,
        work: StepWork,
        edges: Sequence[Edge],
        in_flight: Mapping[str, int] = MappingProxyType({}),
        meets: Mapping[str, Meeting] = MappingProxyType({}),
    ) -> StepRules:
        """Every member of ``work`` on a rank of its own."""
        ranks: dict[str, list[tuple[int, ...]]] = {}
        first = 0
        for role, members in work.items():
            ranks[role] = [(first + member,) for member in range(len(members))]
            first += len(members)
        return cls(ranks, edges, in_flight, meets=meets)

    @property
    def in_fixed_order(self) -> bool:
        """Ranks need each other in some pass."""
        return any_binds(self.meets)

    def produces(self, role: str) -> bool:
        """Whether another role reads from this one."""
        return any(edge.producer == role for edge in self.edges)

    def reads(self, role: str) -> bool:
        """Whether this role reads from another one."""
        return any(edge.consumer == role for edge in self.edges)

    def ranks_of(self, only_produces: bool) -> frozenset[int]:
        """All ranks of roles that do nothing but produce, or of all other ones: whose end is the step's."""
        roles = [role for role in self.ranks if (self.produces(role) and not self.reads(role)) == only_produces]
        return frozenset(rank for role in roles for ranks in self.ranks[role] for rank in ranks)
