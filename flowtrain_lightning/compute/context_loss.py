"""The loss of context ranks must be a sum over tokens: for the same outputs, that of two parts adds up to the whole's.

What ranks compute together differs from one rank's by rounding, several per cent in bfloat16, and a loss that is
weighed with how many tokens or targets it is given can hide there. So the user's `loss` is called by itself, with
outputs that were computed once: nothing but the order of a sum may then differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flowtrain_lightning.compute.named_losses import loss_names, returned_losses
from flowtrain_lightning.compute.step_metrics import MetricAccumulator
from flowtrain_lightning.data import PackedBatch

_MOST_TOKENS = 256
_TIMES_ROUNDING = 3.0
_LEAST_SLACK = 1e-5
"""Relative: a sum in float32 in another order, times ten."""
_OF_EPSILON = 0.25
"""Of the outputs' unit of rounding: what a head inside of `loss` may round otherwise for other rows, on average."""

Call = Callable[[Callable[..., Any]], Any]
"""Runs a function as a forward of the half."""


class _NoRowsError(Exception):
    """Outputs hold something else than a row for each token."""


@dataclass(frozen=True)
class Parts:
    """Losses of the same outputs.

    Attributes:
        whole: of all tokens at once.
        apart: the sum over two parts.
        differ: by more than rounding explains.
    """

    whole: float
    apart: float
    differ: bool


class LossInParts:
    """Notes the outputs that the user's ``loss`` is given, and takes the loss of parts of them.

    Args:
        module: the user's.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self._noted: tuple[Any, PackedBatch] | None = None

    @contextmanager
    def noting(self, tokens: int) -> Iterator[None]:
        """Inside, what the first call of ``loss`` with a whole piece is given is noted.

        Args:
            tokens: of the piece.
        """
        self._noted = None
        method = getattr(type(self._module), "loss", None)
        if not callable(method) or "loss" in vars(self._module):
            yield
            return
        loss = self._module.loss

        def note(outputs: Any, batch: PackedBatch, *args: Any, **kwargs: Any) -> Any:
            if self._noted is None and len(batch.tokens) == tokens:
                own = _window(batch)
                with suppress(_NoRowsError):
                    self._noted = _rows(outputs, own, tokens), batch.slice_tokens(own)
            return loss(outputs, batch, *args, **kwargs)

        self._module.loss = note
        try:
            yield
        finally:
            del self._module.loss

    def compare(self, call: Call) -> Parts | None:
        """The loss of what was noted, at once and in two parts. Ranks that share weights call it alike.

        Args:
            call: runs a forward.

        Returns:
            None where nothing can be told, since outputs are not one row for each token.
        """
        if self._noted is None:
            return None
        (outputs, batch), self._noted = self._noted, None
        count = len(batch.tokens)
        place = _cut(batch)
        parts = [slice(0, place), slice(place, count)]
        try:
            with torch.no_grad():
                whole, of_type = self._loss(call, outputs, batch)
                changed, _ = self._loss(call, _rounded(outputs), batch)
                losses = [self._loss(call, _rows(outputs, own, count), batch.slice_tokens(own))[0] for own in parts]
        except Exception:  # it keeps something of the whole microbatch, say; the comparison of gradients is left
            return None
        scale = abs(whole) + sum(map(abs, losses))
        slack = max(_LEAST_SLACK, _OF_EPSILON * _epsilon(outputs), torch.finfo(of_type).eps)
        bound = _TIMES_ROUNDING * abs(changed - whole) + slack * scale
        return Parts(whole, sum(losses), abs(sum(losses) - whole) > bound)

    def _loss(self, call: Call, outputs: Any, batch: PackedBatch) -> tuple[float, torch.dtype]:
        def forward() -> Any:
            with self._module.logging_into(MetricAccumulator()):
                return self._module.loss(outputs, batch)

        method = f"{type(self._module).__name__}.loss"
        loss, _ = returned_losses(call(forward), loss_names(self._module), method).summed
        return float(loss), loss.dtype


def _window(batch: PackedBatch) -> slice:
    """The tokens up to the last target: so many as show a weight, and at least two targets where there are two."""
    targets = batch.targets[-2:].tolist()
    stop = max(targets[-1] + 1 if targets else len(batch.tokens), min(2, len(batch.tokens)))
    return slice(max(0, min([stop - _MOST_TOKENS, *targets])), stop)


def _cut(batch: PackedBatch) -> int:
    """The place, between targets if it can be, at which the shares of targets in both parts are most unlike."""
    count, targets = len(batch.tokens), len(batch.targets)
    is_target = torch.zeros(count, dtype=torch.float64, device=batch.targets.device)
    is_target[batch.targets] = 1
    before = torch.arange(1, count, dtype=torch.float64, device=is_target.device)
    found = is_target.cumsum(0)[:-1]
    is_between = (found > 0) & (found < targets)
    unlike = found**2 / before + (targets - found) ** 2 / (count - before)
    return int((unlike + is_between * count).argmax()) + 1


def _rows(outputs: Any, own: slice, tokens: int) -> Any:
    """Outputs of some tokens.

    Raises:
        _NoRowsError: there is something in them that is not one for each token.
    """

    def take(tensor: Tensor) -> Tensor:
        if tensor.ndim and tensor.shape[0] == tokens:
            return tensor[own].detach().clone()
        if tensor.ndim > 1 and tensor.shape[0] == 1 and tensor.shape[1] == tokens:
            return tensor[:, own].detach().clone()
        raise _NoRowsError

    return _mapped(outputs, take)


def _rounded(outputs: Any) -> Any:
    """Outputs that differ by a rounding error of their type, at least of float32."""

    def change(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        error = max(torch.finfo(tensor.dtype).eps, torch.finfo(torch.float32).eps)
        draws = torch.rand(tensor.shape, dtype=torch.float64, device=tensor.device)
        return (tensor * (1 + error * (2 * draws - 1))).to(tensor.dtype)

    return _mapped(outputs, change)


def _epsilon(outputs: Any) -> float:
    """The largest unit of rounding among the types of outputs."""
    found = [0.0]

    def note(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            found.append(torch.finfo(tensor.dtype).eps)
        return tensor

    _mapped(outputs, note)
    return max(found)


def _mapped(outputs: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Outputs with each of their tensors changed, in dictionaries, tuples and data classes.

    Raises:
        _NoRowsError: there is something else in them.
    """
    if isinstance(outputs, Tensor):
        return change(outputs)
    if outputs is None or isinstance(outputs, bool | int | float | str):
        return outputs
    if is_dataclass(outputs) and not isinstance(outputs, type):
        named = {field.name: getattr(outputs, field.name) for field in fields(outputs) if field.init}
        return replace(outputs, **{name: _mapped(each, change) for name, each in named.items()})
    if type(outputs) is dict:
        return {name: _mapped(each, change) for name, each in outputs.items()}
    if type(outputs) in (tuple, list):
        return type(outputs)(_mapped(each, change) for each in outputs)
    raise _NoRowsError
