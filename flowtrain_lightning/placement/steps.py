"""The training steps that a run would begin with, planned for any allocation."""

from __future__ import annotations

import copy
from dataclasses import replace

from flowtrain_lightning.allocator import Allocation
from flowtrain_lightning.allocator.roles import BACKBONE, ENCODER
from flowtrain_lightning.data import FlowDataModule, RankShard
from flowtrain_lightning.data.dataset import StepDataset
from flowtrain_lightning.packing import StepPlan


def part_of(allocation: Allocation, rank: int) -> RankShard:
    """Which part of every step a rank loads."""
    backbones, encoders = allocation.ranks[BACKBONE], allocation.ranks[ENCODER]
    colocated_encoder_ranks = tuple(encoders.index(reader) if reader in encoders else -1 for reader in backbones)
    return RankShard(
        backbone_rank=allocation.rank_within(BACKBONE, rank),
        backbone_ranks=len(backbones),
        encoder_rank=allocation.rank_within(ENCODER, rank),
        encoder_ranks=len(encoders),
        colocated_encoder_ranks=colocated_encoder_ranks if max(colocated_encoder_ranks) >= 0 else None,
    )


def training_steps(data: FlowDataModule) -> StepDataset:
    """The steps that a data module would train on, as one process sees them; its own state stays as it is.

    Raises:
        DataError: the data cannot be used.
    """
    alone = copy.copy(data)
    alone.trainer = None
    if type(data).prepare_data is not FlowDataModule.prepare_data:
        alone.prepare_data()  # of a subclass: it may make the files
    return alone.train_dataloader().steps


def plan_steps(steps: StepDataset, allocation: Allocation, count: int) -> list[StepPlan]:
    """The plans of the first steps on this allocation, at most ``count``.

    Raises:
        ValueError: the steps cannot be dealt to so many ranks.
    """
    dealt = replace(steps, shard=part_of(allocation, 0))
    return [dealt.plan(0, step) for step in range(min(count, len(dealt)))]
