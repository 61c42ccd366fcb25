"""The planner: which of the predicted allocations to take, and why, whatever the costs are predicted from.

A source of costs predicts what steps take: `flowtrain_lightning.allocator.modelled.ModelledCosts` by a model of the
devices, `flowtrain_lightning.placement.measured.MeasuredCosts` by a profile and the run's own steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, Protocol, TypeVar, get_args

from flowtrain_lightning.allocator.role_layout import PlanningError

PlanKind = Literal["uniform", "colocated", "separate", "mixed"]
"""Ways in which roles share devices, the simplest first.

``"uniform"``: one layout for all roles on all devices. ``"colocated"``: all roles on all devices, each in its own
layout. ``"separate"``: every device has one role. ``"mixed"``: some devices encode only, the backbone's encode too.
"""

PLAN_KINDS: tuple[PlanKind, ...] = get_args(PlanKind)

_SHOWN = 4
"""Predictions in a table, the best ones."""

_AS_FAST = 5e-4
"""Share of a step below which two plans are said to be equally fast."""


class NoPlanError(PlanningError):
    """No allocation is possible; the message says why, and what would do."""


@dataclass(frozen=True)
class Prediction:
    """A prediction of steps on one allocation.

    Attributes:
        kind: how roles share devices.
        name: the allocation in two or three words.
        seconds: of a step.
        samples_per_second: over all devices.
        idle: role -> share of a step in which its devices compute nothing, from 0 to 1.
    """

    kind: PlanKind
    name: str
    seconds: float
    samples_per_second: float
    idle: Mapping[str, float]

    @property
    def separates(self) -> bool:
        """Whether some devices have one role only."""
        return self.kind in ("separate", "mixed")

    def cells(self) -> dict[str, str]:
        """Columns of a table beside the time of a step: heading -> text."""
        return {f"{role} idle": f"{100 * share:.0f} %" for role, share in self.idle.items()}


P = TypeVar("P", bound=Prediction)
P_co = TypeVar("P_co", bound=Prediction, covariant=True)


class CostSource(Protocol[P_co]):
    """Predicts what steps take on the allocations that are possible."""

    @property
    def margin(self) -> float:
        """The share by which a plan must be faster to be preferred to a simpler one: less cannot be told apart."""

    def predictions(self) -> Sequence[P_co]:
        """Predictions, at least one.

        Raises:
            NoPlanError: no allocation is possible.
        """


@dataclass(frozen=True)
class PlacementChoice(Generic[P]):
    """Predictions and the one that was chosen.

    Attributes:
        predictions: of every allocation that was looked at.
        chosen: of the predictions within ``margin`` of the fastest the simplest, and of equally simple ones the
            fastest; or one that is no slower on fewer devices.
        margin: see `CostSource`.
    """

    predictions: tuple[P, ...]
    chosen: P
    margin: float

    @property
    def reason(self) -> str:
        """Why it was chosen, as part of a sentence: separate roles are compared with roles that share all devices."""
        name, fastest = self.chosen.name, min(self.predictions, key=lambda each: each.seconds)
        rival = self._fastest(not self.chosen.separates)
        reasons = [] if fastest is self.chosen else [self._simpler_than(fastest)]
        if rival is None:
            other = "all roles on the same ranks" if self.chosen.separates else "roles on ranks of their own"
            reasons.append(f"{name} is the fastest that is possible, and to have {other} is not")
        elif rival.seconds >= self.chosen.seconds:
            idle = "" if self.chosen.separates else _idle(rival)
            reasons.append(f"{name} is predicted to be {_faster(self.chosen, rival)} than {rival.name}{idle}")
        return "; ".join(reasons)

    @property
    def gain_of_separation(self) -> float | None:
        """Samples per second of the fastest that separates roles, over the fastest that does not, minus 1."""
        apart, together = self._fastest(True), self._fastest(False)
        return None if apart is None or together is None else together.seconds / apart.seconds - 1

    def rows(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        """The headings and lines of a table of the best predictions; the chosen one is marked."""
        best = sorted(self.predictions, key=lambda each: each.seconds)[:_SHOWN]
        shown = [each for each in self.predictions if each is self.chosen or any(each is one for one in best)]
        lines = [
            (
                f"{'>' if each is self.chosen else ' '} {each.name}",
                f"{each.seconds:.4g}",
                f"{each.samples_per_second:.4g}",
                *each.cells().values(),
            )
            for each in shown
        ]
        return ("", "s/step", "samples/s", *self.chosen.cells()), lines

    def _simpler_than(self, fastest: P) -> str:
        """Why not the fastest, as part of a sentence."""
        name, saved = self.chosen.name, 1 - fastest.seconds / self.chosen.seconds
        near = [each for each in self.predictions if each.seconds <= fastest.seconds * (1 + self.margin)]
        is_simplest = all(PLAN_KINDS.index(each.kind) >= PLAN_KINDS.index(self.chosen.kind) for each in near)
        within = f"within {100 * self.margin:.0f} % of the fastest ({fastest.name} would save {100 * saved:.1f} %)"
        if not is_simplest:
            return f"{name} is {within}, and takes fewer devices than what is simpler"
        if saved < _AS_FAST:
            return f"{name} is as fast as {fastest.name}, and simpler"
        return f"{name} is the simplest {within}"

    def _fastest(self, separates: bool) -> P | None:
        found = (each for each in self.predictions if each.separates == separates)
        return min(found, key=lambda each: each.seconds, default=None)


def choose_placement(costs: CostSource[P]) -> PlacementChoice[P]:
    """The fastest of the possible allocations, or a simpler one that is as fast as can be told.

    Raises:
        NoPlanError: no allocation is possible.
    """
    predictions = tuple(costs.predictions())
    fastest = min(each.seconds for each in predictions)
    near = [each for each in predictions if each.seconds <= fastest * (1 + costs.margin)]
    chosen = min(near, key=lambda each: (PLAN_KINDS.index(each.kind), each.seconds))
    return PlacementChoice(predictions, chosen, costs.margin)


def _faster(one: Prediction, other: Prediction) -> str:
    return f"{100 * (other.seconds / one.seconds - 1):.1f} % faster"


def _idle(rival: Prediction) -> str:
    """Says how idle ranks would be, as the end of a sentence; nothing where they would not be."""
    if not any(rival.idle.values()):
        return ""
    (role, share), *others = rival.idle.items()
    rest = "".join(f" and {role} ranks for {100 * share:.0f} %" for role, share in others)
    return f", where {role} ranks would be idle for {100 * share:.0f} % of a step{rest}"
