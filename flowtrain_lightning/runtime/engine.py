"""Runs the steps of one rank under flowtrain: its lanes over the pool, and the gradients that they leave."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from flowtrain_lightning.allocator.roles import BACKBONE, ENCODER
from flowtrain_lightning.compute.compute import Compute
from flowtrain_lightning.compute.step_metrics import StepReport
from flowtrain_lightning.data import StepBatch
from flowtrain_lightning.parallel import reduce_gradients
from flowtrain_lightning.parallel.halves import half_parameters, half_trains
from flowtrain_lightning.parallel.random_streams import own_streams
from flowtrain_lightning.pool import PoolCounters
from flowtrain_lightning.pool.device.choice import TierChoice
from flowtrain_lightning.pool.ways import NetworkChoice
from flowtrain_lightning.runtime.backbone_lane import BackboneLane
from flowtrain_lightning.runtime.encoder_lane import EncoderLane
from flowtrain_lightning.runtime.figures import Figures, RankMetricsTaker
from flowtrain_lightning.runtime.frozen import FrozenEncoder
from flowtrain_lightning.runtime.job import Job
from flowtrain_lightning.runtime.lane import Schedule, run_schedule
from flowtrain_lightning.runtime.news import News
from flowtrain_lightning.runtime.reporting import Reporter
from flowtrain_lightning.runtime.room_keeper import PoolCapacity
from flowtrain_lightning.runtime.step import STAGES, Step, figures_key
from flowtrain_lightning.runtime.timeline import COMMUNICATION, Timeline
from flowtrain_lightning.runtime.times import Times
from flowtrain_lightning.runtime.unused_features import UnusedFeatures
from flowtrain_lightning.trainer.epoch_metrics import EpochMetricSync

if TYPE_CHECKING:
    import lightning as L

    from flowtrain_lightning.module import FlowModule


@dataclass(frozen=True)
class RunnerSettings:
    """What a user may bound.

    Attributes:
        encoder_activations: encoder batches per rank whose activations are kept for the backward; others are
            recomputed.
        pool_bytes: bytes of the pool on each rank; None lets it follow from the plan.
        pool_tier: which memory its entries may use.
        pool_network: how they pass between hosts.
    """

    encoder_activations: int
    pool_bytes: int | None
    pool_tier: TierChoice
    pool_network: NetworkChoice


class RoleRunner:
    """The steps of one rank.

    Attributes:
        timeline: what the lanes did when.
        stop_requested: some rank was asked to end (SIGTERM); known to all ranks after the same step.
        collects_timings: reports of training steps say how long everything took.
        times: those of the training step that ended last, equal on all ranks.
    """

    def __init__(
        self,
        module: FlowModule,
        trainer: L.Trainer,
        job: Job,
        settings: RunnerSettings,
    ) -> None:
        self.trainer = trainer
        self.timeline = Timeline()
        self.stop_requested = False
        self.collects_timings = False
        self.times: Times = {}
        self._module = module
        self._allocation = job.allocation
        self._groups = job.groups
        self._mesh = job.mesh
        self._settings = settings
        self._roles = tuple(role for role in (BACKBONE, ENCODER) if role in job.roles)
        self._listeners = [r for r in job.allocation.ranks[ENCODER] if r not in job.allocation.ranks[BACKBONE]]
        first = job.allocation.ranks[BACKBONE][0]
        self._figures_news = News(job.groups, job.mesh, self._listeners, first, figures_key)
        self._figures_told = 0
        lanes = {role: f"{role} {job.allocation.ranks[role].index(job.rank)}" for role in self._roles}
        self._figures = RankMetricsTaker(lanes, job.labels[job.rank], self.timeline)
        self._compute = Compute(module, trainer, trainer.strategy.root_device)
        self._room = PoolCapacity(
            module, job, self._compute, self.timeline, settings.pool_bytes, settings.pool_tier, settings.pool_network
        )
        self._reporter = Reporter(job, self._listeners, self._compute.logbooks, self._room, self.timeline)
        self._logged = EpochMetricSync(job)
        self._frozen = FrozenEncoder(module)
        self._unused_features = UnusedFeatures()
        self._indices = dict.fromkeys(STAGES, 0)
        self._ahead: dict[str, tuple[int, int] | None] = {}

    # ---- what FlowModule calls ----------------------------------------------------------------------------------

    def training_step(self, batch: StepBatch, batch_idx: int) -> Tensor:
        """Forward and backward of this rank's part; gradients end up final, the mean loss is returned."""
        step = self._begin(batch, "train")
        self._module.zero_grad(set_to_none=True)
        with own_streams():
            self._run_lanes(step, [])
            report = self._end(step, self._steps_left("train", batch_idx))
        with self.timeline.span(self._roles[0], COMMUNICATION, "reduce gradients", step.place):
            self._enter("wait for the sum of the gradients", step)
            for role in self._roles:
                reduce_gradients(half_parameters(self._module, role), 1 / max(report.tokens, 1))
        if step.trains and step.plan.entries and self._groups.cross.rank == self._allocation.ranks[ENCODER][0]:
            self._unused_features.look(half_parameters(self._module, ENCODER))
        self.stop_requested, self.times = report.stop, report.times
        self._enter("between steps", step)
        return self._module.log_report("train", report)

    def evaluation_step(self, batch: StepBatch, batch_idx: int, stage: str) -> Tensor:
        """Forward of this rank's part; the mean loss is returned."""
        step = self._begin(batch, stage)
        with own_streams():
            self._run_lanes(step, [])
            report = self._end(step, self._steps_left(stage, batch_idx))
        self.stop_requested = self.stop_requested or report.stop
        self._enter("between steps", step)
        return self._module.log_report(stage, report)

    def predict_step(self, batch: StepBatch, batch_idx: int) -> list[Any]:
        """What ``backbone_step`` returns for this rank's microbatches; ``[]`` on an encoder rank."""
        step = self._begin(batch, "predict")
        outputs: list[Any] = []
        with own_streams():
            self._run_lanes(step, outputs)
        self._enter("between steps", step)
        return outputs

    def gradient_norm(self, parameters: list[nn.Parameter]) -> Tensor:
        """The 2-norm of the gradients of both halves."""
        own = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        if not self._listeners or not half_trains(self._module, ENCODER):
            return own
        # Gradients are equal on all ranks of a role, so one rank speaks for it.
        speaks = self._groups.role_rank == 0
        squares = torch.tensor([float(own.double()) ** 2 if speaks else 0.0], dtype=torch.float64)
        return self._groups.cross.all_reduce(squares).sqrt().to(own)[0]

    def agree_on_logged(self, name: str, value: Any) -> float:
        """The value that rank 0 logged outside of a step, on every rank, which all call it."""
        return self._logged.agree(name, value)

    def gather_metrics(self, batch: StepBatch) -> Figures:
        """Tells what this rank did since it told last. Every rank calls it after the same steps.

        Args:
            batch: of the step that has ended.

        Returns:
            On backbone ranks the latest figures of all ranks that have arrived; elsewhere nothing.
        """
        own, number, pool = self._figures.take(self.pool_counters), self._figures_told, self._room.desk.pool
        self._figures_told += 1
        if BACKBONE in self._roles:
            figures: Figures = {}
            for told in self._figures_news.gather(number, own, pool):
                figures |= told  # later ones of a rank take the place of earlier ones
            return figures
        assert batch.shard.encoder_rank is not None
        self._figures_news.send(number, batch.shard.encoder_rank, own, pool)
        return {}

    @property
    def pool_counters(self) -> PoolCounters | None:
        """What this rank's part of the pool has done since it was opened last; None before the first step."""
        return self._room.counters

    def close(self) -> None:
        """Gives the pool's memory back."""
        self._room.close()

    # ---- the course of a step -----------------------------------------------------------------------------------

    def _begin(self, batch: StepBatch, stage: str) -> Step:
        trains = stage == "train" and half_trains(self._module, ENCODER)
        step = Step(batch, stage, self._indices[stage], trains)
        self._indices[stage] += 1
        self._mesh.page.begin_step()
        self._enter("begin the step", step)
        anew = self._changes_course(step)
        if self._ahead.get(stage) is not None and not anew:
            self._frozen.refuse_changes(stage)
        if self._room.ensure_capacity(step, anew=anew):
            desk, ranks = self._room.desk, self._allocation.ranks
            self._backbone_lane = BackboneLane(desk, ranks[ENCODER])
            self._encoder_lane = EncoderLane(desk, ranks[BACKBONE], self._settings.encoder_activations)
        return step

    def _changes_course(self, step: Step) -> bool:
        """Whether encoder ranks may hold or have published features for later steps that are void now.

        So it is when the rest of an epoch is skipped, and when a frozen encoder begins to train.
        """
        ahead = self._ahead.get(step.stage)
        return ahead is not None and (step.trains or step.name != ahead)

    def _run_lanes(self, step: Step, outputs: list[Any]) -> None:
        lanes: list[tuple[str, Schedule]] = []
        spec = self._room.spec if step.plan.entries else None
        if BACKBONE in self._roles:
            lanes.append((BACKBONE, self._backbone_lane.run(step, spec, outputs)))
        if ENCODER in self._roles:
            lanes.append((ENCODER, self._encoder_lane.run(step, spec)))
        run_schedule(self._room.desk, lanes, step)

    def _end(self, step: Step, steps_left: int) -> StepReport:
        epoch, number = step.name
        may_work_ahead = self._listeners and not step.trains and steps_left > 0
        self._ahead[step.stage] = (epoch, number + 1) if may_work_ahead else None
        if may_work_ahead:
            self._frozen.note(step.stage)
        with_times = self.collects_timings and step.stage == "train"
        if BACKBONE in self._roles:
            return self._reporter.agree(step, with_times=with_times)
        spec = None if step.trains else self._room.spec

        def work_ahead() -> bool:
            return spec is not None and self._encoder_lane.work_ahead(step, spec, steps_left)

        return self._reporter.receive(step, work_ahead, with_times=with_times)

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

    def _enter(self, phase: str, step: Step) -> None:
        self._mesh.page.enter(step.phase(phase), step.index)
