"""What training on so many tokens takes and costs by a plan."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from flowtrain_lightning.allocator import BACKBONE
from flowtrain_lightning.allocator.modelled_plan import ModelledPlan, Problems


@dataclass(frozen=True)
class Bill:
    """Time and money of a run.

    Attributes:
        tokens: backbone tokens to train on.
        hours: of the run.
        hours_low: the lower end of the band of 80 %.
        hours_high: its upper end.
        device_hours: of all devices together, whether the plan uses them or not.
        cost: of these hours; None without a price.
    """

    tokens: float
    hours: float
    hours_low: float
    hours_high: float
    device_hours: float
    cost: float | None

    def text(self) -> str:
        """The bill in a sentence."""
        price = "" if self.cost is None else f", which cost {self.cost:,.0f}"
        return (
            f"Training on {self.tokens:,.0f} tokens: {self.hours:,.3g} hours ({self.hours_low:,.3g} to "
            f"{self.hours_high:,.3g}), {self.device_hours:,.4g} device hours{price}"
        )

    def values(self) -> dict[str, float | None]:
        """The bill for JSON."""
        return asdict(self)


def bill_of(plan: ModelledPlan, problems: Problems, tokens: float, price: float | None) -> Bill:
    """The bill of a plan.

    Args:
        plan: how to train.
        problems: what it is for.
        tokens: backbone tokens to train on.
        price: of an hour of one device.
    """
    backbone = problems[BACKBONE]
    hours = tokens / backbone.load.tokens * plan.seconds / 3600
    device_hours = hours * backbone.cluster.devices
    cost = None if price is None else device_hours * price
    return Bill(tokens, hours, hours * plan.band.low, hours * plan.band.high, device_hours, cost)
