"""Ends a step: the backbone ranks agree on a report, which reaches all other ranks through the pool.

Ranks of a role behind the backbone have agreed before on what it is to hold of their loss.

Whatever else ranks have to tell of a step goes with it as notes. Backbone ranks exchange theirs when they agree. An
encoder rank sends its own through the pool, since one that works ahead must not be made to wait: a note that finds no
room is not sent, and one that has not arrived yet comes with a later step's report.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from typing import Any

import torch

from flowtrain_lightning.compute.joint_losses import JointLosses
from flowtrain_lightning.compute.step_metrics import MetricAccumulator, StepReport
from flowtrain_lightning.packing.step_work import STEPS_AHEAD
from flowtrain_lightning.parallel.engine import StepRecord
from flowtrain_lightning.pool import Key
from flowtrain_lightning.runtime.job import Job
from flowtrain_lightning.runtime.step import OTHER_STEPS, RankContext, Step
from flowtrain_lightning.runtime.timeline import STALL
from flowtrain_lightning.runtime.working_ahead import WorkAhead

_WAKE_SECONDS = 0.5
_LATEST_NOTES = 2 * STEPS_AHEAD
"""Rounds of notes after which nobody looks any more for what an encoder rank may have sent."""

_STEP = "step"
"""Key of a report's step, beside the fields of the report."""

Note = dict[str, Any]
"""One rank's report of a step, in JSON types."""


class StepEnd:
    """Brings the report of each step to this rank.

    Args:
        job: the calling rank's.
        listeners: global rank of every rank that has no backbone lane.
        metrics: stage -> what the calling rank's microbatches left there.
        behind: role behind the backbone -> the same of its batches.
        losses: joins the reports of several roles; None where the backbone alone has a loss.
    """

    def __init__(
        self,
        job: Job,
        listeners: Sequence[int],
        metrics: Mapping[str, MetricAccumulator],
        behind: Mapping[str, Mapping[str, MetricAccumulator]] | None = None,
        losses: JointLosses | None = None,
    ) -> None:
        self._job = job
        self._behind, self._losses = behind or {}, losses
        self._mesh, self._trunk = job.mesh, job.allocation.trunk
        self._sum = partial(job.groups.sum_over_role, self._trunk)
        self._gather = partial(job.groups.gather_over_role, self._trunk)
        self._listeners = listeners
        self._producers = job.allocation.producers
        others = [rank for role in (*self._producers, *self._behind) for rank in job.allocation.ranks[role]]
        self._senders = {rank: others.index(rank) for rank in listeners}
        self._speaker = job.allocation.ranks[self._trunk][0]
        self._metrics = metrics
        self._rounds = 0  # how often notes were asked for, alike on all ranks

    def compare(self, step: Step, role: str, record: StepRecord) -> set[int]:
        """Finds weights that ranks which share them have not used; raises where they have not worked in one order.

        Such an order can spoil gradients in silence, and so can layers of which each rank leaves out another.

        Args:
            step: the one that ends.
            role: of this rank, whose ranks share weights.
            record: of this rank.

        Returns:
            the parameters, by number, that have a gradient though none of the ranks has used them.

        Raises:
            RuntimeError: says what this rank has run, or what to do.
        """
        executed = step.executed[role]
        digest = blake2b(json.dumps(executed).encode(), digest_size=8).hexdigest()
        of_ranks = self._job.groups.gather_over_role(role, [digest, record.layers, sorted(record.unused)])
        told = [of_ranks[rank] for rank in self._in_step_with(role)]
        if any(of_rank != digest for of_rank, _, _ in told):
            raise RuntimeError(
                f"Ranks that share weights have worked in different orders in step {step.index} ({step.stage}), so "
                f"its gradients may be wrong. This rank has run {executed} of the {role}. This is a fault of "
                "flowtrain: please report it."
            )
        if any(layers != record.layers for _, layers, _ in told):
            raise RuntimeError(
                f"Ranks that share weights have run different layers of the {role} in step {step.index}, so its "
                "results are wrong. Let every forward run all layers in one order, if only with no rows, or override "
                f"`parallelize_{role}` so that it does not shard those that may be left out."
            )
        return set(record.unused).intersection(*(unused for _, _, unused in told))

    def _in_step_with(self, role: str) -> Sequence[int]:
        """The ranks that must work in one order with this one, counted within the role."""
        allocation = self._job.allocation
        layout, within = allocation.layouts[role], allocation.rank_within(role, self._job.rank)
        assert within is not None
        if layout.meets.passes:
            of_stage = layout.ranks // layout.pipeline
            return range(within - within % of_stage, within - within % of_stage + of_stage)
        first = within - within % layout.ranks_of_stage
        return range(first, first + layout.ranks_of_stage)

    def agree(self, context: RankContext, step: Step, note: Note | None) -> StepReport:
        """On every backbone rank: the report of a step whose lanes have ended.

        Args:
            context: what the lanes work with.
            step: the one that ends.
            note: what this rank tells of it; None on all ranks where nobody asked for notes.
        """
        context.enter(f"wait for the other {self._trunk} ranks", step)
        start = context.timeline.start()
        asked_to_stop = any(page.sigterm for page in self._mesh.board.pages)
        report = self._metrics[step.stage].agree(asked_to_stop, self._sum, self._gather)
        if self._losses is not None:
            report = self._losses.joined(report, self._reports_behind(context, step))
        if note is not None:
            arrived = self._arrived(context, step) if self._job.rank == self._speaker else []
            self._rounds += 1
            gathered = self._gather([note, *arrived])
            report = replace(report, notes=tuple(found for notes in gathered for found in notes))
        context.timeline.stop(start, self._trunk, STALL, f"other {self._trunk} ranks", step.stage, step.index)
        if self._listeners and self._job.rank == self._speaker:
            # Through the pool and not in a collective: so the backbone goes on at once, also when an encoder rank is
            # in the middle of a later step's batch.
            text = [_as_tensor({**vars(report), _STEP: step.name})]
            while context.pool.put(Key(step.report, step.index, 0), text, self._listeners) is None:
                context.pool.poll(_WAKE_SECONDS)
            context.pool.settle()
        return report

    def receive(self, context: RankContext, step: Step, note: Note | None, work_ahead: WorkAhead | None) -> StepReport:
        """On a rank without a backbone lane: the report, when the backbone ranks have agreed on it.

        Args:
            context: what the lanes work with.
            step: the one that ends.
            note: what this rank tells of it; None on all ranks where nobody asked for notes.
            work_ahead: does pieces of work of later steps meanwhile; None where none may be done.

        Raises:
            ValueError: the backbone ranks have ended another step.
        """
        pool = context.pool
        self._tell_behind(context, step)
        if note is not None:
            if note and not self._mesh.has_left(self._speaker):
                # In the region in which this rank reserves nothing: a note that nobody has read yet never stands where
                # features must go, or gradients.
                number = self._senders[self._job.rank]
                encodes = any(role in self._producers for role in self._job.roles)
                pool.put(Key(step.notes, self._rounds, number), [_as_tensor(note)], [self._speaker], ahead=encodes)
            self._rounds += 1
        key = Key(step.report, step.index, 0)
        start, waits = context.timeline.start(), False
        while True:
            is_here = bool(pool.arrived([key]))
            if work_ahead is not None and work_ahead(is_here):
                pool.poll()
                start, waits = context.timeline.start(), False
                continue
            if is_here:
                break
            if not waits:  # once, since entering a phase counts as progress
                context.enter("wait for the backbone to end the step", step)
                waits = True
            pool.poll(_WAKE_SECONDS)
        context.timeline.stop(start, self._job.roles[0], STALL, "end of the step", step.stage, step.index)
        lease = pool.get(key)
        assert lease is not None, "it has arrived"
        told = json.loads(bytes(lease.tensors[0].numpy()))
        lease.release()
        if tuple(ended := told.pop(_STEP)) != step.name:
            raise ValueError(
                f"The {self._trunk} has ended step {ended[1]} of epoch {ended[0]}, but this rank is in step "
                f"{step.name[1]} of epoch {step.name[0]}. {OTHER_STEPS}"
            )
        report = StepReport(**told)
        return replace(report, notes=tuple(report.notes))

    def _agree_behind(self, context: RankContext, step: Step, role: str) -> StepReport:
        """On every rank of a role behind the trunk: what it has to report."""
        context.enter(f"wait for the other {role} ranks", step)
        sums = partial(self._job.groups.sum_over_role, role), partial(self._job.groups.gather_over_role, role)
        return self._behind[role][step.stage].agree(False, *sums)

    def _reports_behind(self, context: RankContext, step: Step) -> dict[str, StepReport]:
        """On every rank of the trunk: what roles behind it report."""
        found = {}
        for number, role in enumerate(self._behind):
            if role in self._job.roles:
                found[role] = self._agree_behind(context, step, role)
                continue
            key = Key(step.losses, step.index, number)
            context.enter(f"wait for the loss of the {role}", step)
            while not context.pool.arrived([key]):
                context.pool.poll(_WAKE_SECONDS)
            lease = context.pool.get(key)
            assert lease is not None, "it has arrived"
            found[role] = StepReport(**json.loads(bytes(lease.tensors[0].numpy())))
            lease.release()
        return found

    def _tell_behind(self, context: RankContext, step: Step) -> None:
        """On a rank of a role behind the trunk without a lane of it: tells what the role has to report."""
        for number, role in enumerate(self._behind):
            if role not in self._job.roles:
                continue
            told = [_as_tensor(vars(self._agree_behind(context, step, role)))]
            if self._job.rank == self._job.allocation.ranks[role][0]:
                readers, key = self._job.allocation.ranks[self._trunk], Key(step.losses, step.index, number)
                while context.pool.put(key, told, readers) is None:
                    context.pool.poll(_WAKE_SECONDS)

    def _arrived(self, context: RankContext, step: Step) -> list[Note]:
        """Notes of encoder ranks that are here by now."""
        context.pool.poll()
        found = []
        for number in range(max(0, self._rounds - _LATEST_NOTES), self._rounds + 1):
            for sender in self._senders.values():
                lease = context.pool.get(Key(step.notes, number, sender))
                if lease is not None:
                    found.append(json.loads(bytes(lease.tensors[0].numpy())))
                    lease.release()
        return found


def _as_tensor(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
