"""Values logged inside microbatches: collected on the device, weighted by target tokens, agreed once a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from flowtrain_lightning.parallel.stages.stage_forward import computes_with_stand_ins

Number = float | int | Tensor
SumOverRanks = Callable[[Tensor], Tensor]
GatherOverRanks = Callable[[Any], list[Any]]

_FIXED = 4
"""Leading numbers of the exchanged vector: summed loss, target tokens, stop flag, names not yet agreed."""

_NOT_NEEDED = ("batch_size", "sync_dist", "sync_dist_group", "rank_zero_only")
"""Options of ``log`` that change nothing here."""


@dataclass(frozen=True)
class StepReport:
    """Results of a step that all ranks know when it is over.

    Attributes:
        loss: mean loss over the target tokens of all ranks; of several losses, the weighed sum of their means.
        tokens: target tokens on all ranks.
        stop: somebody was asked to end (SIGTERM).
        values: logged name -> mean over all ranks, weighted by target tokens.
        options: logged name -> the keyword arguments of ``log``.
        notes: what ranks had to tell of the step, in JSON types; see `runtime.step_end`.
        losses: of several losses, role -> the mean of its own and over how many it was taken.
        weights: logged name -> target tokens of the microbatches that have logged it.
    """

    loss: float
    tokens: float
    stop: bool
    values: dict[str, float] = field(default_factory=dict)
    options: dict[str, dict[str, Any]] = field(default_factory=dict)
    notes: tuple[dict[str, Any], ...] = ()
    losses: dict[str, tuple[float, float]] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)


class MetricAccumulator:
    """Collects one step's losses and logged values on a backbone rank, and agrees on them with the others.

    Names are agreed when they first occur; from then on one summed vector per step carries everything. Nothing is read
    from the device before the step ends.

    Args:
        beside: names of further losses, each summed over a count of its own.
    """

    def __init__(self, beside: Sequence[str] = ()) -> None:
        self._beside: dict[str, list[tuple[Tensor, Number]]] = {name: [] for name in beside}
        self._options: dict[str, dict[str, Any]] = {}
        self._agreed: list[str] = []
        self._pending: list[tuple[str, float | Tensor]] = []
        self._losses: list[Tensor] = []  # of the microbatches that are closed
        self._tokens: list[Number] = []
        self._values: dict[str, list[tuple[int, float | Tensor]]] = {}  # name -> microbatch and value
        self._doubtful: set[str] = set()  # names that were logged where numbers that are none stand for weights
        self._sound: set[str] = set()  # those that came to a number nevertheless

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
        if computes_with_stand_ins():
            self._doubtful.add(name)
        self._pending.append(
            (name, value.detach().to(torch.float64, copy=True) if isinstance(value, Tensor) else float(value))
        )

    def close_microbatch(self, loss: Tensor, tokens: Number, beside: Iterable[tuple[Tensor, Number]] = ()) -> None:
        """Keeps what the microbatch that just ended gave; the next ``record`` belongs to the next one.

        Nothing is computed before the step ends, and then over all microbatches at once.

        Args:
            loss: summed over its target tokens.
            tokens: how many these are.
            beside: the same of each further loss, in order.
        """
        for name, value in self._pending:
            self._values.setdefault(name, []).append((len(self._losses), value))
        self._pending.clear()
        self._losses.append(loss.detach())
        self._tokens.append(_counted(tokens))
        for found, (further, count) in zip(self._beside.values(), beside, strict=True):
            found.append((further.detach(), _counted(count)))

    def agree(self, stop: bool, sum_over_ranks: SumOverRanks, gather_over_ranks: GatherOverRanks) -> StepReport:
        """Sums over all backbone ranks and begins the next step's metrics.

        Args:
            stop: this rank was asked to end.
            sum_over_ranks: sums a float64 CPU vector over the backbone ranks.
            gather_over_ranks: gathers a value from every backbone rank; called only when new names occur.

        Raises:
            ValueError: a microbatch's number of target tokens on this rank was negative, infinite or not a number; or
                what was logged follows from weights that another stage holds.
        """
        vector = sum_over_ranks(self._vector(stop))
        if vector[_FIXED - 1] > 0:
            new = [(name, self._options[name]) for name in self._values if name not in self._agreed]
            self._agree_on_names(gather_over_ranks(new))
            vector = sum_over_ranks(self._vector(stop))
        loss, tokens, stopping, _, *sums = vector.tolist()
        report = StepReport(loss / tokens if tokens else 0.0, tokens, stopping > 0)
        for name in self._beside:
            summed, count, *sums = sums
            report.losses[name] = summed / count if count else 0.0, count
        for name, total, weight in zip(self._agreed, sums[::2], sums[1::2], strict=True):
            if weight:
                report.values[name], report.weights[name] = total / weight, weight
                report.options[name] = self._options[name]
        self.clear()
        return report

    def clear(self) -> None:
        """Forgets what was collected, as of a step that has failed; the names that are agreed stay so."""
        for collected in (self._losses, self._tokens, self._values, self._pending):
            collected.clear()
        for found in self._beside.values():
            found.clear()

    def _vector(self, stop: bool) -> Tensor:
        numbers = [*self._losses, *self._tokens]
        for found in self._beside.values():
            numbers += [number for pair in found for number in pair]
        for name in self._agreed:
            numbers += [value for _, value in self._values.get(name, ())]
        read = iter(_on_host(numbers))
        loss, tokens = sum(islice(read, len(self._losses))), list(islice(read, len(self._tokens)))
        for count in tokens:
            if not 0 <= count < math.inf:
                raise ValueError(
                    f"`loss` (or `backbone_step`) returned {count:g} as its number of target tokens, by which the "
                    "step's summed loss is divided. Return how many labels count in the microbatch: 0 or more."
                )
        sums: list[float] = []
        for found in self._beside.values():
            pairs = [(next(read), next(read)) for _ in found]
            sums += (sum(summed for summed, _ in pairs), sum(count for _, count in pairs))
        for name in self._agreed:
            weights = [tokens[microbatch] for microbatch, _ in self._values.get(name, ())]
            weighed = [weight * value for weight, value in zip(weights, read, strict=False) if weight > 0]
            self._refuse_stand_ins(name, weighed)
            sums += (sum(weighed), sum(weights))
        new = len(self._values.keys() - set(self._agreed))
        return torch.tensor([loss, sum(tokens), float(stop), float(new), *sums], dtype=torch.float64)

    def _refuse_stand_ins(self, name: str, weighed: Sequence[float]) -> None:
        """Raises for what has never been a number, since it follows from weights that another stage holds."""
        if name not in self._doubtful - self._sound or not weighed:
            return
        if all(math.isnan(value) for value in weighed):
            raise ValueError(
                f"log({name!r}, ...) was called in `merge`, or elsewhere before the blocks of a half in stages, with "
                "what follows from weights that the first stage holds. The last stage, whose values count, does not "
                "have these. Log it in `loss`, or give the half a layout without a pipeline degree."
            )
        self._sound.add(name)

    def _agree_on_names(self, found: Iterable[Iterable[tuple[str, dict[str, Any]]]]) -> None:
        options_of: dict[str, dict[str, Any]] = {}
        for name, options in (pair for pairs in found for pair in pairs):
            options_of.setdefault(name, options)  # ranks may differ in them; the first one's count everywhere
        for name in sorted(options_of):
            self._agreed.append(name)
            self._options[name] = options_of[name]


def _on_host(numbers: Sequence[Number]) -> list[float]:
    """Reads numbers. Those on a device come from it all at once, in the one wait for it."""
    there = [each for each in numbers if isinstance(each, Tensor) and not each.is_cpu]
    if not there:
        return list(map(float, numbers))
    came = iter(torch.stack([each.double().reshape(()) for each in there]).tolist())
    return [next(came) if isinstance(n, Tensor) and not n.is_cpu else float(n) for n in numbers]


def _counted(count: Number) -> Number:
    return count.detach().double() if isinstance(count, Tensor) else count
