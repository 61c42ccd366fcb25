"""Who does what in a run that does not say so: rank 0 finds out, and every rank learns it before it has a role."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from weakref import WeakKeyDictionary

import lightning as L
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch.distributed import DistNetworkError, DistStoreError, PrefixStore, Store  # type: ignore[attr-defined]

from flowtrain_lightning.allocator import Allocation, AllocationError, default_allocation
from flowtrain_lightning.checkpoint import read_allocation
from flowtrain_lightning.data import FlowDataModule
from flowtrain_lightning.module import FlowModule
from flowtrain_lightning.placement.decision import PlacementDecision, Plan
from flowtrain_lightning.placement.measuring import measured_profile
from flowtrain_lightning.placement.planning import Planner, processors_of
from flowtrain_lightning.placement.request import OFF, Request, refuse_other_ranks, refuse_what_cannot_run
from flowtrain_lightning.placement.steps import training_steps
from flowtrain_lightning.profiling import Profile
from flowtrain_lightning.trainer.launcher import RankLauncher

_counts = itertools.count()
_lived_on: WeakKeyDictionary[FlowModule, Allocation] = WeakKeyDictionary()
"""Modules of this process that have been built on the ranks of an allocation."""


@dataclass(frozen=True)
class LaunchContext:
    """A run that is about to assign roles, as one of its ranks knows it.

    Attributes:
        trainer: it has module and data attached.
        module: what trains.
        request: what the user says about the allocation.
        rank: global rank.
        ranks: of the run.
        nodes: on which they run, as many on each.
        ranks_per_device: processes that share one device.
        kept_batches: encoder batches whose activations each encoder rank keeps.
        launcher: knows which checkpoint the run goes on from, if it does.
    """

    trainer: L.Trainer
    module: FlowModule
    request: Request
    rank: int
    ranks: int
    nodes: int
    ranks_per_device: int
    kept_batches: int
    launcher: RankLauncher


def choose_allocation(starting: LaunchContext, store: Store, timeout: timedelta) -> PlacementDecision:
    """The allocation of a run whose request leaves it open. Every rank calls it, equally often.

    Args:
        starting: the run.
        store: through which rank 0 tells the others.
        timeout: after which a rank gives up to wait for rank 0.

    Raises:
        TimeoutError: rank 0 has not told in time.
        RuntimeError: rank 0 has ended.
    """
    own = PrefixStore(f"flowtrain/settle/{next(_counts)}", store)
    if starting.rank == 0:
        found = _find_out(starting)
        own.set("settled", json.dumps(found.allocation.state_dict()))
    else:
        found = PlacementDecision(_learn(own, timeout), "rank 0 says so")
    return found


def remember(module: FlowModule, allocation: Allocation) -> None:
    """The module is about to be built on these ranks: later runs of this process that leave it open stay there."""
    _lived_on[module] = allocation


def _find_out(starting: LaunchContext) -> PlacementDecision:
    """What rank 0 decides: whatever binds the run comes first, then a plan, then the rule of thumb."""
    before = _lived_on.get(starting.module)
    if before is not None and _count(before) == starting.ranks:
        return PlacementDecision(before, "this module has lived on it before, in this process")
    profile = starting.request.profile
    checkpoint = starting.launcher.checkpoint(starting.trainer)
    if checkpoint is not None and not isinstance(profile, Profile):
        resumed = _as_saved(checkpoint, starting.ranks, starting.launcher.weights_only)
        if resumed is not None:
            return resumed
    rule = default_allocation(starting.ranks, devices_per_node=starting.ranks // starting.nodes)
    data = starting.trainer.datamodule  # type: ignore[attr-defined]
    if profile == OFF:
        return PlacementDecision(rule, "it is the rule of thumb, as profile='off' leaves planning out")
    if not isinstance(data, FlowDataModule) or "train" not in data.files:
        return PlacementDecision(rule, "it is the rule of thumb, as there are no training data to plan by")
    try:
        return _planned(starting, data)
    except Exception as error:  # whatever it is: a run that can train must not end because of its plan
        rank_zero_warn(
            f"The allocation could not be planned: {error}. The rule of thumb decides instead. Give an allocation with "
            "FlowTrainStrategy(encoder_ranks=...), placement=... or allocation=..., or leave planning out with "
            "profile='off'."
        )
        return PlacementDecision(rule, "it is the rule of thumb, as planning failed")


def _as_saved(checkpoint: str, ranks: int, weights_only: bool | None) -> PlacementDecision | None:
    if not Path(checkpoint).is_dir():
        return None  # a plain Lightning checkpoint knows of no ranks
    source = f"The allocation in {checkpoint}"
    try:
        saved = read_allocation(Path(checkpoint), weights_only)
        refuse_other_ranks(saved, ranks, source)
        refuse_what_cannot_run(saved, source)
    except AllocationError as error:
        rank_zero_info(f"flowtrain: {error} It is settled anew now.")
        return None
    except (OSError, ValueError) as error:
        rank_zero_info(f"flowtrain: {source} cannot be read, so it is settled anew: {error}")
        return None
    return PlacementDecision(saved, f"{checkpoint}, from which the run goes on, was saved on it")


def _planned(starting: LaunchContext, data: FlowDataModule) -> PlacementDecision:
    trainer, profile = starting.trainer, starting.request.profile
    if not isinstance(profile, Profile):
        profile = measured_profile(trainer, starting.module, data)
    processors = processors_of(trainer.strategy.root_device, starting.ranks, starting.ranks_per_device, starting.nodes)
    planner = Planner(training_steps(data), starting.ranks, processors, starting.kept_batches, starting.nodes)
    choice = planner.choose(profile)
    return PlacementDecision(choice.chosen.allocation, choice.why, Plan(planner, profile, choice))


def _learn(store: Store, timeout: timedelta) -> Allocation:
    try:
        store.wait(["settled"], timeout)
    except DistStoreError as error:
        raise TimeoutError(
            f"Rank 0 had not settled the allocation after {timeout.total_seconds():.0f} s. Raise "
            "FlowTrainStrategy(timeout=...), or give an allocation."
        ) from error
    except DistNetworkError as error:
        raise RuntimeError("Rank 0 ended before it had settled the allocation. See its output.") from error
    return Allocation.from_state(json.loads(store.get("settled")))


def _count(allocation: Allocation) -> int:
    return len(set().union(*allocation.ranks.values()))
