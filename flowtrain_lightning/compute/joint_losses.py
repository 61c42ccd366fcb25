"""Losses of several roles that meet in one backward: each by its own weight, over its own count of the whole step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from flowtrain_lightning.compute.step_metrics import StepReport
from flowtrain_lightning.data import StepPlan
from flowtrain_lightning.parallel.halves import HalvedModule


class WeighedModule(HalvedModule, Protocol):
    """A module that weighs its losses; `FlowModule` does."""

    loss_weights: Mapping[str, float]
    values_per_patch: int | None


class JointLosses:
    """The weights of a module's losses, and what each is divided by.

    With one loss, gradients are divided at the step's end by the targets that were counted in it. Several losses meet
    in the backward of the trunk before that, so each is divided there, by what the sizes of samples say.

    Args:
        module: has the losses.

    Attributes:
        several: another role than the trunk has a loss, too.

    Raises:
        ValueError: a weight is of no loss, or is no weight.
    """

    def __init__(self, module: WeighedModule) -> None:
        graph = module.role_graph
        self.several = bool(graph.behind)
        self._trunk, self._name, self._behind = graph.trunk, type(module).__name__, graph.behind
        self._modalities = {role: str(graph.modality_of(role)) for role in graph.behind}
        roles = (graph.trunk, *graph.behind)
        for role, weight in module.loss_weights.items():
            if not self.several or role not in roles:
                raise ValueError(
                    f"{self._name}.loss_weights weighs the loss of {role!r}, but the module has "
                    f"{'the losses' if self.several else 'one loss, that'} of {' and '.join(map(repr, roles))}. Leave "
                    "it out."
                )
            if not 0 <= weight < float("inf"):
                raise ValueError(f"{self._name}.loss_weights gives the {role} {weight}; give a number from 0 on.")
        self._weights = {role: float(module.loss_weights.get(role, 1.0)) for role in roles}
        self._values_per_patch = module.values_per_patch

    def seed(self, plan: StepPlan, role: str, patch_dim: int = 1) -> float:
        """The gradient of a role's summed loss.

        Args:
            plan: of the step.
            role: whose loss it is.
            patch_dim: numbers of a patch of what is generated.
        """
        return self._weights[role] / max(self._count(plan, role, patch_dim), 1) if self.several else 1.0

    def scale(self, report: StepReport) -> float:
        """The factor of all gradients at the step's end."""
        return 1.0 if self.several else 1 / max(report.tokens, 1)

    def joined(self, of_trunk: StepReport, behind: Mapping[str, StepReport]) -> StepReport:
        """The report of a step from those of its roles.

        Raises:
            ValueError: two of them have logged the same name.
        """
        if not self.several:
            return of_trunk
        means = {self._trunk: (of_trunk.loss, of_trunk.tokens)}
        means |= {role: (report.loss, report.tokens) for role, report in behind.items()}
        values, options = dict(of_trunk.values), dict(of_trunk.options)
        for role, report in behind.items():
            if twice := sorted(values.keys() & report.values.keys()):
                raise ValueError(
                    f"{twice[0]!r} is logged with the loss of the {self._trunk} and with that of the {role}, which are "
                    "weighed by other counts. Give one of them another name."
                )
            values |= report.values
            options |= report.options
        return StepReport(
            sum(self._weights[role] * loss for role, (loss, _) in means.items()),
            of_trunk.tokens,
            of_trunk.stop,
            values,
            options,
            losses={role: each for role, each in means.items() if each[1]},
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
        targets, counted = self._count(plan, self._trunk, 1), report.tokens
        if counted not in (0, targets):
            raise ValueError(
                f"`loss` (or `backbone_step`) has counted {counted:g} target tokens in a step in which {targets} "
                f"labels count. Beside the loss of the {self._behind[0]} it is divided by these before the step ends: "
                "return how many labels count in the microbatch, or always 0 and no loss."
            )
        for role, patch_dim in patch_dims.items():
            expected, (_, counted) = self._count(plan, role, patch_dim), report.losses.get(role, (0.0, 0.0))
            if counted != expected:
                raise ValueError(
                    f"`generator_loss` has counted {counted:g} values in a step, but what is to be generated has "
                    f"{expected} by its size, by which the loss was divided. Return the number of `items.values`; "
                    f"where it is another, say so: {self._name}.values_per_patch."
                )

    def _count(self, plan: StepPlan, role: str, patch_dim: int) -> int:
        if role == self._trunk:
            return int(plan.sizes.targets.sum())
        patches = int(plan.sizes.media_patches[plan.sizes.of_modality(self._modalities[role])].sum())
        return patches * (self._values_per_patch or patch_dim)
