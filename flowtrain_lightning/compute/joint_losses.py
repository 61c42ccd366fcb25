"""Losses that meet in one backward: each by its own weight, over its own count of the whole step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from flowtrain_lightning.compute.named_losses import loss_names
from flowtrain_lightning.compute.step_metrics import StepReport
from flowtrain_lightning.data import StepPlan
from flowtrain_lightning.packing import SampleSizes
from flowtrain_lightning.parallel.halves import HalvedModule

_NOTHING = np.zeros(0, dtype=np.int64)
_NO_SAMPLES = SampleSizes(_NOTHING, _NOTHING, np.zeros(1, dtype=np.int64), _NOTHING, _NOTHING)


class WeighedModule(HalvedModule, Protocol):
    """A module that weighs its losses; `FlowModule` does."""

    loss_weights: Mapping[str, float]
    values_per_patch: int | None

    def loss_counts(self, sizes: SampleSizes) -> Mapping[str, int]:
        """Losses of the trunk beside its first -> the count of each in a step of such sizes."""


class JointLosses:
    """The weights of a module's losses, and what each is divided by.

    With one loss, gradients are divided at the step's end by the targets that were counted in it. Several losses meet
    in the backward of the trunk before that, so each is divided there, by what the sizes of samples say.

    Args:
        module: has the losses.

    Attributes:
        several: there is another loss than the trunk's first.

    Raises:
        ValueError: a weight is of no loss, or is no weight; a loss has a weight and no count, or a count and no weight.
    """

    def __init__(self, module: WeighedModule) -> None:
        graph = module.role_graph
        self._trunk, self._name, self._behind = graph.trunk, type(module).__name__, graph.behind
        self._modalities = {role: str(graph.modality_of(role)) for role in graph.behind}
        self._names = {graph.trunk: loss_names(module), **{role: (role,) for role in graph.behind}}
        self._counts_of = module.loss_counts
        every = [name for names in self._names.values() for name in names]
        self.several = len(every) > 1
        for name, weight in module.loss_weights.items():
            if not self.several or name not in every:
                raise ValueError(
                    f"{self._name}.loss_weights weighs the loss of {name!r}, but the module has "
                    f"{'the losses' if self.several else 'one loss, that'} of {' and '.join(map(repr, every))}. Leave "
                    "it out."
                )
            if not 0 <= weight < float("inf"):
                raise ValueError(f"{self._name}.loss_weights gives the {name} {weight}; give a number from 0 on.")
        self._refuse_uncounted()
        self._weights = {name: float(module.loss_weights.get(name, 1.0)) for name in every}
        self._values_per_patch = module.values_per_patch

    def _refuse_uncounted(self) -> None:
        beside, counted = {*self._names[self._trunk][1:]}, self._counts_of(_NO_SAMPLES).keys()
        if missing := sorted(beside - counted):
            raise ValueError(
                f"{self._name}.loss_weights weighs a loss {missing[0]!r}, which is that of no half and of which "
                "`loss_counts` says nothing: return from it how many terms that loss has in a step, or leave the "
                "weight out."
            )
        if more := sorted(counted - beside):
            raise ValueError(
                f"{self._name}.loss_counts counts the terms of {more[0]!r}, to which loss_weights gives no weight: "
                "give it one, or leave the count out."
            )

    def gradient(self, loss: Tensor, plan: StepPlan, role: str, patch_dim: int = 1) -> Tensor:
        """The gradient of a role's summed losses.

        Args:
            loss: of one batch of the role, of one element, or ``[losses]``.
            plan: of the step.
            role: whose losses they are.
            patch_dim: numbers of a patch of what is generated.

        Returns:
            a tensor like ``loss``.
        """
        if not self.several:
            return torch.ones_like(loss)
        names, counts = self._names[role], self._counts(plan, role, patch_dim)
        of_each = [self._weights[name] / max(counts[name], 1) for name in names]
        return torch.stack([loss.new_full((), each) for each in of_each]).reshape(loss.shape)

    def scale(self, report: StepReport) -> float:
        """The factor of all gradients at the step's end."""
        return 1.0 if self.several or not report.tokens else 1 / report.tokens

    def joined(self, of_trunk: StepReport, behind: Mapping[str, StepReport]) -> StepReport:
        """The report of a step from those of its roles.

        Raises:
            ValueError: two of them have logged the same name.
        """
        if not self.several:
            return of_trunk
        means = {self._trunk: (of_trunk.loss, of_trunk.tokens), **of_trunk.losses}
        means |= {role: (report.loss, report.tokens) for role, report in behind.items()}
        values, options, weights = dict(of_trunk.values), dict(of_trunk.options), dict(of_trunk.weights)
        for role, report in behind.items():
            if twice := sorted(values.keys() & report.values.keys()):
                raise ValueError(
                    f"{twice[0]!r} is logged with the loss of the {self._trunk} and with that of the {role}, which are "
                    "weighed by other counts. Give one of them another name."
                )
            values |= report.values
            options |= report.options
            weights |= report.weights
        return StepReport(
            sum(self._weights[name] * loss for name, (loss, _) in means.items()),
            of_trunk.tokens,
            of_trunk.stop,
            values,
            options,
            losses={name: each for name, each in means.items() if each[1]},
            weights=weights,
        )

    def refuse_other_counts(self, plan: StepPlan, report: StepReport, patch_dims: Mapping[str, int]) -> None:
        """Raises where a step has counted otherwise than its sizes say, so that its losses were divided wrongly.

        Args:
            plan: of the step.
            report: of the step.
            patch_dims: role -> numbers of a patch of what it generates, of the roles that this rank knows.

        Raises:
            ValueError: says what was counted, and what to do.
        """
        if not self.several:
            return
        counts = self._counts(plan, self._trunk)
        targets, counted = counts.pop(self._trunk), report.tokens
        if counted not in (0, targets):
            others = [*counts, *self._behind]
            raise ValueError(
                f"`loss` (or `backbone_step`) has counted {counted:g} target tokens in a step in which {targets} "
                f"labels count. Beside the loss of the {others[0]} it is divided by these before the step ends: "
                "return how many labels count in the microbatch, or always 0 and no loss."
            )
        for name, expected in counts.items():
            if (counted := report.losses.get(name, (0.0, 0.0))[1]) != expected:
                raise ValueError(
                    f"`loss` (or `backbone_step`) has counted {counted:g} terms of {name!r} in a step for which "
                    f"`loss_counts` says {expected}, by which it was divided. Let both count the same."
                )
        for role, patch_dim in patch_dims.items():
            expected, (_, counted) = self._counts(plan, role, patch_dim)[role], report.losses.get(role, (0.0, 0.0))
            if counted != expected:
                raise ValueError(
                    f"`generator_loss` has counted {counted:g} values in a step, but what is to be generated has "
                    f"{expected} by its size, by which the loss was divided. Return the number of `items.values`; "
                    f"where it is another, say so: {self._name}.values_per_patch."
                )

    def _counts(self, plan: StepPlan, role: str, patch_dim: int = 1) -> dict[str, int]:
        """Loss of a role -> its count in the step."""
        if role == self._trunk:
            beside = self._counts_of(plan.sizes) if len(self._names[role]) > 1 else {}
            return {role: int(plan.sizes.targets.sum()), **{name: int(beside[name]) for name in self._names[role][1:]}}
        patches = int(plan.sizes.media_patches[plan.sizes.of_modality(self._modalities[role])].sum())
        return {role: patches * (self._values_per_patch or patch_dim)}
