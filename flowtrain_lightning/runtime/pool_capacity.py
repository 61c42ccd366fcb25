"""Sees to it that each step finds enough bytes in the pool: opens it, and a larger one when a step needs more."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace
from functools import partial

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from flowtrain_lightning.compute.compute import Compute
from flowtrain_lightning.compute.feature_spec import FeatureSpec
from flowtrain_lightning.compute.kept_metrics import kept_metrics
from flowtrain_lightning.module import FlowModule
from flowtrain_lightning.packing.setting_values import check_settings
from flowtrain_lightning.packing.stage_entries import hidden_modalities, slice_name, stage_name
from flowtrain_lightning.parallel.ranks.random_streams import own_streams
from flowtrain_lightning.pool import (
    DeviceTier,
    NetworkChoice,
    Pool,
    PoolCounters,
    PoolError,
    TierChoice,
    choose_device_tier,
    runtime_of,
)
from flowtrain_lightning.pool.device.device_opening import CLOSE_SECONDS
from flowtrain_lightning.runtime.encoder_checks import graphs_alone, told_of_other_weights
from flowtrain_lightning.runtime.job import Job
from flowtrain_lightning.runtime.role_methods import hidden_in_place, with_features, zero_rows
from flowtrain_lightning.runtime.step import RankContext, Step
from flowtrain_lightning.runtime.timeline import Timeline

_log = logging.getLogger("lightning.pytorch")  # whose messages of ranks other than 0 are shown, too

_LEAST_REGION_BYTES = 1 << 20
"""Bytes of each half of the pool where nobody asked for fewer."""

_SPARE_STEPS, _SPARE_BYTES = 16, 16 << 20
"""So many times the first step's features fit, since later steps may have more, as long as these are not more bytes."""


@dataclass(frozen=True)
class PoolSettings:
    """The pool of each rank, as a user may bound it.

    Attributes:
        bytes: of the pool on each rank, half of them for the running step and half for gradients or work ahead; None
            lets it follow from the plan and grow between steps.
        tier: where features and gradients of GPUs lie: ``"auto"`` in GPU memory between ranks that prove at start that
            they can read it there, ``"host"`` in host memory, ``"device"`` as ``"auto"`` or not at all.
        network: how they pass between hosts: ``"auto"`` over TCP, ``"nixl"`` as that package finds (extra `nixl`).

    Raises:
        ValueError: one of them is impossible.
    """

    bytes: int | None = None
    tier: TierChoice = "auto"
    network: NetworkChoice = "auto"

    def __post_init__(self) -> None:
        check_settings(self, least={"bytes": 1})


class PoolCapacity:
    """One rank's part of the pool, from step to step. All ranks decide alike, from the plan.

    Args:
        module: encodes one batch, to find out what a row of features is.
        job: the calling rank's.
        compute: runs the user's methods.
        timeline: of the calling rank.
        settings: what the user wants of the pool.

    Attributes:
        context: what lanes work with; None before the first step.
    """

    def __init__(
        self, module: FlowModule, job: Job, compute: Compute, timeline: Timeline, settings: PoolSettings
    ) -> None:
        self.context: RankContext | None = None
        self._module = module
        self._fault = ""  # of an encoder, as its first forward has shown
        self._job = job
        self._compute = compute
        self._timeline = timeline
        self._settings = settings
        self._region_bytes = 0
        self._last_counters: PoolCounters | None = None
        self._tier: DeviceTier | None = None
        self._tier_bytes = 0  # that were asked for when it was opened

    @property
    def counters(self) -> PoolCounters | None:
        """Counters of this rank's part of the pool since it was opened last; None before the first step."""
        return self._last_counters if self.context is None else self.context.pool.counters

    def ensure_capacity(self, step: Step, anew: bool) -> bool:
        """Opens the pool where the step needs more bytes than there are.

        Args:
            step: that begins.
            anew: open it in any case, so that all that was published is void.

        Returns:
            Whether there is another context now.

        Raises:
            PoolError: the pool's bytes were bounded to too few for this step; the text says how many would do.
            ValueError: the step trains, and ``encode`` computes with weights of another role.
        """
        for modality in sorted(step.program.modalities, key=partial(_turn, step)):
            if modality not in self._compute.specs:
                self._agree_on_spec(step, modality)
        if step.stage == "train" and self._fault:
            raise ValueError(self._fault)
        demand = step.program.pool_demand(self._compute.specs)
        least, ample = demand.least, demand.ample
        if self.context is None or least > self._region_bytes:
            self._region_bytes = self._choose_bytes(least, ample)
        elif not anew:
            return False
        self._open(step)
        return True

    def close(self) -> None:
        """Gives the pool's memory back."""
        if self.context is not None:
            self._last_counters = self.context.pool.counters
            self.context.pool.close()
            self.context = None
        if self._tier is not None:
            self._tier.close(CLOSE_SECONDS)
            self._tier, self._tier_bytes = None, 0

    def _choose_bytes(self, least: int, ample: int) -> int:
        """Bytes of each half of the pool."""
        limit = self._settings.bytes
        if limit is not None and least > limit // 2:
            raise PoolError(
                f"The largest encoder batch of this step takes {least:,} bytes of features, but a pool of {limit:,} "
                f"bytes leaves {limit // 2:,} for the running step. Give it {2 * least:,} bytes or more "
                f"(FlowTrainStrategy(pool=PoolSettings(bytes={2 * least}))), or set a smaller token_budget."
            )
        # What is reserved stands apart, so that beside it there are bytes for the whole step.
        spare = min(_SPARE_STEPS * ample, _SPARE_BYTES)
        chosen = limit // 2 if limit is not None else max(least + ample, spare, _LEAST_REGION_BYTES)
        rank_zero_info(
            f"flowtrain: a pool of {2 * chosen:,} bytes on each rank, half for the features of the running "
            f"step, half for gradients or work ahead. This step has {ample:,} bytes of features on the busiest "
            f"encoder rank; {2 * least:,} bytes are the least with which it cannot block."
        )
        return chosen

    def _open(self, step: Step) -> None:
        former, page, nbytes = self.context, self._job.mesh.page, self._region_bytes
        page.enter("wait for all ranks to open the pool", step.index)
        if self._tier_bytes < nbytes:
            if self._tier is not None:
                self._tier.close(math.inf)  # all ranks come here, and nobody has anything left to read in it
            # As much as one half of the pool: a rank with one role uses one half, and what is too much goes through
            # host memory, which has bytes for everything. It is kept until the pool grows.
            self._tier = choose_device_tier(self._settings.tier, self._job.mesh, self._compute.device, nbytes)
            self._tier_bytes = nbytes
            # Rank 0 speaks for all, but does not know between which other ranks entries pass through host memory.
            if self._tier is not None and (self._job.mesh.rank == 0 or self._tier.refusals):
                _log.info(f"flowtrain: {self._tier.sentence}")
        runtime = self._tier.runtime if self._tier is not None else runtime_of(self._compute.device)
        pool = Pool.open(self._job.mesh, nbytes, nbytes, self._settings.network, self._tier, runtime)
        allocation = self._job.allocation
        members = {role: allocation.members(role) for role in allocation.roles}
        for role, layout in allocation.layouts.items():
            for stage in range(layout.pipeline):
                members[stage_name(role, stage)] = allocation.members_in_stage(role, stage)
                ranks, alike = allocation.stage_ranks(role, stage), layout.tensor
                slices = (ranks[first : first + alike] for first in range(0, len(ranks), alike))
                members[slice_name(role, stage)] = tuple(slices)
        uncounted = partial(kept_metrics, self._module)
        self.context = RankContext(pool, self._compute, page, self._timeline, members, uncounted)
        if former is not None:
            former.pool.close()

    def _agree_on_spec(self, step: Step, modality: str) -> None:
        """Finds what a row of a modality is, by a first forward of the first rank that makes some."""
        job, allocation = self._job, self._job.allocation
        inside = hidden_modalities(step.batch.shard.members)
        if modality in inside:
            role, stage = inside[modality], 0
            first = next(member for member, own in enumerate(step.plan.batches[role]) if any(map(len, own)))
        else:
            role = allocation.graph.maker_of(modality)
            stage = allocation.layouts[role].stages.last
            first = min(entry.maker.member for entry in step.plan.entries if entry.modality == modality)
        layout, ranks = allocation.layouts[role], allocation.members_in_stage(role, stage)[first]
        source, found = ranks[0], None
        if job.rank in (allocation.stage_ranks(role, stage) if layout.meets_in_forwards else ranks):
            job.mesh.page.enter(f"first forward of the {role}", step.index)
            spec = self._probe(step, role, None if modality in inside else modality)
            found = spec.shapes, tuple(str(dtype).removeprefix("torch.") for dtype in spec.dtypes)
        shapes, dtypes = job.groups.cross.broadcast_message(found, source)
        self._compute.specs[modality] = FeatureSpec(shapes, tuple(getattr(torch, name) for name in dtypes))

    def _probe(self, step: Step, role: str, modality: str | None) -> FeatureSpec:
        """What this rank makes of a batch of a role, of media of some modality; None: of any."""
        training = [module for module in self._module.modules() if module.training]
        # The graph tells of weights of other roles, which a rank that has several does not miss.
        encodes = role != step.plan.graph.trunk
        looks = encodes and len(self._job.roles) > 1 and not self._job.allocation.layouts[role].meets_in_forwards
        try:
            for module in training:
                module.training = False  # so that running statistics and the like stay as they are
            with own_streams(), graphs_alone() if looks else torch.no_grad(), kept_metrics(self._module):
                if role == step.plan.graph.trunk:
                    return FeatureSpec.of(self._first_microbatch(step, role))
                media = next(
                    (
                        media
                        for media in step.batch.media[role]
                        if media is not None and modality in (None, media.modality)
                    ),
                    step.batch.padding_media.get(role),
                )
                assert media is not None
                media = replace(media, kept=None) if media.rows else media  # nothing is kept of a trial
                hidden = hidden_in_place(step, self._compute, role, media)
                features = self._compute.encode(role, media, *hidden, step=(-1, -1), number=0)
                if looks and not self._fault:
                    self._fault = told_of_other_weights(self._module, role, features)
                return FeatureSpec.of(features)
        finally:
            for module in training:
                module.training = True

    def _first_microbatch(self, step: Step, trunk: str) -> tuple[Tensor, ...]:
        """Rows of the first microbatch of this rank, with features of zeros. Of what is logged in it nothing counts."""
        compute = self._compute
        number = next(number for number, packed in enumerate(step.batch.microbatches) if packed is not None)
        packed = step.batch.microbatches[number]
        assert packed is not None
        rows = {
            modality: zero_rows(compute, modality, count)
            for modality, count in step.program.roles[trunk].batches[number].rows_read.items()
        }
        packed, features = with_features(step, compute, packed, rows)
        return compute.microbatch_and_rows(packed, features, stage="val", step=(-1, -1), number=0, counts=False)[1]


def _turn(step: Step, modality: str) -> tuple[int, str]:
    """When it is found what a row of a modality is: before what is made by what reads it."""
    graph, role = step.plan.graph, hidden_modalities(step.batch.shard.members).get(modality)
    if role is None:
        return 1 + (modality in graph.generated), modality
    return 2 * (role == graph.trunk), modality
