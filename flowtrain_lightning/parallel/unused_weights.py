"""Weights in shards that only some ranks use: the others sum zeros for them, so that all ranks sum the same.

FSDP2 sums the gradients that a backward has left, and ranks whose samples use other weights would sum others. Here
each rank puts zeros in place of what its backward has not reached, just before FSDP2 looks at it, and keeps in mind
which weights these were: one that no rank has used in a step has no gradient, as in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule


class UnusedWeights:
    """Fills in gradients of a half that FSDP2 has divided.

    Args:
        root: holds the half, and is sharded itself.
        parameters: of the half, the shards.
        device_type: on which it computes.

    Raises:
        ValueError: weights that are gathered together want gradients of several types, which FSDP2 cannot sum at once.

    Attributes:
        numbers: of the parameters that want a gradient and that no backward of this step has reached on this rank.
    """

    def __init__(self, root: nn.Module, parameters: Sequence[nn.Parameter], device_type: str) -> None:
        self._parameters = parameters
        self._device_type = device_type
        numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
        self._groups: list[list[tuple[int, nn.Module, str]]] = []
        for module in root.modules():
            if isinstance(module, FSDPModule):
                gathered = [each for each in _gathered_with(module) if id(each[2]) in numbers]  # of this stage
                owned = [(numbers[id(parameter)], owner, name) for owner, name, parameter in gathered]
                group = [entry for entry in owned if parameters[entry[0]].requires_grad]
                _refuse_several_dtypes({parameters[number].dtype: name for number, _, name in group})
                self._groups.append(group)
                if module is not root and group:
                    module.register_forward_pre_hook(_want_gradient, with_kwargs=True, prepend=True)
                    module.register_forward_pre_hook(partial(self._expect, group), with_kwargs=True)
        self.numbers: set[int] = set()
        self.begin_step()

    def begin_step(self) -> None:
        """Nothing is used yet."""
        self.numbers = {number for group in self._groups for number, _, _ in group}

    def call(self, root: nn.Module, function: Callable[..., Any], *args: Any) -> Any:
        """``root(function, *args)``, in a way that the root is summed before its backward ends.

        To FSDP2 a module is done when the gradients of its inputs are there, or where none wants one, as of pixels,
        when the whole backward has ended, where nobody can step in. So the root gets one more that always wants a
        gradient, and to which the backward comes last.
        """
        if not torch.is_grad_enabled():
            return root(function, *args)
        end = torch.zeros((), device=self._device_type, requires_grad=True)
        return root(partial(self._until, function), end, *args)

    def _until(self, function: Callable[..., Any], end: Tensor, *args: Any) -> Any:
        result = function(*args)
        if end.grad_fn is None:  # nothing of the half wants a gradient
            return result
        end.grad_fn.register_prehook(self._fill_all)
        return _tied(result, end)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _expect(self, group: list[tuple[int, nn.Module, str]], _: nn.Module, args: Any, kwargs: Any) -> None:
        """In front of a block's forward, behind FSDP2's own hook: its sum follows on the gradients of these inputs."""
        first = next((tensor for tensor in _tensors((args, kwargs)) if tensor.grad_fn is not None), None)
        if torch.is_grad_enabled() and first is not None and first.grad_fn is not None:
            first.grad_fn.register_prehook(partial(self._fill, group))

    def _fill_all(self, _: tuple[Tensor, ...]) -> None:
        """Also those of blocks whose inputs want no gradient: FSDP2 sums them at the end of the whole backward."""
        for group in self._groups:
            self._fill(group)

    def _fill(self, group: list[tuple[int, nn.Module, str]], *_: Any) -> None:
        for number, owner, name in group:
            weight = getattr(owner, name)
            if weight is self._parameters[number]:
                return  # not gathered: the group has been summed, or has no part in this backward
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            else:
                self.numbers.discard(number)


def _refuse_several_dtypes(names: Mapping[torch.dtype, str]) -> None:
    """Raises for dtype -> the name of a weight that trains, of what is gathered together, with several dtypes."""
    if len(names) > 1:
        kinds = " and ".join(f"{name!r} is {dtype}" for dtype, name in names.items())
        raise ValueError(
            f"Weights that ranks gather together (FSDP2) train in several types: {kinds}. Give them one dtype where "
            "the half is built, freeze those of the other one, or take a layout of whole copies."
        )


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _want_gradient(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """In front of FSDP2's own hook: the inputs of a block, of which one at least wants a gradient.

    FSDP2 sums a block in the course of the backward if its inputs want one, and else at the end of it, behind the root.
    Where embeddings are frozen, as with adapters, ranks with pictures would do the one and those without the other.
    """
    if not torch.is_grad_enabled() or any(tensor.requires_grad for tensor in _tensors((args, kwargs))):
        return None
    given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
    for key, value in given.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            given[key] = value.detach().requires_grad_()
            break
    return tuple(given[index] for index in range(len(args))), {name: given[name] for name in kwargs}


def _gathered_with(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Owner, name and value of each parameter that is gathered when a sharded module computes."""
    seen: set[int] = set()

    def walk(part: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
        for name, parameter in part.named_parameters(recurse=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield part, name, parameter
        for child in part.children():
            if not isinstance(child, FSDPModule):
                yield from walk(child)

    return walk(module)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif is_dataclass(value) and not isinstance(value, type):
        yield from _tensors([getattr(value, part.name) for part in fields(value)])
    elif isinstance(value, dict | tuple | list):
        parts: Iterable[Any] = value.values() if isinstance(value, dict) else value
        for part in parts:
            yield from _tensors(part)


def _tied(value: Any, end: Tensor) -> Any:
    if isinstance(value, Tensor):
        return _Tied.apply(value, end) if value.requires_grad else value  # type: ignore[no-untyped-call]
    if isinstance(value, Mapping):
        return {key: _tied(part, end) for key, part in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):  # named tuples too, of which their order is read
        return tuple(_tied(part, end) for part in value)
    return value


class _Tied(torch.autograd.Function):
    """The first input. The backward comes to the second as well, with no gradient."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, end: Tensor) -> Tensor:
        return value.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None
