"""How far a predicted step may be off: the band that holds 80 % of what is measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import exp, hypot

from flowtrain_lightning.allocator.candidates import Candidate
from flowtrain_lightning.allocator.coefficients import FITTED_DEVICES, ROW_BAND, WIDENING, assumed_efficiency
from flowtrain_lightning.allocator.role_layout import BACKBONE
from flowtrain_lightning.allocator.role_problem import RoleProblem


@dataclass(frozen=True)
class Band:
    """Factors of a predicted time between which 80 % of measured ones lie.

    Attributes:
        low: at most 1.
        high: at least 1.
    """

    low: float
    high: float


def step_band(problems: Mapping[str, RoleProblem], chosen: Mapping[str, Candidate], separate: bool) -> Band:
    """The band of a plan's time of a step.

    It is that of the rows to which the model of time was fitted, held out, and wider by what no row covers; causes are
    taken to be independent, so that squares add up. A cause that is in one role counts by the role's share of the time.

    Args:
        problems: role -> what is planned for.
        chosen: role -> its layout.
        separate: roles have devices of their own.
    """
    whole = sum(one.seconds for one in chosen.values())
    widths: dict[str, float] = {}
    for role, one in chosen.items():
        for cause in _uncovered(problems[role], one):
            widths[cause] = widths.get(cause, 0.0) + WIDENING[cause] * one.seconds / whole
    if separate:
        widths["roles on devices of their own"] = WIDENING["roles on devices of their own"]
    wider = hypot(*widths.values())
    below, above = ROW_BAND
    return Band(exp(-hypot(above, wider)), exp(hypot(below, wider)))


def _uncovered(problem: RoleProblem, one: Candidate) -> Iterator[str]:
    """The keys of `WIDENING` that hold for a role in its layout; a profile's measurements cover code and device."""
    device = problem.cluster.device
    if problem.efficiency == assumed_efficiency(device):
        yield "another code base"
        if device.name not in FITTED_DEVICES:
            yield "another device"
        if problem.precision.multiplied < 2:
            yield "fp8"
        if problem.role != BACKBONE:
            yield "an encoder"
        if any(part.experts is not None for part in problem.half.layers):
            yield "a mixture of experts"
    if one.layout.tensor * one.layout.context > 1:
        yield "tensor or context ranks"
    if one.layout.pipeline > 1:
        yield "a pipeline"
