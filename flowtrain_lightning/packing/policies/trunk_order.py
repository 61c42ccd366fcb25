"""The policy of the trunk: backward at once, or as soon as those behind it, or its next stage, have given gradients."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from flowtrain_lightning.packing.policies.virtual_stages import ChunkPass, virtual_stage_orders
from flowtrain_lightning.packing.policies.zero_bubble import zero_bubble_orders
from flowtrain_lightning.packing.stage_schedule import StageSchedule
from flowtrain_lightning.packing.step_graph import Pass
from flowtrain_lightning.packing.step_members import StepMembers
from flowtrain_lightning.packing.step_plan import StepPlan

MOST_OPEN = 2
"""Microbatches of a member that may be open: one goes forward while others generate from the one before."""


class TrunkOrder(NamedTuple):
    """In which order members of the trunk work, alike for all of them.

    Attributes:
        passes: forwards and backwards of microbatches, by position; backwards never fall.
        answered: ``[positions]`` the position of the last forward that goes before the backward of each.
    """

    passes: tuple[Pass, ...]
    answered: tuple[int, ...]

    def answered_after(self, until: int) -> int:
        """The position whose forward is the last before the gradients of what is read until a position; or -1."""
        return self.answered[until] if until >= 0 else until


def trunk_order(plan: StepPlan, members: StepMembers, stage: int = 0) -> TrunkOrder:
    """The order of a step.

    Where nobody reads what the trunk makes, each microbatch goes backward at once. Else two may be open, so that the
    trunk need not wait for those behind it; one, where a rank has both roles and takes turns in a fixed order. In
    stages it is that of `stage_order`, without gradients of weights; of several runs of layers the first ones count.

    Args:
        plan: who encodes and who reads what.
        members: of all roles.
        stage: of the trunk; encoders go by the first, which is the last to give gradients.
    """
    count = len(plan.microbatches[0])
    if members.pipeline.stages > 1:
        return order_of_stage(count, members.pipeline, stage)
    read = {entry.maker.number for entry in plan.entries if entry.maker.role == members.trunk}
    return _with_answers(in_order(count, read, most_open(members)))


def order_of_stage(positions: int, pipeline: StageSchedule, stage: int = 0) -> TrunkOrder:
    """The order of a stage as encoders see it, see `trunk_order`."""
    of_stage = stage_order(positions, pipeline, stage)
    counted = (each for each in of_stage if each.chunk == 0 and each.kind != "weights")
    return _with_answers((each.kind, each.position) for each in counted)


def stage_order(positions: int, pipeline: StageSchedule, stage: int) -> tuple[ChunkPass, ...]:
    """The order in which a stage works.

    In 1F1B as many microbatches may be open as there are stages from it on, so that none waits for what comes later,
    and the last one never waits for gradients.

    Args:
        positions: microbatches of a member.
        pipeline: its stages.
        stage: which one.
    """
    if pipeline.splits:
        return zero_bubble_orders(positions, pipeline)[stage]
    if pipeline.chunks > 1:
        return virtual_stage_orders(positions, pipeline.stages, pipeline.chunks)[stage]
    found = in_order(positions, range(positions), pipeline.stages - stage)
    return tuple(ChunkPass(kind, 0, position) for kind, position in found)


def most_open(members: StepMembers) -> int:
    """Microbatches of a member of the trunk that may be open where a role behind it reads them."""
    shared = members.in_fixed_order and any(role in members.colocated for role in members.behind)
    return 1 if shared else MOST_OPEN


def _with_answers(order: Iterable[Pass]) -> TrunkOrder:
    passes, answered, latest = tuple(order), [], -1
    for kind, position in passes:
        latest = position if kind == "forward" else latest
        answered += [latest] * (kind == "backward")  # backwards come in the order of positions
    return TrunkOrder(passes, tuple(answered))


def in_order(positions: int, read: Collection[int], in_flight: int) -> Iterator[Pass]:
    """Forward while microbatches may be open, else the oldest backward; what nobody reads does not stay open.

    Args:
        positions: microbatches of a member.
        read: positions of which some member's rows are read.
        in_flight: how many may be open at a time.
    """
    opened = deque[int]()
    for position in range(positions):
        if len(opened) == in_flight:
            yield "backward", opened.popleft()
        yield from _unread(opened, read)
        yield "forward", position
        opened.append(position)
        yield from _unread(opened, read)
    yield from (("backward", position) for position in opened)


def _unread(opened: deque[int], read: Collection[int]) -> Iterator[Pass]:
    while opened and opened[0] not in read:
        yield "backward", opened.popleft()
