"""Chooses the allocation of a run, and says why: rank 0 chooses, and every rank learns it before it has a role."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import lightning as L
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch.distributed import DistNetworkError, DistStoreError, PrefixStore, Store  # type: ignore[attr-defined]

from flowtrain_lightning.allocator import (
    Allocation,
    AllocationError,
    Layout,
    PlacementChoice,
    RoleGraph,
    choose_placement,
    default_allocation,
)
from flowtrain_lightning.allocator.plan_file import write_plan
from flowtrain_lightning.checkpoint import read_allocation
from flowtrain_lightning.data import FlowDataModule
from flowtrain_lightning.module import FlowModule
from flowtrain_lightning.placement.measured import SIMULATED_STEPS, MeasuredCosts, MeasuredPrediction
from flowtrain_lightning.placement.measuring_process import measured_profile
from flowtrain_lightning.placement.profile import Profile
from flowtrain_lightning.placement.request import (
    OFF,
    PlacementRequest,
    of_module,
    refuse_other_ranks,
    refuse_what_cannot_run,
)
from flowtrain_lightning.placement.run_costs import first_steps, processors_of, rank_bytes
from flowtrain_lightning.placement.text_table import text_table

ALLOCATION_FILE = "allocation.yaml"

_KEY = "allocation"

_counts = itertools.count()
_trained_on: WeakKeyDictionary[FlowModule, Allocation] = WeakKeyDictionary()
"""Modules of this process that have been built on the ranks of an allocation."""


@dataclass(frozen=True)
class PlacementDecision:
    """The allocation that a run takes.

    Attributes:
        allocation: which ranks play which role.
        reason: why it is this one, as the end of a sentence.
        costs: what it was planned by, where it was planned, and only on rank 0.
        choice: what was predicted by ``costs``.
    """

    allocation: Allocation
    reason: str
    costs: MeasuredCosts | None = None
    choice: PlacementChoice[MeasuredPrediction] | None = None

    @property
    def text(self) -> str:
        """Allocation, reason and predictions, in one block."""
        lines = [self.allocation.describe(), f"  because {self.reason}."]
        if self.choice is not None and self.costs is not None:
            lines += [
                text_table(*self.choice.rows()),
                f"  Predicted from the first {SIMULATED_STEPS} steps of the data and costs measured on "
                f"{self.costs.profile.origin.device}.",
            ]
        return "\n".join(lines)

    def hyperparameters(self) -> dict[str, Any]:
        """Returns what loggers keep, in JSON types."""
        kept: dict[str, Any] = {"allocation": self.allocation.describe(), "allocation_reason": self.reason}
        if self.choice is not None:
            chosen = self.choice.chosen
            kept["predicted_step_seconds"] = chosen.seconds
            kept["predicted_samples_per_second"] = chosen.samples_per_second
            kept |= {f"predicted_{role}_idle": idle for role, idle in chosen.idle.items()}
        return kept

    def record(self, trainer: L.Trainer, folder: str) -> None:
        """Tell the loggers, and write ``allocation.yaml`` where the log goes. Rank 0 calls it."""
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                # It shows the hyperparameters of its first call alone, which are those of the module.
                logger.log_hyperparams(self.hyperparameters(), metrics={})
                logger.experiment.add_text("allocation", f"```\n{self.text}\n```")
            else:
                logger.log_hyperparams(self.hyperparameters())
        if "://" in folder:
            return
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            write_plan(self.allocation, Path(folder) / ALLOCATION_FILE, self.text)
        except (AllocationError, OSError) as error:
            rank_zero_warn(f"The allocation is not kept as a file: {error}")


class ResumedCheckpoint(Protocol):
    """Knows which checkpoint a run goes on from, if it does."""

    def checkpoint(self, trainer: L.Trainer) -> str | None:
        """The path of the checkpoint."""


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
        resumed: knows which checkpoint the run goes on from.
    """

    trainer: L.Trainer
    module: FlowModule
    request: PlacementRequest
    rank: int
    ranks: int
    nodes: int
    ranks_per_device: int
    kept_batches: int
    resumed: ResumedCheckpoint


def choose_allocation(launch: LaunchContext, store: Store, timeout: timedelta) -> PlacementDecision:
    """The allocation of a run whose request leaves it open. Every rank calls it, equally often.

    Args:
        launch: the run.
        store: through which rank 0 tells the others.
        timeout: after which a rank gives up to wait for rank 0.

    Raises:
        TimeoutError: rank 0 has not told in time.
        RuntimeError: rank 0 has ended.
    """
    own = PrefixStore(f"flowtrain/placement/{next(_counts)}", store)
    if launch.rank == 0:
        decision = _decide(launch)
        own.set(_KEY, json.dumps(decision.allocation.state_dict()))
        return decision
    return PlacementDecision(_learn(own, timeout), "rank 0 says so")


def remember_allocation(module: FlowModule, allocation: Allocation) -> None:
    """The module is about to be built on these ranks: later runs of this process that leave it open stay there."""
    _trained_on[module] = allocation


def _decide(launch: LaunchContext) -> PlacementDecision:
    """Decides on rank 0: whatever binds the run comes first, then a plan, then the rule of thumb."""
    before = _trained_on.get(launch.module)
    if before is not None and before.size == launch.ranks:
        return PlacementDecision(before, "this module was built on it before, in this process")
    profile = launch.request.profile
    checkpoint = launch.resumed.checkpoint(launch.trainer)
    if checkpoint is not None and not isinstance(profile, Profile):
        saved = _as_saved(checkpoint, launch.ranks, launch.module.role_graph)
        if saved is not None:
            return saved
    rule = default_allocation(
        launch.ranks,
        devices_per_node=launch.ranks // launch.nodes,
        ranks_per_device=launch.ranks_per_device,
        graph=launch.module.role_graph,
    )
    data = launch.trainer.datamodule  # type: ignore[attr-defined]
    if profile == OFF:
        return PlacementDecision(rule, "it is the rule of thumb, as profile='off' leaves planning out")
    if not isinstance(data, FlowDataModule) or "train" not in data.files:
        return PlacementDecision(rule, "it is the rule of thumb, as there are no training data to plan by")
    try:
        return _planned(launch, data)
    except Exception as error:  # whatever it is: a run that can train must not end because of its plan
        rank_zero_warn(
            f"The allocation could not be planned: {error}. The rule of thumb decides instead. Give an allocation with "
            "FlowTrainStrategy(encoder_ranks=...), placement=... or allocation=..., or leave planning out with "
            "profile='off'."
        )
        return PlacementDecision(rule, "it is the rule of thumb, as planning failed")


def _as_saved(checkpoint: str, ranks: int, graph: RoleGraph) -> PlacementDecision | None:
    if not Path(checkpoint).is_dir():
        return None  # a plain Lightning checkpoint knows of no ranks
    source = f"The allocation in {checkpoint}"
    try:
        saved = read_allocation(Path(checkpoint))
        refuse_other_ranks(saved, ranks, source)
        saved = of_module(saved, source, graph)
        refuse_what_cannot_run(saved, source)
    except AllocationError as error:
        rank_zero_info(f"flowtrain: {error} It is chosen anew now.")
        return None
    except (OSError, ValueError) as error:
        rank_zero_info(f"flowtrain: {source} cannot be read, so it is chosen anew: {error}")
        return None
    return PlacementDecision(saved, f"{checkpoint}, from which the run goes on, was saved on it")


def _planned(launch: LaunchContext, data: FlowDataModule) -> PlacementDecision:
    trainer, profile = launch.trainer, launch.request.profile
    if not isinstance(profile, Profile):
        profile = measured_profile(trainer, launch.module, data)
    graph = launch.module.role_graph
    if set(profile.roles) != set(graph.roles):
        raise AllocationError(
            f"the profile has the roles {', '.join(profile.roles)}, but the module the halves {', '.join(graph.roles)}"
        )
    processors = processors_of(trainer.strategy.root_device, launch.ranks, launch.ranks_per_device, launch.nodes)
    costs = MeasuredCosts(
        profile,
        first_steps(data),
        launch.ranks,
        processors,
        launch.kept_batches,
        launch.nodes,
        launch.ranks_per_device,
        rank_bytes(trainer.strategy.root_device, launch.ranks_per_device),
        graph,
    )
    choice = choose_placement(costs)
    return PlacementDecision(choice.chosen.allocation, choice.reason + _why_shards(costs, choice), costs, choice)


def _why_shards(costs: MeasuredCosts, choice: PlacementChoice[MeasuredPrediction]) -> str:
    """Why the chosen allocation has roles in shards, as the end of a sentence; nothing where it has none."""
    chosen = choice.chosen.allocation
    if not any(layout.shares_weights for layout in chosen.layouts.values()) or costs.rank_bytes is None:
        return ""
    layouts = {role: Layout(len(ranks)) for role, ranks in chosen.ranks.items()}
    whole = Allocation(chosen.placement, layouts, chosen.ranks)
    return (
        f"; whole copies there would keep {costs.kept_bytes(whole) / 1e9:,.0f} GB of weights, gradients and optimizer "
        f"on a rank that has {costs.rank_bytes / 1e9:,.0f} GB, shards keep {costs.kept_bytes(chosen) / 1e9:,.0f} GB"
    )


def _learn(store: Store, timeout: timedelta) -> Allocation:
    try:
        store.wait([_KEY], timeout)
    except DistStoreError as error:
        raise TimeoutError(
            f"Rank 0 had not chosen the allocation after {timeout.total_seconds():.0f} s. Raise "
            "FlowTrainStrategy(timeout=...), or give an allocation."
        ) from error
    except DistNetworkError as error:
        raise RuntimeError("Rank 0 ended before it had chosen the allocation. See its output.") from error
    return Allocation.from_state(json.loads(store.get(_KEY)))
