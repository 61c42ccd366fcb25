"""Runs the works of a rank in a step: takes what a work reads, runs its role's method, puts what others read."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from flowtrain_lightning.packing.step_graph import BatchOf, Work
from flowtrain_lightning.parallel.offloading import ActivationsOnHost
from flowtrain_lightning.parallel.role_buffers import RoleBuffers
from flowtrain_lightning.parallel.stages.late_weights import LateWeight
from flowtrain_lightning.pool import Key
from flowtrain_lightning.runtime.batch_underway import OWN, BatchUnderway
from flowtrain_lightning.runtime.gathering import Gathering
from flowtrain_lightning.runtime.program import PADDING, Lane, RankBatch, ReadEntry
from flowtrain_lightning.runtime.role_methods import ForwardResult, RoleMethod
from flowtrain_lightning.runtime.step import RankContext, Step
from flowtrain_lightning.runtime.timeline import AGAIN, COMMUNICATION, COMPUTE, MOVED, STALL

_NOTHING = nullcontext()
_WAKE_SECONDS = 0.5
_FETCHED_AHEAD = 2
"""Batches whose rows are fetched as they come: so their makers' bytes are free sooner, and they are here in time."""

_ROOM_FOR_ROWS = "bytes for features in the pool"
_ROOM_FOR_GRADIENTS = "bytes for gradients in the pool"


class Progress(Enum):
    """A lane's progress since it was asked last."""

    WORK = "a work"
    PART = "something inside of one"


class Wait(NamedTuple):
    """A lane cannot go on.

    Attributes:
        role: whose work waits.
        reason: for what.
    """

    role: str
    reason: str


Course = Iterator[Progress | Wait]
"""Lanes and works on their way: they yield what they have done, or what they wait for."""


@dataclass(frozen=True)
class RolePart:
    """The parts with which a rank does the works of one of its roles.

    Attributes:
        method: runs its forwards.
        buffers: of the role's half.
        speaks: of ranks that share a work, which all have the same, this one puts it into the pool.
        again: inside, a forward runs a second time, of so many tokens or patches.
    """

    method: RoleMethod
    buffers: RoleBuffers
    speaks: bool = True
    again: Callable[[int], AbstractContextManager[None]] = lambda rows: _NOTHING


class Executor:
    """The course of one step on one rank.

    Args:
        context: what the rank works with.
        parts: role -> what its works need, in order of precedence.
        step: the step.
        begun: role -> the place of the first batch that was not published ahead of the step.
    """

    def __init__(
        self, context: RankContext, parts: Mapping[str, RolePart], step: Step, begun: Mapping[str, int] | None = None
    ) -> None:
        self._context = context
        self._parts = parts
        self._step = step
        self._begun = begun or {}
        self._lanes = step.program.lanes(step.trained)
        self._ended: set[str] = set()
        self._has_reserved: set[bool] = set()  # rows, and gradients ahead of them
        works = [work for lane in self._lanes for work in lane.works]
        self._last = {work.batch.role: work for work in works}  # the last one of each role
        # What backwards leave for works of their own.
        self._left: dict[BatchOf, list[LateWeight]] = {work.batch: [] for work in works if work.kind == "weights"}
        self._coming: dict[str, deque[BatchUnderway]] = {}
        self._open: dict[str, dict[int, BatchUnderway]] = {}
        self._on_host = ActivationsOnHost(pinned=context.compute.device.type != "cpu")
        self._early: list[tuple[str, Gathering, list[Key]]] = []  # what batches read that earlier ones read, too
        self._answers: dict[int, list[Tensor]] = {}  # gradients of entries that later batches of this rank read, too
        for role, each in step.program.roles.items():
            streams = context.compute.copies[role]
            if any(read.early for batch in each.batches.values() for read in batch.read):
                streams = streams[:1]  # one copies what several batches read
            places = [work.batch.number for work in works if work.batch.role == role and work.kind == "forward"]
            self._coming[role] = deque(
                BatchUnderway.of(context, step, each.batches[place], streams[n % len(streams)])
                for n, place in enumerate(places)
            )
            self._open[role] = {}
            self._share(role, self._coming[role])

    def _share(self, role: str, batches: Iterable[BatchUnderway]) -> None:
        """Lets each entry that several batches read come to all of them at once, when it is there."""
        readers: dict[Key, list[Gathering]] = {}
        for batch in batches:
            for key in batch.read.missing:
                readers.setdefault(key, []).append(batch.read)
            if early := [self._key(read) for read in batch.batch.read if read.early]:
                self._early.append((role, batch.read, early))
        for key, several in readers.items():
            if len(several) > 1:
                for gathering in several:
                    gathering.shared[key] = several

    def run(self) -> None:
        """Runs all works, in one thread.

        After every work the first lane is asked again, so it has precedence. Where no lane can go on, the rank sleeps
        until something arrives from another rank.
        """
        pool, running = self._context.pool, {lane.roles: self._course(lane) for lane in self._lanes}
        pool.poll()
        while running:
            waits: list[Wait] = []
            for roles, course in list(running.items()):
                found = next(course, None)
                if found is None:
                    del running[roles]
                    self._ended.update(roles)
                if not isinstance(found, Wait):
                    pool.poll()
                    break
                waits.append(found)
            else:
                self._sleep(waits)
        pool.settle()

    def _sleep(self, waits: Sequence[Wait]) -> None:
        """Waits until something arrives from another rank."""
        context, step = self._context, self._step
        context.enter(f"wait for {' and '.join(wait.reason for wait in waits)}", step)
        start = context.timeline.start()
        while not context.pool.poll(_WAKE_SECONDS):
            pass
        context.timeline.stop(start, waits[0].role, STALL, waits[0].reason, step.stage, step.index)

    def publish_ahead(self, role: str, place: int) -> None:
        """Runs a forward before the step begins, of a role that reads nothing and does not train.

        There is room for what it makes.
        """
        each = self._step.program.roles[role]
        batch = BatchUnderway.of(self._context, self._step, each.batches[place], self._context.compute.copies[role][0])
        if self._parts[role].method.is_for_nothing(batch.batch):
            return
        outputs = self._compute(Work(BatchOf(role, each.member, place), "forward"), batch, keep=False)
        if self._parts[role].speaks:
            for found in self._publish(role, batch.batch, outputs.rows, ahead=True):
                raise AssertionError(f"it was to wait for {found}, but there was room for the whole batch")

    # ---- works --------------------------------------------------------------------------------------------------

    def _course(self, lane: Lane) -> Course:
        for role in lane.roles:
            yield from self._reserve(role)
        for work in lane.works:
            role, place = work.batch.role, work.batch.number
            self._step.executed[role].append(f"{work.kind} {place}")
            if place < self._begun.get(role, 0):  # published ahead of the step
                self._coming[role].popleft()
                continue
            # Whatever it waits for, it takes what has arrived: the bytes may be what another work needs.
            self._take_arrived()
            if work.kind == "forward":
                yield from self._forward(work)
            elif work.kind == "backward":
                yield from self._backward(work)
            else:
                self._weights(work)
            yield Progress.WORK

    def _reserve(self, role: str) -> Course:
        each = self._step.program.roles[role]
        if not self._step.program.modalities or not self._parts[role].speaks:
            return
        if each.makes:
            yield from self._until(partial(self._reserve_for_all, ahead=False), role, _ROOM_FOR_ROWS)
        if each.gives_back and self._step.answered:
            yield from self._until(partial(self._reserve_for_all, ahead=True), role, _ROOM_FOR_GRADIENTS)

    def _reserve_for_all(self, *, ahead: bool) -> bool:
        """Reserves bytes for what all roles of this rank make, or else give back, once; says whether that is done."""
        if ahead not in self._has_reserved:
            step, specs, begun = self._step, self._context.compute.specs, self._begun
            roles = {role: step.program.roles[role] for role, part in self._parts.items() if part.speaks}
            if ahead:
                orders = [step.reserved_gradients(specs, role) for role, each in roles.items() if each.gives_back]
            else:
                makers = [role for role, each in roles.items() if each.makes]
                orders = [step.reserved_features(specs, role, begun.get(role, 0)) for role in makers]
            if not self._context.pool.reserve(*orders, ahead=ahead):
                return False
            self._has_reserved.add(ahead)
        return True

    def _forward(self, work: Work) -> Course:
        role, place = work.batch.role, work.batch.number
        batch, part = self._coming[role][0], self._parts[role]
        name = f"{part.method.batch_name} {batch.batch.number}"
        yield from self._until(lambda: not batch.read.missing, role, f"features of {name}")
        keys = [Key(self._step.features, self._step.index, made.entry) for made in batch.batch.made]
        if part.speaks and keys:
            yield from self._until(lambda: self._context.pool.has_room(keys), role, _ROOM_FOR_ROWS)
        self._coming[role].popleft()
        goes_back = role in self._step.trained
        if not goes_back and part.method.is_for_nothing(batch.batch):
            return
        if goes_back and batch.batch.recomputes:
            batch.buffers = part.buffers.found()
        outputs = self._compute(work, batch, keep=goes_back and not batch.batch.recomputes)
        if goes_back:
            batch.outputs = None if batch.batch.recomputes else outputs
            self._open[role][place] = batch
        if part.speaks:
            yield from self._publish(role, batch.batch, outputs.rows)

    def _backward(self, work: Work) -> Course:
        role, place, context = work.batch.role, work.batch.number, self._context
        batch = self._open[role][place]
        name = f"{self._parts[role].method.batch_name} {batch.batch.number}"
        yield from self._until(lambda: not batch.gradients.missing, role, f"gradients of {name}")
        del self._open[role][place]
        outputs = self._compute_again(work, batch) if batch.outputs is None else batch.outputs
        is_last = work == self._last[role]
        if is_last:
            self._send_gradients_before(role)
        context.enter(f"backward of {name}", self._step)
        context.hand_over(batch.gradients.copies, batch.gradients.tensors(OWN), role, self._step)
        gradients = batch.summed_gradients() or (None,) * len(outputs.rows)
        start = context.timeline.start()
        reached, given = (*outputs.rows,), (*gradients,)
        if outputs.loss is not None:
            reached, given = (*reached, outputs.loss), (*given, outputs.seed)
        left = self._left.get(work.batch)
        has_any = bool(reached) and context.compute.backward(role, reached, given, last=is_last, left=left)
        context.timeline.stop(start, role, COMPUTE, "backward", self._step.stage, self._step.index, batch.batch.number)
        if self._step.answered and self._parts[role].speaks:
            yield from self._give_back(role, batch, has_any=has_any)

    def _weights(self, work: Work) -> None:
        """The gradients of weights that a backward has left."""
        role, context, step, batch = work.batch.role, self._context, self._step, work.batch
        number = step.program.roles[role].batches[batch.number].number
        context.enter(f"weights of {self._parts[role].method.batch_name} {number}", step)
        start = context.timeline.start()
        context.compute.weights(role, self._left.pop(batch), last=work == self._last[role])
        context.timeline.stop(start, role, COMPUTE, "weights", step.stage, step.index, number)

    def _compute(self, work: Work, batch: BatchUnderway, *, keep: bool, again: bool = False) -> ForwardResult:
        """A forward, by the role's method."""
        role, context, step = work.batch.role, self._context, self._step
        part, number = self._parts[role], batch.batch.number
        method, is_padding = part.method, not again and self._rows(work, batch) == 0
        for name in batch.read.names:
            context.hand_over(batch.read.copies, batch.read.tensors(name), role, step)
        context.enter(f"forward of {method.batch_name} {number}", step)
        start = context.timeline.start()
        moved = keep and batch.batch.moves
        with self._on_host if moved else _NOTHING, context.leaving_nothing(part.buffers) if is_padding else _NOTHING:
            outputs = method.forward(step, work.batch.member, batch.batch, batch.read, keep=keep, again=again)
        name = AGAIN if again else MOVED if moved else "forward"
        context.timeline.stop(start, role, COMPUTE, name, step.stage, step.index, number)
        return outputs

    def _compute_again(self, work: Work, batch: BatchUnderway) -> ForwardResult:
        """The forward of a batch of which nothing was kept."""
        part = self._parts[work.batch.role]
        with part.buffers.again(batch.buffers), part.again(self._rows(work, batch)), self._context.uncounted():
            return self._compute(work, batch, keep=True, again=True)

    def _rows(self, work: Work, batch: BatchUnderway) -> int:
        """Tokens or patches of a batch; none of padding."""
        role, number = work.batch.role, batch.batch.number
        return 0 if number == PADDING else self._step.plan.length(BatchOf(role, work.batch.member, number))

    def _send_gradients_before(self, role: str) -> None:
        """Begins to sum the gradients of the roles before this one, once it alone is left; in one order on all ranks.

        From here on no other rank needs anything of this one but sums, in which a GPU may wait for the others; unless
        the role has read, so that others wait for what its last backward gives back.
        """
        if self._step.program.roles[role].gives_back:
            return
        roles = list(self._parts)
        if self._ended.issuperset(set(roles) - {role}) and self._context.pool.is_settled:
            for other in roles[: roles.index(role)]:
                self._context.compute.send_gradients(other)

    # ---- what passes through the pool ---------------------------------------------------------------------------

    def _publish(self, role: str, batch: RankBatch, rows: Sequence[Tensor], ahead: bool = False) -> Course:
        """Puts the rows of a batch that others read."""
        if not batch.made:
            return
        step, timeline = self._step, self._context.timeline
        start = timeline.start()
        sizes = [made.rows for made in batch.made]
        for made, part in zip(
            batch.made, zip(*(torch.split(each.detach(), sizes) for each in rows), strict=True), strict=True
        ):
            key = Key(step.features, step.index, made.entry)
            readers = [rank for reader, member in made.readers for rank in self._context.members[reader][member]]
            while self._context.pool.put(key, part, readers, ahead=ahead) is None:
                yield Progress.PART if self._take_arrived() else Wait(role, _ROOM_FOR_ROWS)
                start = timeline.start()
        timeline.stop(start, role, COMMUNICATION, "features", step.stage, step.index)

    def _give_back(self, role: str, batch: BatchUnderway, *, has_any: bool) -> Course:
        """Puts the gradients of the rows that a batch has read; zeros of a backward that has no gradient are none."""
        step, timeline = self._step, self._context.timeline
        start = timeline.start()
        for read in batch.batch.read:
            if read.modality not in step.answered:
                continue
            # No rows stand for no gradient: what took no part in the loss keeps None, as it would in one process.
            leaves = [leaf for leaf in batch.read.tensors(read.modality) if leaf is not None]
            gradients = [
                _rows(leaf.grad, read) if has_any and leaf.grad is not None else leaf.detach()[:0] for leaf in leaves
            ]
            gradients = _summed(self._answers.pop(read.entry, ()), gradients)
            if not read.answers:
                self._answers[read.entry] = gradients
                continue
            key = Key(step.gradients, step.index, read.entry, read.part)
            maker, member = read.maker
            makers = self._context.members[maker][member]
            # An encoder that trains never works ahead, so that region is free for gradients. Were they to share one
            # with features, two ranks with both roles could each fill it with what the other must read first.
            while self._context.pool.put(key, gradients, makers, ahead=True) is None:
                yield Progress.PART if self._take_arrived() else Wait(role, _ROOM_FOR_GRADIENTS)
                start = timeline.start()
        timeline.stop(start, role, COMMUNICATION, "gradients", step.stage, step.index)

    def _key(self, read: ReadEntry) -> Key:
        """Under which the pool has the rows of an entry."""
        return Key(self._step.features, self._step.index, read.entry)

    def _until(self, can_go_on: Callable[[], bool], role: str, reason: str) -> Course:
        while not can_go_on():
            yield Progress.PART if self._take_arrived() else Wait(role, reason)

    def _take_arrived(self) -> bool:
        """Copies all that has arrived, so that no rank waits for this one to come to it; says whether it was any."""
        taken = False
        for role in self._parts:
            for batch in islice(self._coming.get(role, ()), _FETCHED_AHEAD):
                taken |= batch.read.take_arrived(role, self._step)
            for batch in self._open.get(role, {}).values():
                taken |= batch.gradients.take_arrived(role, self._step)
        for role, gathering, keys in self._early:
            taken |= gathering.take_arrived(role, self._step, keys)
        return taken


def _rows(gradient: Tensor, read: ReadEntry) -> Tensor:
    """The rows of one entry, those that appear several times summed; a view where they are in one piece."""
    slices = read.slices
    rows = gradient[slices[0]] if len(slices) == 1 else torch.cat([gradient[run] for run in slices])
    if read.again:
        rows = rows.clone() if len(slices) == 1 else rows
        for run, place in read.again:
            rows[run] += gradient[place]
    return rows


def _summed(before: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[Tensor]:
    """The gradients of several batches; no rows stand for no gradient."""
    if not before:
        return [*gradients]
    pairs = zip(before, gradients, strict=True)
    return [one + other if len(one) and len(other) else one if len(one) else other for one, other in pairs]
