"""One step of a stage as a rank sees it, and what the rank works with."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

from torch import Tensor

from flowtrain_lightning.compute.compute import Compute
from flowtrain_lightning.compute.copy_stream import CopyStream
from flowtrain_lightning.compute.feature_spec import FeatureSpecs
from flowtrain_lightning.data import StepBatch, StepPlan
from flowtrain_lightning.packing.stage_entries import hidden_modalities, hidden_states
from flowtrain_lightning.parallel.role_buffers import RoleBuffers
from flowtrain_lightning.pool import Key, Pool, Reservation, StatusPage
from flowtrain_lightning.runtime.program import StepProgram
from flowtrain_lightning.runtime.timeline import STALL, Timeline

STAGES = ("train", "val", "test", "predict")

OTHER_STEPS = (
    "Ranks are in different steps, so a hook has decided otherwise on this one: whether an epoch goes on "
    "(`on_train_batch_start` that returns -1), say. Decide alike on all ranks, by what they all know, such as the "
    "batch and `trainer.callback_metrics`, or by what `trainer.strategy.broadcast` gives."
)
"""Why something comes from another step than the rank's own, and what to do."""

_FEATURES, _GRADIENTS, _REPORT, _NOTES, _LOSSES, _KINDS = range(6)


class Step:
    """A step of one stage.

    Args:
        training: roles that train now, whether they have something to do in the step or not.

    Attributes:
        batch: this rank's part.
        plan: of the whole step.
        program: what this rank does in it.
        stage: one of ``STAGES``.
        index: counts the steps of this stage since the start of the run, alike on all ranks.
        unchanged: roles that encode and have no backwards, so that their features do not depend on the steps before.
        trained: roles that have backwards in the step.
        answered: modalities of the step to whose makers gradients go: to an encoder that trains, and to a trunk, or a
            stage of either, through which they reach weights that train, of its own or of an encoder.
        name: epoch and step within it, which name random streams.
        features: channel of the pool for features, whose keys go on with ``index`` and the number of the entry.
        gradients: channel for the gradients of features, with keys of the same form.
        report: channel on which ranks without the trunk find the step's report, under ``index``.
        losses: channel on which ranks of the trunk find the losses of roles behind it, under ``index`` and the role's
            number.
        notes: channel for what encoder ranks tell at the step's end, under a round and their number among all
            that encode.
        executed: role -> its forwards and backwards, in the order in which this rank ran them.
    """

    def __init__(
        self, batch: StepBatch, program: StepProgram, stage: str, index: int, training: Collection[str] = ()
    ) -> None:
        graph = batch.shard.members.graph
        self.batch = batch
        self.plan: StepPlan = batch.plan
        program = program.without_behind(graph) if stage == "predict" and graph.behind else program
        # A next token needs all stages, which come to a forward together then.
        trunks_own = hidden_states(graph.trunk)
        together = stage == "predict" and trunks_own in program.modalities
        self.program = program.without(trunks_own) if together else program
        self.stage = stage
        self.index = index
        encoders = [role for role in graph.producers if role in training]
        # What generates may train alone; then nothing of the trunk is kept, nor of any encoder.
        goes_back = not graph.behind or bool(encoders) or graph.trunk in training
        reached = [*encoders, *([graph.trunk] if goes_back else [])]
        self.trained = frozenset([*reached, *graph.behind] if stage == "train" else [])
        self.unchanged = frozenset(graph.producers) - self.trained
        inside = hidden_modalities(batch.shard.members)
        self.answered = frozenset(
            name
            for name in self.program.modalities
            if (inside[name] in self.trained if name in inside else graph.maker_of(name) in reached)
        )
        self.name = batch.epoch, batch.step
        self.executed: defaultdict[str, list[str]] = defaultdict(list)
        first = STAGES.index(stage) * _KINDS
        self.features, self.gradients = first + _FEATURES, first + _GRADIENTS
        self.report, self.notes, self.losses = first + _REPORT, first + _NOTES, first + _LOSSES

    def reserved_features(self, specs: FeatureSpecs, role: str, begun: int = 0) -> dict[Key, Reservation]:
        """Reservations for the rows that a role of this rank makes, in the order in which it puts entries.

        Args:
            specs: what a row of features of each modality is.
            role: whose batches make them.
            begun: batches below this place were published ahead of the step.
        """
        demand = self.program.pool_demand(specs).features[role]
        if begun:
            batches = self.program.roles[role].batches.items()
            left = [made.entry for place, batch in batches if place >= begun for made in batch.made]
            before = len(demand) - len(left)
            demand = {entry: Reservation(demand[entry].nbytes, demand[entry].released_after - before) for entry in left}
        return {Key(self.features, self.index, entry): reserved for entry, reserved in demand.items()}

    def reserved_gradients(self, specs: FeatureSpecs, role: str) -> dict[Key, Reservation]:
        """Reservations for the gradients that a role of this rank gives back, in the order in which it puts entries."""
        demand = self.program.pool_demand(specs).gradients[role]
        if len(self.answered) < len(self.program.modalities):
            read = (each for batch in self.program.roles[role].batches.values() for each in batch.read)
            modality = {(each.entry, each.part): each.modality for each in read}
            answered = [part for part in demand if modality[part] in self.answered]
            demand = {part: Reservation(demand[part].nbytes, number) for number, part in enumerate(answered)}
        return {Key(self.gradients, self.index, *part): reserved for part, reserved in demand.items()}


@dataclass(frozen=True)
class RankContext:
    """The parts that a rank works with.

    Attributes:
        pool: through which rows and their gradients pass.
        compute: runs the user's methods.
        page: tells the other ranks what this one is doing.
        timeline: records what was done when.
        members: role -> the ranks of each of its members.
        uncounted: inside, the user's own metrics of torchmetrics count nothing.
    """

    pool: Pool
    compute: Compute
    page: StatusPage
    timeline: Timeline
    members: Mapping[str, Sequence[tuple[int, ...]]]
    uncounted: Callable[[], AbstractContextManager[None]] = nullcontext

    def enter(self, phase: str, step: Step) -> None:
        """Tells the other ranks what this one does from now on.

        Args:
            phase: a few words; begins with ``"wait"`` where the rank only waits for others.
            step: the step that it belongs to.
        """
        self.page.enter(phase if step.stage == "train" else f"{phase} ({step.stage})", step.index)

    @contextmanager
    def leaving_nothing(self, buffers: RoleBuffers) -> Iterator[None]:
        """Inside, a forward that only other ranks need counts in no metric, and what it writes into buffers is lost."""
        with self.uncounted(), buffers.again(buffers.found()):
            yield

    def hand_over(self, copies: CopyStream, tensors: Iterable[Tensor | None], role: str, step: Step) -> None:
        """Lets the computing stream wait for tensors that come through the pool.

        The host, which was told of them when they were given to a device, goes on: so on a GPU this is where a rank
        waits for another one.

        Args:
            copies: the stream that fetches the tensors.
            tensors: that are to be used.
            role: whose work uses them.
            step: the step that runs.
        """
        if copies.is_late:
            start = self.timeline.start()
            copies.hand_over(tensors)
            self.timeline.stop(start, role, STALL, "what comes through the pool", step.stage, step.index)
