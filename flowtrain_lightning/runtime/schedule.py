"""How the one or two lanes of a rank take turns, and what they work with."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from torch import Tensor

from flowtrain_lightning.compute.compute import Compute, FeatureSpec
from flowtrain_lightning.compute.copy_stream import CopyStream
from flowtrain_lightning.data import StepBatch, StepPlan
from flowtrain_lightning.pool import Key, Pool, Reservation, StatusPage
from flowtrain_lightning.runtime.program import StepProgram
from flowtrain_lightning.runtime.timeline import STALL, Timeline


class Progress(Enum):
    """What a lane has done since it was asked last."""

    UNIT = "a unit of work: a forward, a backward or a microbatch"
    PART = "something inside of a unit"


Schedule = Iterator[str | Progress]
"""A lane at work: it yields its progress, or a text that says what it waits for."""

STAGES = ("train", "val", "test", "predict")

_FEATURES, _GRADIENTS, _REPORT, _NOTES, _KINDS = range(5)
_WAKE_SECONDS = 0.5


class Step:
    """A step of one stage, as its lanes see it.

    Args:
        frozen: modalities whose encoders get no gradients, since they do not train while another does.

    Attributes:
        batch: this rank's part.
        plan: of the whole step.
        program: what this rank does in it.
        stage: one of ``STAGES``.
        index: counts the steps of this stage since the start of the run, alike on all ranks.
        trains: gradients go back to an encoder.
        answered: modalities of the step to whose encoders they go: those of all but ``frozen``.
        name: epoch and step within it, which name random streams.
        features: channel of the pool for features, whose keys go on with ``index`` and the number of the entry.
        gradients: channel for the gradients of features, with keys of the same form.
        report: channel on which encoder ranks find the step's report, under ``index``.
        notes: channel for what encoder ranks tell at the step's end, under a round and their number among all
            that encode.
        ended: roles whose lanes on this rank have come to their end, where none has a fixed order.
        executed: role -> its forwards, backwards and microbatches, in the order in which this rank ran them.
    """

    def __init__(
        self,
        batch: StepBatch,
        program: StepProgram,
        stage: str,
        index: int,
        trains: bool,
        frozen: Collection[str | None] = (),
    ) -> None:
        self.batch = batch
        self.plan: StepPlan = batch.plan
        self.program = program
        self.stage = stage
        self.index = index
        self.trains = trains
        self.answered = frozenset(program.modalities).difference(frozen) if trains else frozenset()
        self.name = batch.epoch, batch.step
        self.ended: set[str] = set()
        self.executed: defaultdict[str, list[str]] = defaultdict(list)
        first = STAGES.index(stage) * _KINDS
        self.features, self.gradients = first + _FEATURES, first + _GRADIENTS
        self.report, self.notes = first + _REPORT, first + _NOTES

    def reserved_features(self, spec: FeatureSpec, published: int = 0) -> dict[Key, Reservation]:
        """What this encoder rank reserves in the pool, in the order in which it puts entries.

        Args:
            spec: what a row of features is.
            published: encoder batches below this number were published ahead of the step.
        """
        demand = self.program.pool_demand(spec).features
        if published:
            batches = self.program.encoder_batches.items()
            left = [entry for number, batch in batches if number >= published for entry in batch.entries]
            before = len(demand) - len(left)
            demand = {entry: Reservation(demand[entry].nbytes, demand[entry].released_after - before) for entry in left}
        return {Key(self.features, self.index, entry): reserved for entry, reserved in demand.items()}

    def reserved_gradients(self, spec: FeatureSpec) -> dict[Key, Reservation]:
        """What this backbone rank reserves in the pool, in the order in which it puts entries."""
        demand = self.program.pool_demand(spec).gradients
        if len(self.answered) < len(self.program.modalities):
            answered = [entry for entry in demand if self.plan.entries[entry].modality in self.answered]
            demand = {entry: Reservation(demand[entry].nbytes, number) for number, entry in enumerate(answered)}
        return {Key(self.gradients, self.index, entry): reserved for entry, reserved in demand.items()}


@dataclass(frozen=True)
class LaneContext:
    """What a lane works with.

    Attributes:
        pool: through which features and gradients pass.
        compute: runs the user's methods.
        page: tells the other ranks what this one is doing.
        timeline: records what was done when.
    """

    pool: Pool
    compute: Compute
    page: StatusPage
    timeline: Timeline

    def enter(self, phase: str, step: Step) -> None:
        """Tells the other ranks what this one does from now on.

        Args:
            phase: a few words; begins with ``"wait"`` where the rank only waits for others.
            step: the step that it belongs to.
        """
        self.page.enter(phase if step.stage == "train" else f"{phase} ({step.stage})", step.index)

    def hand_over(self, copies: CopyStream, tensors: Iterable[Tensor | None], lane: str, step: Step) -> None:
        """Lets the computing stream wait for tensors that come through the pool.

        The host, which was told of them when they were given to a device, goes on: so on a GPU this is where a lane
        waits for another rank.

        Args:
            copies: the stream that fetches the tensors.
            tensors: that are to be used.
            lane: which uses them.
            step: the step that runs.
        """
        if copies.is_late:
            start = self.timeline.start()
            copies.hand_over(tensors)
            self.timeline.stop(start, lane, STALL, "what comes through the pool", step.stage, step.index)


def run_schedule(context: LaneContext, lanes: Sequence[tuple[str, Schedule]], step: Step) -> None:
    """Runs the lanes of this rank to their end, in one thread.

    After every unit of work the first lane is asked again, so it has precedence. Where no lane can go on, the rank
    sleeps until something arrives from another rank.

    Args:
        context: what the lanes work with.
        lanes: role and lane, in order of precedence.
        step: the step that runs.
    """
    pool, running = context.pool, dict(lanes)
    pool.poll()
    while running:
        reasons: list[str] = []
        for role, schedule in list(running.items()):
            reason = next(schedule, _END)
            if reason is _END:
                del running[role]
                step.ended.add(role)
            if not isinstance(reason, str):
                pool.poll()
                break
            reasons.append(reason)
        else:
            _sleep(context, next(iter(running)), reasons, step)
    pool.settle()


def run_in_order(context: LaneContext, lanes: Mapping[str, Schedule], order: Iterable[str], step: Step) -> None:
    """Runs the lanes of this rank to their end, in one thread and in a fixed order.

    Args:
        context: what the lanes work with.
        lanes: role -> lane.
        order: the role whose lane does its next unit of work; all units of all lanes.
        step: the step that runs.
    """
    pool = context.pool
    pool.poll()
    for role in order:
        while (found := next(lanes[role])) is not Progress.UNIT:
            if isinstance(found, str):
                _sleep(context, role, [found], step)
            else:
                pool.poll()
        pool.poll()
    for role, schedule in lanes.items():
        assert next(schedule, _END) is _END, f"the {role} lane has more to do than its order has"
    pool.settle()


def _sleep(context: LaneContext, role: str, reasons: Sequence[str], step: Step) -> None:
    """Waits until something arrives from another rank.

    Args:
        context: what the lanes work with.
        role: whose lane counts the time as a stall.
        reasons: what the lanes of this rank wait for, its own first.
        step: the step that runs.
    """
    context.enter(f"wait for {' and '.join(reasons)}", step)
    start = context.timeline.start()
    while not context.pool.poll(_WAKE_SECONDS):
        pass
    context.timeline.stop(start, role, STALL, reasons[0], step.stage, step.index)


_END = object()
