"""What a user logs inside microbatches: collected on the device, weighted by target tokens, agreed once a step."""

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
"""Options of ``log`` that change nothing here."""


@dataclass(frozen=True)
class StepReport:
    """What all ranks know of a step when it is over.

    Attributes:
        loss: mean loss over the target tokens of all ranks.
        tokens: target tokens on all ranks.
        stop: somebody was asked to end (SIGTERM).
        values: logged name -> mean over all ranks, weighted by target tokens.
        options: logged name -> the keyword arguments of ``log``.
        notes: what ranks had to tell of the step, in JSON types; see `runtime.step_end`.
    """

    loss: float
    tokens: float
    stop: bool
    values: dict[str, float] = field(default_factory=dict)
    options: dict[str, dict[str, Any]] = field(default_factory=dict)
    notes: tuple[dict[str, Any], ...] = ()


class MetricAccumulator:
    """Collects one step's losses and logged values on a backbone rank, and agrees on them with the others.

    Names are agreed when they first occur; from then on one summed vector per step carries everything. Nothing is read
    from the device before the step ends.
    """

    def __init__(self) -> None:
        self._options: dict[str, dict[str, Any]] = {}
        self._agreed: list[str] = []
        self._pending: list[tuple[str, float | Tensor]] = []
        self._totals: Tensor | None = (
            None  # summed loss, target tokens, and the last number of tokens that is none, or 0
        )
        self._sums: dict[str, Tensor] = {}  # name -> weighted sum, weight

    def record(self, name: str, value: Number, options: dict[str, Any]) -> None:
        """Takes a value that was logged in the current microbatch.

        Raises:
            TypeError: it is no single number.
            ValueError: it is to be reduced otherwise than to its mean.
        """
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
        if name not in self._options:
            self._options[name] = {option: chosen for option, chosen in options.items() if option not in _NOT_NEEDED}
        self._pending.append((name, value.detach().double().reshape(()) if isinstance(value, Tensor) else float(value)))

    def close_microbatch(self, loss: Tensor, tokens: Number) -> None:
        """Weighs the values of the microbatch that just ended; the next ``record`` belongs to the next one."""
        device = loss.device
        if isinstance(tokens, Tensor):
            weight = tokens.detach().to(device, torch.float64, non_blocking=True).reshape(())
        else:
            weight = torch.full((), tokens, dtype=torch.float64, device=device)
        if self._totals is None:
            self._totals = torch.zeros(3, dtype=torch.float64, device=device)
        is_count = (weight >= 0) & (weight < torch.inf)
        no_count = torch.where(is_count, self._totals[2], weight)
        added = torch.stack([loss.detach().double().reshape(()), weight])
        self._totals = torch.cat([self._totals[:2] + added, no_count.reshape(1)])
        for name, value in self._pending:
            of_device = value.to(device, non_blocking=True) if isinstance(value, Tensor) else value
            weighed = torch.where(weight > 0, weight * of_device, 0.0)  # a mean over no targets may be NaN
            pair = torch.stack([weighed, weight])
            self._sums[name] = self._sums[name] + pair if name in self._sums else pair
        self._pending.clear()

    def agree(self, stop: bool, sum_over_ranks: SumOverRanks, gather_over_ranks: GatherOverRanks) -> StepReport:
        """Sums over all backbone ranks and begins the next step's metrics.

        Args:
            stop: this rank was asked to end.
            sum_over_ranks: sums a float64 CPU vector over the backbone ranks.
            gather_over_ranks: gathers a value from every backbone rank; called only when new names occur.

        Raises:
            ValueError: a microbatch's number of target tokens on this rank was negative, infinite or not a number.
        """
        vector = sum_over_ranks(self._vector(stop))
        if vector[_FIXED - 1] > 0:
            new = [(name, self._options[name]) for name in self._sums if name not in self._agreed]
            self._agree_on_names(gather_over_ranks(new))
            vector = sum_over_ranks(self._vector(stop))
        loss, tokens, stopping, _, *sums = vector.tolist()
        weighed = zip(self._agreed, sums[::2], sums[1::2], strict=True)
        means = {name: total / weight for name, total, weight in weighed if weight}
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
        self._totals, self._sums = None, {}
        self._pending.clear()

    def _vector(self, stop: bool) -> Tensor:
        totals = torch.zeros(3, dtype=torch.float64) if self._totals is None else self._totals
        nothing = totals.new_zeros(2)
        # All that was collected comes from the device at once.
        numbers = torch.cat([totals, *(self._sums.get(name, nothing) for name in self._agreed)]).tolist()
        if (no_count := numbers[2]) != 0:
            raise ValueError(
                f"`loss` (or `backbone_step`) returned {no_count:g} as its number of target tokens, by which the "
                "step's summed loss is divided. Return how many labels count in the microbatch: 0 or more."
            )
        new = len(self._sums.keys() - set(self._agreed))
        return torch.tensor([*numbers[:2], float(stop), float(new), *numbers[3:]], dtype=torch.float64)

    def _agree_on_names(self, found: Iterable[Iterable[tuple[str, dict[str, Any]]]]) -> None:
        options_of: dict[str, dict[str, Any]] = {}
        for name, options in (pair for pairs in found for pair in pairs):
            options_of.setdefault(name, options)  # ranks may differ in them; the first one's count everywhere
        for name in sorted(options_of):
            self._agreed.append(name)
            self._options[name] = options_of[name]
