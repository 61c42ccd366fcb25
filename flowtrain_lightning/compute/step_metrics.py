"""What a user logs inside microbatches: collected, weighted by target tokens, agreed once a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import torch
from torch import Tensor

Number = float | int | Tensor
SumOverRanks = Callable[[Tensor], Tensor]
GatherOverRanks = Callable[[Any], list[Any]]

_FIXED = 4
"""Leading numbers of the exchanged vector: summed loss, target tokens, stop flag, names not yet agreed."""

_NOT_NEEDED = ("batch_size", "sync_dist", "sync_dist_group", "rank_zero_only")
"""Options of ``log`` that change nothing here; their values may be what cannot be sent to other ranks."""


@dataclass(frozen=True)
class StepReport:
    """What all ranks know of a step when it is over.

    Attributes:
        loss: mean loss over the target tokens of all ranks.
        tokens: target tokens on all ranks.
        stop: somebody was asked to end (SIGTERM).
        values: logged name -> mean over all ranks, weighted by target tokens.
        options: logged name -> the keyword arguments of ``log``.
        times: role -> ``[tokens or patches, sum of their squares, seconds]`` of all that its ranks computed, if asked.
    """

    loss: float
    tokens: float
    stop: bool
    values: dict[str, float] = field(default_factory=dict)
    options: dict[str, dict[str, Any]] = field(default_factory=dict)
    times: dict[str, list[list[float]]] = field(default_factory=dict)


class MetricAccumulator:
    """Collects one step's losses and logged values on a backbone rank, and agrees on them with the others.

    Names are agreed when they first occur; from then on one summed vector per step carries everything.
    """

    def __init__(self) -> None:
        self._options: dict[str, dict[str, Any]] = {}
        self._agreed: list[str] = []
        self._pending: list[tuple[str, Tensor]] = []
        self._loss: Number = 0.0
        self._tokens: Number = 0.0
        self._no_count: Number = 0.0
        self._sums: dict[str, tuple[Number, Number]] = {}

    def record(self, name: str, value: Number, options: dict[str, Any]) -> None:
        """Takes a value that was logged in the current microbatch."""
        if not isinstance(value, Real | Tensor) or (isinstance(value, Tensor) and value.numel() != 1):
            raise TypeError(
                f"log({name!r}, ...) inside a microbatch takes a number or a tensor of one element, but got "
                f"{type(value).__name__}. Log a metric's value (`metric(...)` or `metric.compute()`), not the object."
            )
        if options.pop("reduce_fx", "mean") not in ("mean", torch.mean):
            raise ValueError(
                f"log({name!r}, reduce_fx=...) inside a microbatch supports the token-weighted mean only. For another "
                "reduction keep the values and log the result in the epoch-end hook."
            )
        kept = {option: chosen for option, chosen in options.items() if option not in _NOT_NEEDED}
        self._options.setdefault(name, kept)
        number = value.detach() if isinstance(value, Tensor) else torch.tensor(float(value))
        self._pending.append((name, number.double().reshape(())))

    def close_microbatch(self, loss: Tensor, tokens: Number) -> None:
        """Weighs the values of the microbatch that just ended; the next ``record`` belongs to the next one."""
        weight = torch.as_tensor(tokens, dtype=torch.float64, device=loss.device)
        self._loss = self._loss + loss.detach().double()
        self._tokens = self._tokens + weight
        is_count = (weight >= 0) & (weight < torch.inf)  # not looked at before the step ends: no wait for the device
        self._no_count = torch.where(is_count, self._no_count, weight)
        for name, value in self._pending:
            value = value.to(loss.device)
            weighed = torch.where(weight > 0, value * weight, 0.0)  # a mean over no targets may be NaN
            total, weights = self._sums.get(name, (torch.zeros((), dtype=torch.float64), 0.0))
            self._sums[name] = (total + weighed, weights + weight)
        self._pending.clear()

    def agree(self, stop: bool, sum_over_ranks: SumOverRanks, gather_over_ranks: GatherOverRanks) -> StepReport:
        """Sums over all backbone ranks and starts the next step's page.

        Args:
            stop: this rank was asked to end.
            sum_over_ranks: sums a float64 CPU vector over the backbone ranks.
            gather_over_ranks: gathers an object from every backbone rank; called only when new names occur.

        Raises:
            ValueError: a microbatch's number of target tokens on this rank was negative, infinite or not a number.
        """
        if (found := float(self._no_count)) != 0:
            raise ValueError(
                f"`loss` (or `backbone_step`) returned {found:g} as its number of target tokens, by which the step's "
                "summed loss is divided. Return how many labels count in the microbatch: 0 or more."
            )
        vector = sum_over_ranks(self._vector(stop))
        if vector[_FIXED - 1] > 0:
            self._agree_on_names(gather_over_ranks([(name, self._options[name]) for name in self._unknown()]))
            vector = sum_over_ranks(self._vector(stop))
        loss, tokens, stopping = vector[: _FIXED - 1].tolist()
        sums = vector[_FIXED:].reshape(-1, 2).tolist()
        means = {name: total / weight for name, (total, weight) in zip(self._agreed, sums, strict=True) if weight}
        self.clear()
        return StepReport(
            loss=loss / tokens if tokens else 0.0,
            tokens=tokens,
            stop=stopping > 0,
            values=means,
            options={name: self._options[name] for name in means},
        )

    def clear(self) -> None:
        """Forgets what was collected, as of a step that has failed; the names that are agreed stay so."""
        self._loss, self._tokens, self._no_count, self._sums = 0.0, 0.0, 0.0, {}
        self._pending.clear()

    def _vector(self, stop: bool) -> Tensor:
        numbers: list[Number] = [self._loss, self._tokens, float(stop), float(len(self._unknown()))]
        for name in self._agreed:
            numbers.extend(self._sums.get(name, (0.0, 0.0)))
        return torch.tensor([float(number) for number in numbers], dtype=torch.float64)

    def _unknown(self) -> list[str]:
        return [name for name in self._sums if name not in self._agreed]

    def _agree_on_names(self, found: Iterable[list[tuple[str, dict[str, Any]]]]) -> None:
        options_of: dict[str, dict[str, Any]] = {}
        for name, options in (pair for pairs in found for pair in pairs):
            options_of.setdefault(name, options)  # ranks may differ in them; the first one's count everywhere
        for name in sorted(options_of):
            self._agreed.append(name)
            self._options[name] = options_of[name]
