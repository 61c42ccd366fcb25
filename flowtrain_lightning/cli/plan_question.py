"""The question of ``flowtrain plan``, the plans that answer it, and the token budget with which they are best."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from pathlib import Path
from typing import Any

from flowtrain_lightning.allocator import (
    Allocation,
    Cluster,
    ModelledCosts,
    ModuleDescription,
    SearchSpace,
    Workload,
    role_problems,
    typical_workload,
)
from flowtrain_lightning.allocator.modelled_plan import ModelledPlan, given_plan
from flowtrain_lightning.allocator.role_problem import Precision, Problems
from flowtrain_lightning.cli.lengths import read_sizes
from flowtrain_lightning.cli.plan_choice import Choices, can_run, choose_plans, running_plans
from flowtrain_lightning.cli.plan_input import read_efficiencies
from flowtrain_lightning.cli.plan_loading import held_up_by_loading
from flowtrain_lightning.packing import DEFAULT_COST
from flowtrain_lightning.placement.drawn_steps import sizes_of, steps_of
from flowtrain_lightning.placement.profile import Profile
from flowtrain_lightning.placement.simulated_plans import PlanSimulator

_LEAST_BUDGET = 1024
"""Tokens below which no budget is tried."""

_NO_GAIN = 0.01
"""Share of its time that twice a budget must save for larger ones to be tried."""

_POWERS = (-3, -2, -1, 0, 1, 2, 3)
"""Powers of two between a usual token budget and those that are tried."""


@dataclass(frozen=True)
class PlanQuestion:
    """The module, devices and data that are planned for.

    Attributes:
        module: that trains.
        cluster: where.
        workload: what a step asks.
        data: where lengths are from; None where typical ones are assumed.
        precision: bytes per number, and what of them is on the host.
        profile: how fast the module was measured to be.
        space: which layouts may be used.
        keeps_as_asked: the number of encoder batches whose activations are kept was asked for.
    """

    module: ModuleDescription
    cluster: Cluster
    workload: Workload
    data: Path | None
    precision: Precision
    profile: Profile | None
    space: SearchSpace
    keeps_as_asked: bool = False

    @cached_property
    def problems(self) -> Problems:
        """Role -> what is known of it."""
        device, name = self.cluster.device, self.precision.name
        efficiencies = read_efficiencies(self.profile, self.module, self.workload, device, name)
        return role_problems(self.module, self.workload, self.cluster, self.precision, efficiencies)

    @cached_property
    def costs(self) -> ModelledCosts:
        """The best plan of every kind."""
        return ModelledCosts(self.problems, self.space)

    @cached_property
    def simulator(self) -> PlanSimulator | None:
        """Plays plans as `flowtrain simulate` does; None of a module without an encoder."""
        modalities = self.module.modalities
        if not modalities:
            return None
        profile = self.profile
        sizes = sizes_of(self.workload) if self.data is None else read_sizes(self.data, modalities)
        cost, media_costs = (DEFAULT_COST, {}) if profile is None else (profile.cost, profile.media_costs)
        steps = steps_of(self.workload, sizes, cost, media_costs)
        return PlanSimulator(self.problems, steps, encoder_activations=self.workload.encoder_activations)

    def answer(self) -> Choices:
        """The plans to show.

        Raises:
            NoPlanError: nothing fits.
        """
        return choose_plans(self.costs, self.simulator, self.running, self._as_loaded)

    def given(self, allocation: Allocation) -> ModelledPlan:
        """Predicts an allocation of the user's own, simulated where training runs it.

        Raises:
            PlanningError: it cannot be that of this module on these devices.
        """
        asked = self if (kept := allocation.encoder_activations) is None else self.with_encoder_activations(kept)
        plan = given_plan(asked.problems, allocation)
        return self._as_loaded(plan if asked.simulator is None else asked.simulator.simulated([plan])[0])

    def _as_loaded(self, plan: ModelledPlan) -> ModelledPlan:
        return held_up_by_loading(plan, self.problems, self.module)

    @cached_property
    def running(self) -> list[ModelledPlan]:
        """The best plan of every kind that training runs."""
        return running_plans(self.costs)

    @cached_property
    def seconds_of_a_token(self) -> float:
        """Of the backbone alone, in the fastest layout that training runs: what a token budget decides. Inf: none."""
        trunk = self.problems.trunk
        seconds = self.costs.fastest_alone(trunk, lambda layout: can_run(trunk, layout, self.problems, "separate"))
        return seconds / self.problems.load.tokens

    def with_budget(self, tokens: int) -> PlanQuestion:
        """The same with another token budget, which cuts lengths that are only assumed; a step keeps its tokens."""
        before = self.workload
        if self.data is None and int(before.tokens.max()) != tokens:
            kept = ("global_batch_size", "encoder_budget", "encoder_activations", "loss_chunk")
            settings: dict[str, Any] = {name: getattr(before, name) for name in kept}
            workload = typical_workload(self.module, token_budget=tokens, **settings)
        else:
            workload = replace(before, token_budget=tokens, microbatches=None)
        if before.microbatches is not None:
            workload = workload.filling(max(1, round(before.microbatches * before.token_budget / tokens)))
        return replace(self, workload=workload)

    def with_encoder_budget(self, patches: int) -> PlanQuestion:
        """The same with another bound of encoder batches."""
        return replace(self, workload=replace(self.workload, encoder_budget=patches))

    def with_encoder_activations(self, batches: int) -> PlanQuestion:
        """The same where encoders keep the activations of so many batches."""
        return replace(self, workload=replace(self.workload, encoder_activations=batches))

    def as_it_fits(self) -> PlanQuestion:
        """The same; or keeping fewer encoder batches, where else nothing fits that training runs, if none was asked."""
        fewer = (self.with_encoder_activations(kept) for kept in range(self.workload.encoder_activations // 2, 0, -1))
        return self if self.keeps_as_asked or self.running else next((one for one in fewer if one.running), self)

    @property
    def fits(self) -> bool:
        """Whether training runs anything of it that fits, if need be with one encoder batch kept."""
        return bool(self.running or (not self.keeps_as_asked and self.with_encoder_activations(1).running))

    @property
    def least_encoder_budget(self) -> int | None:
        """The least bound of encoder batches that is one: the longest media item's patches; None without media."""
        return max((int(lengths.max()) for lengths in self.workload.media.values()), default=None)

    @property
    def least_budget(self) -> int:
        """The least token budget that can be tried: that of the longest sample, if samples are known."""
        return _LEAST_BUDGET if self.data is None else int(self.workload.tokens.max())


def best_budget(question: PlanQuestion) -> PlanQuestion:
    """The question with the token budget whose plan is fastest; of those that cannot be told apart the smallest.

    Budgets from an eighth of the usual one to eight times as many are tried, as far as samples fit into them, until a
    larger one gains nothing. Lengths that are only assumed are cut to a smaller one where nothing fits otherwise.
    """
    usual, longest = question.workload.token_budget, int(question.workload.tokens.max())
    tried = sorted({max(question.least_budget, round(usual * 2.0**power)) for power in _POWERS})
    whole: list[PlanQuestion] = []
    for one in (question.with_budget(tokens) for tokens in tried if tokens >= longest):
        if whole and one.seconds_of_a_token > whole[-1].seconds_of_a_token * (1 - _NO_GAIN):
            break
        whole.append(one)
    fastest = min((one.seconds_of_a_token for one in whole), default=inf)
    enough = fastest * (1 + ModelledCosts.margin)
    first = sorted(whole, key=lambda one: one.seconds_of_a_token > enough)
    cut = [question.with_budget(tokens) for tokens in reversed(tried) if tokens < longest]
    return next((one for one in (*first, *cut) if one.running), question)
