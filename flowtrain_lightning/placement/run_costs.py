"""The costs of a run: its training data's first steps, on its ranks, by a profile."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from flowtrain_lightning.allocator import Allocation
from flowtrain_lightning.data import FlowDataModule, RankShard, StepDataset
from flowtrain_lightning.packing import StepPlan
from flowtrain_lightning.placement.measured import PlanSteps, Processors


def rank_shard(allocation: Allocation, rank: int, nodes: int = 1) -> RankShard:
    """Returns the part of every step that a rank loads, where the ranks lie on ``nodes`` alike."""
    members, own = allocation.step_members(nodes), allocation.own_members(rank)
    stages = {role: allocation.stage_of(role, rank) for role in own if role in members.pipelines}
    slices = {role: allocation.slice_of(role, rank) for role in own if role in members.slices}
    return RankShard(members, own, stages, slices)


def first_steps(data: FlowDataModule) -> PlanSteps:
    """Plans the steps that a data module would begin to train on, for any allocation; its own state stays as it is.

    Raises:
        DataError: the data cannot be used.
    """
    alone = data.apart()
    if type(data).prepare_data is not FlowDataModule.prepare_data:
        alone.prepare_data()  # of a subclass: it may make the files
    return partial(_plan_steps, alone.train_dataloader().steps)


def processors_of(device: torch.device, ranks: int, ranks_per_device: int, nodes: int = 1) -> Processors:
    """Returns the ranks that share what they compute on: all of a node its CPU, or those of a device the device."""
    on_cpu = device.type == "cpu"
    together = ranks // nodes if on_cpu else ranks_per_device
    capacity = len(os.sched_getaffinity(0)) / torch.get_num_threads() if on_cpu else 1.0
    return Processors(tuple(tuple(range(first, first + together)) for first in range(0, ranks, together)), capacity)


def rank_bytes(device: torch.device, ranks_per_device: int) -> float | None:
    """Memory of a device for each of the ranks that share it; None where it is not known, as on a CPU."""
    if device.type != "cuda":
        return None
    return float(torch.cuda.get_device_properties(device).total_memory / ranks_per_device)


def _plan_steps(steps: StepDataset, allocation: Allocation, count: int) -> Sequence[StepPlan]:
    dealt = replace(steps, shard=rank_shard(allocation, 0))
    return [dealt.plan(0, step) for step in range(min(count, len(dealt)))]
