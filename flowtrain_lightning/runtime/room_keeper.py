"""Sees to it that each step finds room in the pool: opens it, and a larger one when a step needs more."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from lightning.pytorch.utilities import rank_zero_info

from flowtrain_lightning.allocator.roles import ENCODER
from flowtrain_lightning.compute.compute import Compute
from flowtrain_lightning.data import PackedMedia
from flowtrain_lightning.parallel.random_streams import own_streams
from flowtrain_lightning.pool import (
    DeviceTier,
    NetworkChoice,
    Pool,
    PoolCounters,
    PoolError,
    TierChoice,
    choose_device_tier,
)
from flowtrain_lightning.runtime.job import Job
from flowtrain_lightning.runtime.lane import LaneContext
from flowtrain_lightning.runtime.room import LEAST_PART, FeatureSpec, least_room, step_room
from flowtrain_lightning.runtime.step import Step
from flowtrain_lightning.runtime.timeline import Timeline

if TYPE_CHECKING:
    from flowtrain_lightning.module import FlowModule


class PoolCapacity:
    """One rank's part of the pool, from step to step. All ranks decide alike, from the plan.

    Args:
        module: encodes one batch, to find out what a row of features is.
        job: the calling rank's.
        compute: runs the user's methods.
        timeline: of the calling rank.
        pool_bytes: bytes of the pool on each rank; None lets it follow from the plan.
        pool_tier: which memory its entries may use.
        pool_network: how they pass between hosts.

    Attributes:
        spec: what a row of features is; None until a step has media.
    """

    def __init__(
        self,
        module: FlowModule,
        job: Job,
        compute: Compute,
        timeline: Timeline,
        pool_bytes: int | None,
        pool_tier: TierChoice,
        pool_network: NetworkChoice,
    ) -> None:
        self.spec: FeatureSpec | None = None
        self._module = module
        self._job = job
        self._compute = compute
        self._timeline = timeline
        self._pool_bytes = pool_bytes
        self._pool_tier = pool_tier
        self._pool_network = pool_network
        self._part_bytes = 0
        self._desk: LaneContext | None = None
        self._last_counters: PoolCounters | None = None
        self._tier: DeviceTier | None = None

    @property
    def desk(self) -> LaneContext:
        """What lanes work with, since the first step found its room."""
        assert self._desk is not None, "no step has asked for room yet"
        return self._desk

    @property
    def counters(self) -> PoolCounters | None:
        """What this rank's part of the pool has done since it was opened last; None before the first step."""
        return self._last_counters if self._desk is None else self._desk.pool.counters

    def ensure_capacity(self, step: Step, anew: bool) -> bool:
        """Opens the pool where the step needs more than there is.

        Args:
            step: that begins.
            anew: open it in any case, so that all that was published is void.

        Returns:
            Whether there is another desk now.

        Raises:
            PoolError: ``pool_bytes`` is too little for this step; the text says how much would do.
        """
        if step.plan.entries and self.spec is None:
            self.spec = self._compute.spec = self._agree_on_spec(step)
        needed = least_room(step.plan, self.spec) if step.plan.entries and self.spec else 0
        if self._desk is None or needed > self._part_bytes:
            self._part_bytes = self._choose_bytes(step, needed)
        elif not anew:
            return False
        self._open(step)
        return True

    def close(self) -> None:
        """Gives the pool's memory back."""
        if self._desk is not None:
            self._last_counters = self._desk.pool.counters
            self._desk.pool.close()
            self._desk = None
        if self._tier is not None:
            self._tier.close()
            self._tier = None

    def _choose_bytes(self, step: Step, needed: int) -> int:
        """Bytes of each half of the pool."""
        limit = self._pool_bytes
        if limit is not None and needed > limit // 2:
            raise PoolError(
                f"The largest encoder batch of this step takes {needed:,} bytes of features, but pool_bytes={limit:,} "
                f"leaves {limit // 2:,} for the running step. Set FlowTrainStrategy(pool_bytes={2 * needed:,}) or "
                "more, or a smaller token_budget."
            )
        wanted = step_room(step.plan, self.spec) if step.plan.entries and self.spec else 0
        # What is reserved stands apart, so that beside it there is room for the whole step.
        chosen = limit // 2 if limit is not None else max(needed + wanted, LEAST_PART)
        rank_zero_info(
            f"flowtrain: a pool of {2 * chosen:,} bytes on each rank, half for the features of the running "
            f"step, half for gradients or work ahead. This step has {wanted:,} bytes of features on the busiest "
            f"encoder rank; pool_bytes={2 * needed:,} is the least with which it cannot block."
        )
        return chosen

    def _open(self, step: Step) -> None:
        former, page = self._desk, self._job.mesh.page
        page.enter(step.phase("wait for all ranks to open the pool"), step.index)
        room, tier = self._part_bytes, self._open_tier()
        pool = Pool.open(self._job.mesh, room, room, self._pool_network, tier)
        self._desk = LaneContext(pool, self._compute, page, self._timeline)
        if former is not None:
            former.pool.close()

    def _open_tier(self) -> DeviceTier | None:
        """Device memory for entries, where ranks compute on GPUs. Opened with the first pool and kept for all later."""
        if self._tier is None:
            # As much as one half of the pool: a rank with one role uses one half, and what is too much goes through
            # host memory, where there is room for everything.
            device = self._compute.device
            self._tier = choose_device_tier(self._pool_tier, self._job.mesh, device, self._part_bytes)
            if self._tier is not None:
                rank_zero_info(f"flowtrain: {self._tier.sentence}")
        return self._tier

    def _agree_on_spec(self, step: Step) -> FeatureSpec:
        """What a row of features is, found by encoding the first batch of the first rank that has one."""
        encoder_rank = min(entry.encoder_rank for entry in step.plan.entries)
        source = self._job.allocation.ranks[ENCODER][encoder_rank]
        spec = None
        if self._job.rank == source:
            media = next(media for media in step.batch.encoder_batches if media is not None)
            self._job.mesh.page.enter(step.phase("first forward of the encoder"), step.index)
            spec = self._probe(media)
        agreed: FeatureSpec = self._job.groups.cross.broadcast_object(spec, source)
        return agreed

    def _probe(self, media: PackedMedia) -> FeatureSpec:
        training = [module for module in self._module.modules() if module.training]
        try:
            for module in training:
                module.training = False  # so that running statistics and the like stay as they are
            with own_streams(), torch.no_grad():
                return FeatureSpec.of(self._compute.encode(media, step=(-1, -1), number=0))
        finally:
            for module in training:
                module.training = True
