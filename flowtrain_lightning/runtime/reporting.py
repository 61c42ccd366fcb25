"""How a step ends: the backbone ranks agree on a report of it, which reaches the encoder ranks through the pool."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace

import torch

from flowtrain_lightning.allocator.roles import BACKBONE, ENCODER
from flowtrain_lightning.compute.step_metrics import MetricAccumulator, StepReport
from flowtrain_lightning.runtime.job import Job
from flowtrain_lightning.runtime.news import News
from flowtrain_lightning.runtime.room_keeper import PoolCapacity
from flowtrain_lightning.runtime.step import Step, times_key
from flowtrain_lightning.runtime.timeline import STALL, Span, Timeline
from flowtrain_lightning.runtime.times import measured, of_all_ranks

_POLL_SECONDS = 0.5


class Reporter:
    """Brings the report of each step to this rank.

    Args:
        job: the calling rank's.
        listeners: global rank of every encoder rank that has no backbone lane.
        logbooks: stage -> what the calling rank's microbatches left there.
        room: knows the pool.
        timeline: of the calling rank.
    """

    def __init__(
        self,
        job: Job,
        listeners: Sequence[int],
        logbooks: Mapping[str, MetricAccumulator],
        room: PoolCapacity,
        timeline: Timeline,
    ) -> None:
        self._mesh = job.mesh
        self._groups = job.groups
        self._listeners = listeners
        self._speaker = job.allocation.ranks[BACKBONE][0]
        self._logbooks = logbooks
        self._room = room
        self._timeline = timeline
        self._times = News(job.groups, job.mesh, listeners, self._speaker, times_key)

    def agree(self, step: Step, *, with_times: bool) -> StepReport:
        """On every backbone rank: the report of a step whose lanes have ended.

        Args:
            step: that ends.
            with_times: the report says how long everything took.
        """
        start = time.monotonic()
        self._room.desk.enter("wait for the other backbone ranks", step)
        report = self._logbooks[step.stage].agree(
            self._asked_to_stop(), self._groups.sum_over_role, self._groups.gather_over_role
        )
        if with_times:
            everyone = self._times.gather(step.index, measured(step, self._timeline), self._room.desk.pool)
            report = replace(report, times=of_all_ranks(everyone))
        self._timeline.add(Span(BACKBONE, STALL, "other backbone ranks", *step.place, -1, start, time.monotonic()))
        if self._listeners and self._groups.cross.rank == self._speaker:
            self._publish(step, report)
        return report

    def receive(self, step: Step, work_ahead: Callable[[], bool], *, with_times: bool) -> StepReport:
        """On an encoder rank without a backbone lane: the report, when the backbone ranks have agreed on it.

        Args:
            step: that ends.
            work_ahead: does a piece of work of a later step meanwhile; False where there is none to do now.
            with_times: the report says how long everything took, here too.
        """
        if with_times:
            self._send_times(step)
        pool = self._room.desk.pool
        start = time.monotonic()
        waits = False
        while (lease := pool.get(step.report_key)) is None:
            if work_ahead():
                pool.poll()
                start = time.monotonic()
                waits = False
                continue
            if not waits:  # once, since entering a phase counts as progress
                self._room.desk.enter("wait for the backbone to end the step", step)
                waits = True
            pool.poll(_POLL_SECONDS)
        self._timeline.add(Span(ENCODER, STALL, "end of the step", *step.place, -1, start, time.monotonic()))
        report = StepReport(**json.loads(bytes(lease.tensors[0].numpy())))
        lease.release()
        return report

    def _asked_to_stop(self) -> bool:
        board = self._mesh.board
        return any(board[rank].sigterm for rank in range(len(board)))

    def _publish(self, step: Step, report: StepReport) -> None:
        # A report goes one way through the pool and not through a collective: so the backbone goes on at once, also
        # when an encoder rank is in the middle of a later step's batch.
        text = torch.frombuffer(bytearray(json.dumps(asdict(report)).encode()), dtype=torch.uint8)
        pool = self._room.desk.pool
        while pool.put(step.report_key, [text], self._listeners) is None:
            pool.poll(_POLL_SECONDS)

    def _send_times(self, step: Step) -> None:
        times, encoder_rank = measured(step, self._timeline), step.batch.shard.encoder_rank
        if times[ENCODER] and encoder_rank is not None:
            self._times.send(step.index, encoder_rank, times, self._room.desk.pool)
