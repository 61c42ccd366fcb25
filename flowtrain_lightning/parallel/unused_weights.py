"""Weights in shards that only some ranks use: the others sum zeros for them, so that all ranks sum the same.

FSDP2 sums the gradients that a backward has left, and ranks whose samples use other weights would sum others. Here
each rank puts zeros in place of what its backward has not reached, just before FSDP2 looks at it, and keeps in mind
which weights these were: one that no rank has used in a step has no gradient, as in one process. Nor has a tensor that
was given to the half and that its backward has not reached, of which FSDP2 makes zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

_NO_TENSORS = str | bytes | range
"""Sequences in which none can be."""


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
        summed: modules that are gathered by themselves, by number, whose gradients backwards of this step have summed.
    """

    def __init__(self, root: nn.Module, parameters: Sequence[nn.Parameter], device_type: str) -> None:
        self._parameters = parameters
        self._device_type = device_type
        numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
        self._groups: list[list[tuple[int, nn.Module, str]]] = []
        self.summed: set[int] = set()
        for module in root.modules():
            if isinstance(module, FSDPModule):
                gathered = [each for each in _gathered_with(module) if id(each[2]) in numbers]  # of this stage
                owned = [(numbers[id(parameter)], owner, name) for owner, name, parameter in gathered]
                group = [entry for entry in owned if parameters[entry[0]].requires_grad]
                _refuse_several_dtypes({parameters[number].dtype: name for number, _, name in group})
                self._groups.append(group)
                if module is not root and group:
                    module.register_forward_pre_hook(_want_gradient, with_kwargs=True, prepend=True)
                    module.register_forward_pre_hook(partial(self._expect, len(self._groups) - 1), with_kwargs=True)
        self.numbers: set[int] = set()
        self._awaits = False  # a block of the forward that runs sums gradients in its backward
        self.begin_step()

    def begin_step(self) -> None:
        """Nothing is used yet."""
        self.numbers = {number for group in self._groups for number, _, _ in group}
        self.summed.clear()

    def call(self, root: nn.Module, function: Callable[..., Any], *args: Any) -> Any:
        """``root(function, *args)``, in a way that the root is summed before its backward ends.

        To FSDP2 a module is done when the gradients of its inputs are there, or where none wants one, as of pixels,
        when the whole backward has ended, where nobody can step in. So the root gets one more that always wants a
        gradient, and to which the backward comes last.

        Raises:
            RuntimeError: no backward can follow, which other ranks would wait for.
        """
        if not torch.is_grad_enabled():
            return root(function, *args)
        self._awaits = False
        end = torch.zeros((), device=self._device_type, requires_grad=True)
        given = [tensor for tensor in _tensors(args) if tensor.requires_grad]
        reached: set[int] = set()
        for number, tensor in enumerate(given):
            if tensor.is_leaf:
                forget = partial(_forget_zeros, reached, number)
                tensor.register_post_accumulate_grad_hook(forget)  # type: ignore[no-untyped-call]
        return root(partial(self._until, function, reached), end, *args)

    def _until(self, function: Callable[..., Any], reached: set[int], end: Tensor, *args: Any) -> Any:
        numbers = count()
        result = function(*(_mapped(lambda tensor: _noting(tensor, reached, next(numbers)), arg) for arg in args))
        if self._awaits and not any(tensor.requires_grad for tensor in _tensors(result)):
            raise RuntimeError(
                "What a half in shards (FSDP2) returned, a loss or features, has no gradient, though its layers "
                "computed with gradients. Ranks that share weights all go back through them, or wait for each other "
                "without end. Return something that depends on the outputs, such as outputs.sum() * 0 where a "
                "microbatch has no targets, or freeze the half."
            )
        if end.grad_fn is None:  # nothing of the half wants a gradient
            return result
        end.grad_fn.register_prehook(self._fill_all)
        return _mapped(partial(_tied, end), result)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _expect(self, group: int, _: nn.Module, args: Any, kwargs: Any) -> None:
        """In front of a block's forward, behind FSDP2's own hook: its sum follows on the gradients of these inputs."""
        first = next((tensor for tensor in _tensors((args, kwargs)) if tensor.grad_fn is not None), None)
        if torch.is_grad_enabled() and first is not None and first.grad_fn is not None:
            self._awaits = True
            first.grad_fn.register_prehook(partial(self._fill, group))

    def _fill_all(self, _: tuple[Tensor, ...]) -> None:
        """Also those of blocks whose inputs want no gradient: FSDP2 sums them at the end of the whole backward."""
        for group in range(len(self._groups)):
            self._fill(group)

    def _fill(self, group: int, *_: Any) -> None:
        for number, owner, name in self._groups[group]:
            weight = getattr(owner, name)
            if weight is self._parameters[number]:
                return  # not gathered: the group has been summed, or has no part in this backward
            self.summed.add(group)
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
    elif isinstance(value, Mapping | Sequence) and not isinstance(value, _NO_TENSORS):
        parts: Iterable[Any] = value.values() if isinstance(value, Mapping) else value
        for part in parts:
            yield from _tensors(part)


def _mapped(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """The value with what a function makes of each tensor in it that wants a gradient."""
    if isinstance(value, Tensor):
        return function(value) if value.requires_grad else value
    if isinstance(value, Mapping):
        return {key: _mapped(function, part) for key, part in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, _NO_TENSORS):  # named tuples too: their order is read
        return tuple(_mapped(function, part) for part in value)
    return value


def _tied(end: Tensor, tensor: Tensor) -> Tensor:
    """The tensor, whose backward comes to ``end``, too."""
    tied: Tensor = _Tied.apply(tensor, end)  # type: ignore[no-untyped-call]
    return tied


def _noting(tensor: Tensor, reached: set[int], number: int) -> Tensor:
    """The tensor, whose number is put down when a backward comes to it."""
    noted: Tensor = _Noted.apply(tensor, reached, number)  # type: ignore[no-untyped-call]
    return noted


def _forget_zeros(reached: set[int], number: int, leaf: Tensor) -> None:
    if number not in reached:
        leaf.grad = None


class _Noted(torch.autograd.Function):
    """The first input. A backward that comes to it adds the number to the set."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, reached: set[int], number: int) -> Tensor:
        ctx.reached, ctx.number = reached, number
        return value.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        ctx.reached.add(ctx.number)
        return gradients[0], None, None


class _Tied(torch.autograd.Function):
    """The first input. The backward comes to the second as well, with no gradient."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, end: Tensor) -> Tensor:
        return value.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None
