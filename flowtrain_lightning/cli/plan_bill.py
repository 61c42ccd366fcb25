"""Hours and cost of training on so many tokens by a plan."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from math import inf

from flowtrain_lightning.allocator import PlanningError
from flowtrain_lightning.allocator.digits import in_digits
from flowtrain_lightning.allocator.modelled_plan import ModelledPlan
from flowtrain_lightning.allocator.role_problem import Problems


@dataclass(frozen=True)
class Price:
    """The price of an hour of one device.

    Attributes:
        amount: above 0.
        currency: three letters.
    """

    amount: float
    currency: str = "USD"


def read_price(text: str) -> Price:
    """A price such as ``2.5``, in US dollars, or ``2.5EUR``.

    Raises:
        PlanningError: it is neither.
    """
    found = re.fullmatch(r"(.+?)\s*([A-Za-z]{3})?", text.strip())
    try:
        amount = float(found[1]) if found is not None else 0.0
    except ValueError:
        amount = 0.0
    if found is None or not 0 < amount < inf:
        raise PlanningError(f"--price is {text}; it must be a number above 0, with a currency or not, such as 2.5EUR.")
    return Price(amount, found[2].upper() if found[2] else Price.currency)


@dataclass(frozen=True)
class Bill:
    """Time and money of a run.

    Attributes:
        tokens: backbone tokens to train on.
        hours: of the run.
        hours_low: the lower end of the band of 80 %.
        hours_high: its upper end.
        device_hours: of all devices of the nodes that the plan starts on.
        cost: of these hours; None without a price.
        currency: of the cost; None without a price.
    """

    tokens: float
    hours: float
    hours_low: float
    hours_high: float
    device_hours: float
    cost: float | None
    currency: str | None

    def text(self) -> str:
        """The bill in a sentence, with what is asked for first."""
        hours, low, high = (in_digits(each, 3) for each in (self.hours, self.hours_low, self.hours_high))
        price = "" if self.cost is None else f" and {self.cost:,.0f} {self.currency}"
        told = f"{hours} hours ({low} to {high}){price} for training on {self.tokens:,.0f} tokens"
        return f"{told}: {in_digits(self.device_hours, 4)} device hours"

    def values(self) -> dict[str, float | str | None]:
        """The bill for JSON."""
        return asdict(self)


def bill_of(plan: ModelledPlan, problems: Problems, tokens: float, price: Price | None) -> Bill:
    """The bill of a plan.

    Args:
        plan: how to train.
        problems: what it is for.
        tokens: backbone tokens to train on.
        price: of an hour of one device.
    """
    backbone = problems.of_trunk
    hours = tokens / backbone.load.tokens * plan.seconds / 3600
    cluster = backbone.cluster
    nodes = plan.nodes(cluster.per_node)
    started = cluster.devices if nodes is None else nodes * cluster.per_node  # a node is rented whole
    device_hours = hours * min(started, cluster.devices)
    low, high = hours * plan.band.low, hours * plan.band.high
    if price is None:
        return Bill(tokens, hours, low, high, device_hours, None, None)
    return Bill(tokens, hours, low, high, device_hours, device_hours * price.amount, price.currency)
