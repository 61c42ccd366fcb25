"""From the samples of a step to its plan: how they are packed, for which ranks, and what of it a checkpoint keeps."""

from __future__ import annotations

import json
from collections.abc import Mapping, Set
from dataclasses import asdict, astuple, dataclass, field, replace
from pathlib import Path
from typing import Any

from flowtrain_lightning.data.data_error import DataError
from flowtrain_lightning.packing import DEFAULT_COST, CostModel, IntArray, SampleSizes, StepPlan, SyncEvery
from flowtrain_lightning.packing.encoder_batches import ENCODER_BUDGET
from flowtrain_lightning.packing.sample_stream import StreamSettings, StreamStep
from flowtrain_lightning.packing.setting_values import check_settings
from flowtrain_lightning.packing.stage_microbatches import arrange_step
from flowtrain_lightning.packing.step_members import StepMembers
from flowtrain_lightning.packing.step_plan import Batches
from flowtrain_lightning.packing.step_planner import plan_step, sync_every_of


@dataclass(frozen=True)
class PackingConfig:
    """Packing of a step's samples: the section ``packing`` of a data module.

    Attributes:
        cost: what a packed set of sequences costs the backbone; None takes a checkpoint's, else ``DEFAULT_COST``. See
            :mod:`~flowtrain_lightning.packing.cost_model` for where to get one.
        media_costs: role -> what a set of its media items costs, by their patches and in the unit of ``cost``, such as
            ``{"encoder": CostModel(...)}``; None takes a checkpoint's. A role that it lacks is balanced by patches.
        profile: a ``profile.json`` of ``flowtrain profile``, which brings the cost models of all roles.
        sync_every: when backbone ranks wait for each other: ``"step"``, once a step, as replicas do that sum their
            gradients; ``"microbatch"``, at every microbatch, as those do that share weights. None follows the layout.
        pad_to_budget: fill every microbatch up to the token budget, for static shapes.
    """

    cost: CostModel | None = None
    media_costs: Mapping[str, CostModel] | None = None
    profile: str | Path | None = None
    sync_every: SyncEvery | None = None
    pad_to_budget: bool = False

    def __post_init__(self) -> None:
        check_settings(self)
        for name, given in (("cost", self.cost), ("media_costs", self.media_costs)):
            if given is not None and self.profile is not None:
                raise ValueError(
                    f"profile={str(self.profile)!r} brings cost models, but {name} was given as well; leave one out."
                )

    def with_profile_read(self) -> PackingConfig:
        """The cost models of the profile, if one is named, as if they had been given.

        Raises:
            DataError: the profile cannot be read.
        """
        if self.profile is None:
            return self
        cost, media_costs = _profiled_costs(Path(self.profile))
        return replace(self, cost=cost, media_costs=media_costs, profile=None)

    def in_effect(self, token_budget: int, encoder_budget: int = ENCODER_BUDGET) -> StepPacking:
        """The packing of a run that takes nothing from a checkpoint."""
        cost, media_costs = self.cost or DEFAULT_COST, self.media_costs or {}
        return StepPacking(token_budget, cost, media_costs, self.sync_every, encoder_budget)


@dataclass(frozen=True)
class StepPacking:
    """Packing of a step's samples, with every setting decided. Which samples these are is decided elsewhere.

    Attributes:
        token_budget: the most tokens of a microbatch.
        cost: what a packed set of sequences costs the backbone.
        media_costs: role -> what a set of its media items costs; one that it lacks is balanced by patches.
        sync_every: when backbone ranks wait for each other; None follows the layout of the ranks.
        encoder_budget: the most patches of an encoder batch, save one of a single media item that has more.
    """

    token_budget: int
    cost: CostModel = DEFAULT_COST
    media_costs: Mapping[str, CostModel] = field(default_factory=dict)
    sync_every: SyncEvery | None = None
    encoder_budget: int = ENCODER_BUDGET

    def plan(
        self, sizes: SampleSizes, samples: IntArray, members: StepMembers, microbatches: Batches | None = None
    ) -> StepPlan:
        """The whole step's plan, equal on all ranks.

        Args:
            sizes: the sizes of ``samples``.
            samples: ``[n]`` indices into the data set.
            members: of all roles.
            microbatches: what :meth:`arrange` found; None packs as many as are needed.
        """
        return plan_step(
            sizes,
            samples,
            members,
            token_budget=self.token_budget,
            encoder_budget=self.encoder_budget,
            cost=self.cost,
            media_costs=self.media_costs,
            sync_every=self.sync_every or sync_every_of(members),
            microbatches=microbatches,
        )

    def arrange(self, step: StreamStep, settings: StreamSettings, members: StepMembers) -> Batches:
        """The microbatches of a stream's step for the ranks of a layout; every layout gets the same samples."""
        sync_every = self.sync_every or sync_every_of(members)
        ranks, stages = members.counts[members.trunk], members.pipeline.stages
        return arrange_step(step, settings, self.cost, ranks, sync_every, stages)

    def state_dict(self) -> dict[str, Any]:
        """All settings in JSON types, for a checkpoint."""
        return asdict(self)

    def with_costs(self, change: CostChange) -> StepPacking:
        """This packing with other cost models."""
        return replace(self, cost=change.cost, media_costs=change.media_costs)

    def resumed_from(self, state: Mapping[str, Any], unset_settings: Set[str]) -> StepPacking:
        """This packing with a checkpoint's cost models, as far as the user has set none."""
        cost, media_costs = self.cost, self.media_costs
        if "cost" in unset_settings:
            cost = CostModel(**state["cost"])
        if "media_costs" in unset_settings:
            media_costs = _models(state["media_costs"])
        return replace(self, cost=cost, media_costs=media_costs)


@dataclass(frozen=True)
class CostChange:
    """Cost models that hold from a step on.

    Attributes:
        epoch: the epoch of that step.
        step: its number in the epoch; beyond the epoch's last, the next epoch begins with them.
        cost: what a packed set of sequences costs the backbone.
        media_costs: role -> what a set of its media items costs; one that it lacks is balanced by patches.
    """

    epoch: int
    step: int
    cost: CostModel
    media_costs: Mapping[str, CostModel] = field(default_factory=dict)

    @property
    def position(self) -> tuple[int, int]:
        """Epoch and step, to be compared."""
        return self.epoch, self.step

    def state_dict(self) -> dict[str, Any]:
        """The change in JSON types."""
        return asdict(self)

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> CostChange:
        """The change that was saved."""
        return cls(state["epoch"], state["step"], CostModel(**state["cost"]), _models(state["media_costs"]))


def _models(state: Mapping[str, Any]) -> dict[str, CostModel]:
    return {role: CostModel(**model) for role, model in state.items()}


def _profiled_costs(path: Path) -> tuple[CostModel, dict[str, CostModel]]:
    """The cost models of the trunk and of the other roles that a profile holds, as far as these were measured."""
    try:
        profile = json.loads(path.read_text(encoding="utf-8"))
        models = _models({role: found["cost"] for role, found in profile["roles"].items()})
        *_, trunk = (role for role in models if role not in profile.get("behind", ()))
    except OSError as error:
        raise DataError(f"The profile {path} cannot be read: {error}") from error
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(
            f"{path} holds no cost models, as a profile does; write one with `flowtrain profile`."
        ) from error
    # A role that no sample needed was not measured.
    return models[trunk], {role: model for role, model in models.items() if role != trunk and any(astuple(model))}
