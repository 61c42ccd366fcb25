"""From the samples of a step to its plan: with which costs, for which ranks, and what of it a checkpoint keeps."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import asdict, dataclass, replace
from typing import Any

from flowtrain_lightning.data.batch import RankShard
from flowtrain_lightning.packing import DEFAULT_COST, CostModel, IntArray, SampleSizes, StepPlan, SyncEvery
from flowtrain_lightning.packing.microbatches import arrange, as_microbatches
from flowtrain_lightning.packing.sample_stream import StreamSettings, StreamStep
from flowtrain_lightning.packing.step_plan import Microbatches
from flowtrain_lightning.packing.step_planner import plan_step


@dataclass(frozen=True)
class PackingConfig:
    """How the samples of a step are packed. Which samples these are is decided elsewhere.

    Attributes:
        token_budget: the most tokens of a microbatch.
        cost: what a packed set of sequences costs the backbone.
        encoder_cost: what a set of media costs the encoder; None balances by patches.
        sync_every: when backbone ranks wait for each other.
    """

    token_budget: int
    cost: CostModel = DEFAULT_COST
    encoder_cost: CostModel | None = None
    sync_every: SyncEvery = "step"

    def plan(
        self, sizes: SampleSizes, samples: IntArray, part: RankShard, microbatches: Microbatches | None = None
    ) -> StepPlan:
        """The whole step's plan, equal on all ranks.

        Args:
            sizes: the sizes of ``samples``.
            samples: ``[n]`` indices into the data set.
            part: says how many ranks there are, and whether each encodes what it reads.
            microbatches: what :meth:`arrange` found; None packs as many as are needed.
        """
        return plan_step(
            sizes,
            samples,
            backbone_ranks=part.backbone_ranks,
            encoder_ranks=part.encoder_ranks,
            token_budget=self.token_budget,
            local=part.local,
            colocated_encoder_ranks=part.colocated_encoder_ranks,
            cost=self.cost,
            encoder_cost=self.encoder_cost,
            sync_every=self.sync_every,
            microbatches=microbatches,
        )

    def arrange(self, step: StreamStep, settings: StreamSettings, part: RankShard) -> Microbatches:
        """A stream's step, which is made in balance groups, dealt to the ranks of this layout."""
        bin_of = arrange(
            step.tokens,
            self.cost.weight_of_each(step.tokens),
            step.bin_of,
            microbatches=settings.microbatches,
            group_size=settings.balance_group,
            ranks=part.backbone_ranks,
            budget=settings.token_budget,
            sync_every=self.sync_every,
        )
        return as_microbatches(bin_of, settings.microbatches // part.backbone_ranks, part.backbone_ranks)

    def state_dict(self) -> dict[str, Any]:
        """The same in JSON types, for a checkpoint."""
        return asdict(self)

    def with_costs(self, change: CostChange) -> PackingConfig:
        """The same with other cost models."""
        return replace(self, cost=change.cost, encoder_cost=change.encoder_cost)

    def resumed_from(self, state: Mapping[str, Any], unset_settings: Set[str]) -> PackingConfig:
        """The cost models of a checkpoint in place of those that the user left open."""
        cost, encoder_cost = self.cost, self.encoder_cost
        if "cost" in unset_settings:
            cost = CostModel(**state["cost"])
        if "encoder_cost" in unset_settings:
            encoder_cost = state["encoder_cost"] and CostModel(**state["encoder_cost"])
        return replace(self, cost=cost, encoder_cost=encoder_cost)


@dataclass(frozen=True)
class CostChange:
    """Cost models that hold from a step on.

    Attributes:
        epoch: the epoch of that step.
        step: its number in the epoch; beyond the epoch's last, the next epoch begins with them.
        cost: what a packed set of sequences costs the backbone.
        encoder_cost: what a set of media costs the encoder; None balances by patches.
    """

    epoch: int
    step: int
    cost: CostModel
    encoder_cost: CostModel | None

    @property
    def place(self) -> tuple[int, int]:
        """Epoch and step, to be compared."""
        return self.epoch, self.step

    def state_dict(self) -> dict[str, Any]:
        """The same in JSON types."""
        return asdict(self)

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> CostChange:
        """The change that was saved."""
        encoder_cost = state["encoder_cost"] and CostModel(**state["encoder_cost"])
        return cls(state["epoch"], state["step"], CostModel(**state["cost"]), encoder_cost)
