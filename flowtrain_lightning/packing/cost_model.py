"""The cost of computing a packed set of sequences: from a model's dimensions, or fitted to measured times."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from numbers import Real
from typing import Any

import numpy as np

from flowtrain_lightning.packing.step_plan import FloatArray, IntArray, PackingError

_HICCUP = 0.02
"""Relative error beyond which Huber's loss is linear at first, while it is unknown how far times spread."""
_OUTLIER = 1.5
"""Standard deviations of the relative errors beyond which it is linear at last."""


@dataclass(frozen=True)
class CostModel:
    """Cost of a packed set of sequences with lengths ``l``: ``linear * sum(l) + quadratic * sum(l**2) + constant``.

    The linear term stands for everything that is done token by token, the quadratic one for attention inside a
    sequence, the constant for what a forward costs however little it computes. Packing compares costs, so the unit
    is free as long as the three share it.

    Raises:
        ValueError: a coefficient is negative, infinite or not a number.
    """

    linear: float
    quadratic: float
    constant: float

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            is_number = isinstance(value, Real) and not isinstance(value, bool)
            if not (is_number and math.isfinite(value) and value >= 0):
                raise ValueError(
                    f"The {field.name} coefficient of a cost model is {value!r}; it must be a finite number >= 0."
                )

    def of_each(self, lengths: IntArray) -> FloatArray:
        """``[sequences]`` what each sequence adds to the set that it is packed into; without the constant."""
        exact = lengths.astype(np.float64)
        return self.linear * exact + self.quadratic * exact * exact

    def of_set(self, lengths: IntArray) -> float:
        """The cost of computing all sequences of ``lengths``, ``[sequences]``, as one packed set."""
        return float(self.of_each(lengths).sum()) + self.constant

    def weight_of_each(self, lengths: IntArray) -> FloatArray:
        """``[sequences]`` what packing balances: the cost of each, or its length if only the constant is not 0."""
        if self.linear == 0 and self.quadratic == 0:
            return lengths.astype(np.float64)
        return self.of_each(lengths)


DEFAULT_COST = CostModel(linear=1.0, quadratic=1.0 / 24_576, constant=0.0)
"""Attention equals the rest of the work at 24,576 tokens, as in a decoder of hidden size 4,096 (six times that)."""


def cost_from_flops(
    parameters: float,
    layers: int,
    hidden: int,
    *,
    flops_per_second: float,
    causal: bool = True,
    window: int | None = None,
) -> CostModel:
    """The cost model, in seconds, of forward and backward of a transformer that runs at a given speed.

    Args:
        parameters: weights that every token passes through.
        layers: layers with attention.
        hidden: their width.
        flops_per_second: what the device sustains: its peak times the share of it that is reached.
        causal: tokens attend to earlier ones only.
        window: tokens that attend to each other, for encoders with window attention: a linear cost; None for all.

    Raises:
        PackingError: a dimension or the speed is not above 0.
    """
    given = {"parameters": parameters, "layers": layers, "hidden": hidden, "flops_per_second": flops_per_second}
    for name, value in given.items():
        if not value > 0:
            raise PackingError(f"{name} is {value}; it must be above 0.")
    attention = (6 if causal else 12) * layers * hidden / flops_per_second
    linear = 6 * parameters / flops_per_second
    if window is not None:
        return CostModel(linear + attention * window, 0.0, 0.0)
    return CostModel(linear, attention, 0.0)


@dataclass(frozen=True)
class Observation:
    """One packed set of sequences that was computed.

    Attributes:
        tokens: sum of their lengths.
        squares: sum of the squares of their lengths.
        seconds: time that forward and backward took.
    """

    tokens: float
    squares: float
    seconds: float

    @classmethod
    def of(cls, lengths: IntArray, seconds: float) -> Observation:
        """The observation of sequences of ``lengths``, ``[sequences]``."""
        exact = lengths.astype(np.float64)
        return cls(float(exact.sum()), float((exact * exact).sum()), seconds)


def predict(cost: CostModel, observation: Observation) -> float:
    """Seconds that ``cost`` expects of an observed set."""
    return cost.linear * observation.tokens + cost.quadratic * observation.squares + cost.constant


def fit_cost(observations: Sequence[Observation]) -> CostModel:
    """The cost model, in seconds, that explains measured times best.

    Non-negative coefficients, by Huber's loss of relative errors, so that a hiccup of the machine counts little: first
    with a fixed scale, then with that of the errors which are left.

    Args:
        observations: at least 3, of sets that differ in tokens and in squares.

    Raises:
        PackingError: too few observations, or a time that is no positive number.
    """
    # Slow to import, and packing itself never fits.
    from scipy.optimize import least_squares, nnls

    if len(observations) < 3:
        raise PackingError(f"A cost model has 3 coefficients; {len(observations)} observations cannot fit it.")
    sizes = np.array([[item.tokens, item.squares, 1.0] for item in observations])
    seconds = np.array([item.seconds for item in observations])
    if not (np.isfinite(sizes).all() and np.isfinite(seconds).all() and (seconds > 0).all()):
        raise PackingError("Every observation needs finite sizes and a time above 0.")
    relative = sizes / seconds[:, None]
    scale = np.maximum(relative.max(axis=0), 1e-300)
    scaled = relative / scale
    solution, _ = nnls(scaled, np.ones(len(seconds)))
    threshold = _HICCUP
    for _ in range(2):
        solution = least_squares(
            lambda solution: scaled @ solution - 1,
            solution,
            jac=lambda _: scaled,
            bounds=(0, np.inf),
            method="dogbox",  # a coefficient that would be negative becomes exactly 0
            loss="huber",
            f_scale=threshold,
        ).x
        deviation = 1.4826 * float(np.median(np.abs(scaled @ solution - 1)))  # of normal errors, from their median
        threshold = max(_OUTLIER * deviation, 1e-9)
    linear, quadratic, constant = (solution / scale).tolist()
    return CostModel(linear, quadratic, constant)


class AdaptiveCost:
    """A cost model that follows a machine whose speed changes; every change is recorded.

    Every rank must feed it the same observations (those of all ranks, exchanged at the step's end): then the
    coefficients are equal everywhere. They change only in :meth:`end_step`.

    Args:
        cost: the coefficients to begin with.
        memory: steps whose observations are remembered.

    Attributes:
        cost: the coefficients of the running step.
        changes: ``(step, coefficients from that step on)``, for the checkpoint and for an exact replay.
        error: mean relative error of the last step's predictions.
    """

    def __init__(self, cost: CostModel, memory: int = 12) -> None:
        self.cost = cost
        self.changes: list[tuple[int, CostModel]] = [(0, cost)]
        self.error = 0.0
        self._memory = memory
        self._recent: list[list[Observation]] = []

    def end_step(self, step: int, observations: Sequence[Observation]) -> CostModel:
        """Learn from the step that ended; the coefficients returned hold from ``step + 1`` on."""
        measured: FloatArray = np.array([item.seconds for item in observations])
        predicted = np.array([predict(self.cost, item) for item in observations])
        self.error = float(np.mean(np.abs(predicted / measured - 1))) if len(measured) else 0.0
        self._recent = [*self._recent, list(observations)][-self._memory :]
        remembered = [item for of_step in self._recent for item in of_step]
        if len(remembered) >= 3 and self.error > 0.01:
            self.cost = fit_cost(remembered)
            self.changes.append((step + 1, self.cost))
        return self.cost

    def state_dict(self) -> dict[str, Any]:
        """The state on which the next steps depend, in JSON types."""
        recent = [[[item.tokens, item.squares, item.seconds] for item in of_step] for of_step in self._recent]
        return {"cost": asdict(self.cost), "error": self.error, "recent": recent}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there; changes made before are not among ``changes`` then."""
        self.cost = CostModel(**state["cost"])
        self.changes = [(0, self.cost)]
        self.error = state["error"]
        self._recent = [[Observation(*item) for item in of_step] for of_step in state["recent"]]
