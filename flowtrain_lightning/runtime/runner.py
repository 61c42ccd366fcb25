"""The course of a step on one rank: its works over the pool, the report, and the gradients that they leave."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any, NamedTuple

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn

from flowtrain_lightning.compute.bound_to_step import bound_to_step
from flowtrain_lightning.compute.compute import Compute
from flowtrain_lightning.compute.joint_losses import JointLosses
from flowtrain_lightning.compute.step_metrics import StepReport
from flowtrain_lightning.compute.whole_module import refuse_accumulation
from flowtrain_lightning.data import StepBatch
from flowtrain_lightning.module import FlowModule
from flowtrain_lightning.parallel import HalfEngine
from flowtrain_lightning.parallel.engine import StepRecord
from flowtrain_lightning.parallel.halves import half_parameters, role_of
from flowtrain_lightning.parallel.ranks.random_streams import own_streams
from flowtrain_lightning.parallel.role_buffers import RoleBuffers
from flowtrain_lightning.pool import PoolCounters
from flowtrain_lightning.runtime.activation_count import ActivationCount
from flowtrain_lightning.runtime.encoder_checks import (
    FrozenEncoder,
    UnusedFeatures,
    refuse_unsaved,
    refuse_written_by_one_role,
)
from flowtrain_lightning.runtime.epoch_metrics import EpochMetricSync
from flowtrain_lightning.runtime.executor import Executor, RolePart
from flowtrain_lightning.runtime.job import Job
from flowtrain_lightning.runtime.pool_capacity import PoolCapacity, PoolSettings
from flowtrain_lightning.runtime.program import StepProgram
from flowtrain_lightning.runtime.program_of_plan import make_program
from flowtrain_lightning.runtime.rank_metrics import BatchTimes, RankMetrics
from flowtrain_lightning.runtime.role_methods import BackboneMethod, EncoderMethod, GeneratorMethod
from flowtrain_lightning.runtime.step import STAGES, RankContext, Step
from flowtrain_lightning.runtime.step_end import Note, StepEnd
from flowtrain_lightning.runtime.timeline import COMMUNICATION, STALL, DeviceClock, Timeline
from flowtrain_lightning.runtime.working_ahead import AheadAlone, AheadTogether, LaterSteps, WorkAhead

_log = logging.getLogger("lightning.pytorch")  # whose messages of ranks other than 0 are shown, too


class BegunAhead(NamedTuple):
    """A step that ranks may have begun before its turn.

    Attributes:
        name: of the step.
        roles: those that may have made features for it.
    """

    name: tuple[int, int]
    roles: frozenset[str]


class RoleRunner:
    """The steps of one rank.

    Args:
        module: trains.
        trainer: whose steps these are.
        job: the calling rank's.
        engines: role -> what its layout does around forwards and backwards, for the roles of this rank.
        encoder_activations: encoder batches per rank whose activations are kept for the backward; others are
            recomputed.
        pool: what the user wants of the pool.

    Attributes:
        trainer: whose steps these are.
        trunk: the role that reads features and computes the loss.
        timeline: what was done when.
        stop_requested: some rank was asked to end (SIGTERM); known to all ranks after the same step.
        collects_timings: reports of training steps have notes of how long everything took.
        metrics_every: after so many training steps, the report has notes of `RankMetrics`; 0 is never.
        report: of the training step that ended last, equal on all ranks.
        activations: what batches keep for backwards, where that is limited.
    """

    def __init__(
        self,
        module: FlowModule,
        trainer: L.Trainer,
        job: Job,
        engines: Mapping[str, HalfEngine],
        encoder_activations: int,
        pool: PoolSettings,
    ) -> None:
        self.trainer = trainer
        self.timeline = Timeline(DeviceClock.of(trainer.strategy.root_device))
        self.stop_requested = False
        self.collects_timings = False
        self.metrics_every = 0
        self.report = StepReport(0.0, 0.0, False)
        self._module = module
        self._job = job
        self._page = job.mesh.page
        ranks, layouts, encoders = job.allocation.ranks, job.allocation.layouts, job.allocation.producers
        limits = [limit for role in encoders if (limit := layouts[role].most_kept_forwards) is not None]
        self._encoder_activations = min(encoder_activations, *limits) if limits else encoder_activations
        self.trunk = job.allocation.trunk
        self._behind = job.allocation.graph.behind
        self._roles = tuple(role for role in (self.trunk, *self._behind, *encoders) if role in job.roles)
        self._encoder = next((role for role in encoders if role in self._roles), None)
        encode = dict.fromkeys(rank for role in encoders for rank in ranks[role] if rank not in ranks[self.trunk])
        generate = dict.fromkeys(rank for role in self._behind for rank in ranks[role] if rank not in ranks[self.trunk])
        self._listeners = [*(encode | generate)]
        self._frozen_works_ahead = bool(encode) and job.allocation.works_ahead and _may_work_ahead(module, trainer)
        self._engines = {role: engines[role] for role in self._roles}
        device = trainer.strategy.root_device
        # Where roles share a default group, all of its ranks ask for the groups of all roles.
        asked = job.allocation.roles if job.allocation.placement == "mixed" else self._roles
        groups = {role: job.groups.between_steps(role, layouts[role].pipeline) for role in asked}
        self._buffers = {role: RoleBuffers(module, role, groups[role], device) for role in self._roles}
        self._in_lockstep = [role for role, engine in self._engines.items() if engine.in_lockstep]
        self._parameters = list(module.parameters())
        # Without memory on a rank that does not encode.
        self._of_roles = {role: half_parameters(module, role) for role in job.allocation.roles}
        self._losses = JointLosses(module)
        self.activations = ActivationCount(job)
        # Where weights are gathered and given back, casts that are kept would stay in their place.
        whole = [role for role in self._roles if not layouts[role].gathers_weights]
        trading = [role for role in self._roles if layouts[role].expert > 1 or layouts[role].context > 1]
        self._compute = Compute(module, trainer, device, self._engines, keeps_casts=whole, trading=trading)
        self._capacity = PoolCapacity(module, job, self._compute, self.timeline, pool)
        behind = {role: self._compute.metrics_behind[role] for role in self._behind}
        self._step_end = StepEnd(job, self._listeners, self._compute.metrics, behind, self._losses)
        self._epoch_metrics = EpochMetricSync(job)
        self._rank_metrics = RankMetrics.of(job, self.timeline, module)
        self._batch_times = BatchTimes(self.timeline)
        self._frozen = FrozenEncoder(module, self._buffers)
        self._unused_features = {role: UnusedFeatures() for role in encoders if job.rank == ranks[role][0]}
        self._indices = dict.fromkeys(STAGES, 0)
        self._ahead: dict[str, BegunAhead | None] = {}  # stage -> the step that may have been begun
        self._later: LaterSteps | None = None

    # ---- what FlowModule calls ----------------------------------------------------------------------------------

    def training_step(self, batch: StepBatch, batch_idx: int) -> Tensor:
        """Forward and backward of this rank's part; gradients end up final, the mean loss is returned."""
        refuse_accumulation(self.trainer)  # a hook may have asked for it since
        if self._indices["train"] == 0 and self._job.rank == 0:
            refuse_unsaved(self._module)
        training = self._training_roles()
        step, context = self._begin(batch, "train", training)
        for parameter in self._parameters:
            parameter.grad = None
        for engine in self._engines.values():
            engine.begin_step()
        self._compute.zeros.begin_step()
        with own_streams():
            self._run_works(step, context, [])
            # Before the report: a rank that waits in a sum for this one may not come to the report until it has it.
            for engine in self._engines.values():  # the backbone's first, on every rank
                engine.send_gradients()
            note = self._note(step) if self.collects_timings or self.metrics_every else None
            report = self._end(step, context, batch_idx, note)
            self.activations.agree(step, self.trainer.train_dataloader)
        context.enter("wait for the sum of the gradients", step)
        start = self.timeline.start()
        self._losses.refuse_other_counts(step.plan, report, self._compute.patch_dims)
        for engine in self._engines.values():
            engine.finish_gradients(self._losses.scale(report))
        for buffers in self._buffers.values():
            buffers.balance_experts()
        self.timeline.stop(start, self._roles[0], COMMUNICATION, "reduce gradients", "train", step.index)
        for role, unused in self._unused_features.items():
            if role in training and step.executed[role]:
                unused.look(self._engines[role].parameters)
        self.report, self.stop_requested = report, report.stop
        context.enter("between steps", step)
        return self._module.log_report("train", report)

    def evaluation_step(self, batch: StepBatch, batch_idx: int, stage: str) -> Tensor:
        """Forward of this rank's part; the mean loss is returned."""
        step, context = self._begin(batch, stage)
        with own_streams():
            self._run_works(step, context, [])
            report = self._end(step, context, batch_idx, None)
        self.stop_requested = self.stop_requested or report.stop
        context.enter("between steps", step)
        return self._module.log_report(stage, report)

    def predict_step(self, batch: StepBatch, batch_idx: int) -> list[Any]:
        """Returns the results of ``backbone_step`` for this rank's microbatches; ``[]`` on an encoder rank."""
        step, context = self._begin(batch, "predict")
        outputs: list[Any] = []
        with own_streams():
            self._run_works(step, context, outputs)
        context.enter("between steps", step)
        return outputs

    def gradient_norm(self, parameters: list[nn.Parameter]) -> Tensor:
        """The 2-norm of the gradients of all halves; on their device, where this rank has all halves that train."""
        given = {id(parameter) for parameter in parameters}
        squares: dict[str, Tensor] = {}  # of this rank's roles, and equal on all ranks of each
        for role, engine in self._engines.items():
            gradients = [p.grad for p in engine.parameters if p.grad is not None and id(p) in given]
            squares[role] = engine.squared_norm(gradients)
        elsewhere = [role for role in self._training_roles() if role != self.trunk]
        if not self._listeners or not elsewhere:
            return sum(squares.values(), torch.zeros((), dtype=torch.float64)).sqrt()
        roles, ranks = self._job.allocation.roles, self._job.allocation.ranks
        spoken = torch.zeros(len(roles), dtype=torch.float64)
        for role, square in squares.items():
            if self._job.rank == ranks[role][0]:
                spoken[roles.index(role)] = square.item()  # to other ranks it goes through the host
        return self._job.groups.cross.all_reduce(spoken).sum().sqrt()

    def agree_on_logged(self, name: str, value: Any) -> float:
        """The value that rank 0 logged outside of a step, on every rank, which all call it."""
        return self._epoch_metrics.agree(name, value)

    # ---- what strategy and callbacks ask ------------------------------------------------------------------------

    def prepare(self, batch: StepBatch) -> StepProgram:
        """This rank's work in a step; asked for ahead of it, in the loader's thread."""
        program = make_program(batch.plan, batch.shard, self._encoder_activations, self.activations.row_bytes)
        if self._compute.specs.keys() >= set(program.modalities):
            program.pool_demand(self._compute.specs)
        return program

    @property
    def pool_counters(self) -> PoolCounters | None:
        """Counters of this rank's part of the pool since it was opened last; None before the first step."""
        return self._capacity.counters

    def close(self) -> None:
        """Gives the pool's memory back."""
        self._capacity.close()

    # ---- the course of a step -----------------------------------------------------------------------------------

    def _begin(self, batch: StepBatch, stage: str, training: Collection[str] = ()) -> tuple[Step, RankContext]:
        self._page.begin_step()
        self.timeline.settle()
        program = batch.program or self.prepare(batch)
        if stage == "train" and self.activations.outdate(program, training):
            program = self.prepare(batch)
        step = Step(batch, program, stage, self._indices[stage], training)
        self._indices[stage] += 1
        self._page.enter("begin the step", step.index)
        # Features that encoder ranks have published for later steps are void where the rest of an epoch is skipped,
        # and where an encoder that made some begins to train.
        ahead = self._ahead.get(stage)
        changes_course = ahead is not None and (step.name != ahead.name or not step.unchanged.issuperset(ahead.roles))
        if ahead is not None and not changes_course:
            self._frozen.refuse_changes(stage)
        for buffers in self._buffers.values():
            buffers.share()
        opened = self._capacity.ensure_capacity(step, anew=changes_course)
        context = self._capacity.context
        assert context is not None
        if opened and self._encoder is not None:
            self._later = LaterSteps(context, self._encoder_part(context, self._encoder), self._encoder)
        return step, context

    def _encoder_part(self, context: RankContext, role: str) -> RolePart:
        method = EncoderMethod(context, role, meets_in_forwards=self._job.allocation.layouts[role].meets_in_forwards)
        again = partial(self.activations.again, role)
        return RolePart(method, self._buffers[role], speaks=self._job.is_first(role), again=again)

    def _trunk_part(self, context: RankContext, predictions: list[Any]) -> RolePart:
        stage = self._module.held_stages.get(self.trunk)
        speaks, counts = self._job.is_first(self.trunk), self._job.is_first_tensor_rank(self.trunk)
        counts = counts and (stage is None or stage.is_last)
        answers = speaks and (stage is None or stage.stage == 0)
        method = BackboneMethod(context, predictions, speaks=answers, counts=counts, losses=self._losses)
        # Context ranks have slices of the hidden states, of which each hands on its own.
        speaks = speaks if stage is None else self._job.is_first_tensor_rank(self.trunk)
        again = partial(self.activations.again, self.trunk)
        return RolePart(method, self._buffers[self.trunk], speaks=speaks, again=again)

    def _part(self, context: RankContext, role: str, predictions: list[Any]) -> RolePart:
        if role == self.trunk:
            return self._trunk_part(context, predictions)
        if role not in self._behind:
            return self._encoder_part(context, role)
        method = GeneratorMethod(context, role, self._losses, counts=self._job.is_first_tensor_rank(role))
        return RolePart(method, self._buffers[role], speaks=self._job.is_first(role))

    def _run_works(self, step: Step, context: RankContext, predictions: list[Any]) -> None:
        if step.stage == "train":
            for buffers in self._buffers.values():
                buffers.note()
        skipped = self._behind if step.stage == "predict" else ()
        parts = {role: self._part(context, role, predictions) for role in self._roles if role not in skipped}
        begun = {} if self._encoder is None or self._later is None else {self._encoder: self._later.take(step)}
        Executor(context, parts, step, begun).run()
        self._compute.end_step()
        if step.stage == "train":
            self._look_at_buffers(step)
        for role in self._in_lockstep:
            engine = self._engines[role]
            record = self._compute.zeros.recorded(role, engine) if step.stage == "train" else StepRecord()
            for number in self._step_end.compare(step, role, record):
                engine.parameters[number].grad = None

    def _look_at_buffers(self, step: Step) -> None:
        """Says, on the first rank of a role, that its forwards write buffers.

        Raises:
            ValueError: they write one of no half, which ranks without the role have too, and rank 0 saves.
        """
        for role, buffers in self._buffers.items():
            written = buffers.look() if step.executed[role] else []
            ranks, halves = self._job.allocation.ranks, self._module.halves
            if role != self.trunk and not {*ranks[self.trunk]} <= {*ranks[role]}:
                refuse_written_by_one_role(role, [name for name in written if role_of(name, halves) is None])
            if written and self._job.is_first(role):
                _log.info(
                    f"flowtrain: forwards of the {role} write buffers, such as {written[0]!r}. Every step begins with "
                    "those of the role's first rank, which follow its samples, so they differ a little between layouts."
                )

    def _end(self, step: Step, context: RankContext, batch_idx: int, note: Note | None) -> StepReport:
        works_ahead = self._frozen_works_ahead and bool(step.unchanged)
        steps_left = self._steps_left(step.stage, batch_idx) if works_ahead else 0
        following = BegunAhead((step.name[0], step.name[1] + 1), step.unchanged) if steps_left > 0 else None
        self._ahead[step.stage] = following
        if following is not None:
            self._frozen.note(step.stage, following.roles)
        if self.trunk in self._roles:
            return self._step_end.agree(context, step, note)
        works_ahead = following is not None and self._encoder in following.roles
        work_ahead = self._work_ahead(step, context, steps_left) if works_ahead else None
        return self._step_end.receive(context, step, note, work_ahead)

    def _work_ahead(self, step: Step, context: RankContext, steps_left: int) -> WorkAhead:
        """Works ahead on this encoder rank until the step has ended."""

        def later(distance: int) -> Step | None:
            following = step.batch.following(distance)
            if following is None:
                return None
            program = following.program or self.prepare(following)
            return Step(following, program, step.stage, step.index + distance)

        ahead, buffers = self._later, self._buffers[str(self._encoder)]
        assert ahead is not None

        def fits(step: Step, place: int) -> bool:
            return buffers.may_work_ahead and ahead.fits(step, place)

        find = partial(ahead.find, later, steps_left)
        if self._encoder not in self._in_lockstep:
            return AheadAlone(find, fits, ahead.publish)
        return AheadTogether(find, fits, ahead.publish, partial(self._vote, context, step))

    def _vote(self, context: RankContext, step: Step, votes: Tensor) -> Tensor:
        """The sum of what the encoder ranks say."""
        assert self._encoder is not None
        context.enter("wait for the other encoder ranks", step)
        start = self.timeline.start()
        self._job.groups.sum_over_role(self._encoder, votes)
        self.timeline.stop(start, self._encoder, STALL, "other encoder ranks", step.stage, step.index)
        return votes

    def _note(self, step: Step) -> Note | None:
        """This rank's report of a training step; None where nobody wants to know."""
        note: Note = {}
        wants_metrics = self.metrics_every > 0 and (self.trainer.global_step + 1) % self.metrics_every == 0
        if self.collects_timings:
            note["timings"] = self._batch_times.take(step)
        if wants_metrics:
            pace = getattr(self.trainer.train_dataloader, "pace", None)
            note["metrics"] = self._rank_metrics.take(self.pool_counters, pace)
        return note if self.collects_timings or wants_metrics else None

    def _training_roles(self) -> list[str]:
        """The roles that train now: a callback may freeze them between steps."""
        return [role for role, weights in self._of_roles.items() if any(w.requires_grad for w in weights)]

    def _steps_left(self, stage: str, batch_idx: int) -> int:
        trainer = self.trainer
        if stage == "train":
            left = trainer.num_training_batches - batch_idx - 1
            if trainer.max_steps >= 0:
                left = min(left, trainer.max_steps - trainer.global_step - 1)
        else:
            counts = (
                trainer.num_test_batches
                if stage == "test"
                else (trainer.num_sanity_val_batches if trainer.sanity_checking else trainer.num_val_batches)
            )
            left = min(counts) - batch_idx - 1
        return int(min(left, 1 << 30))


def _may_work_ahead(module: FlowModule, trainer: L.Trainer) -> bool:
    bound = bound_to_step(module, trainer.datamodule, trainer.callbacks)  # type: ignore[attr-defined]
    if bound is not None:
        rank_zero_info(f"flowtrain: nothing is encoded before its step: {bound}.")
    return bound is None
