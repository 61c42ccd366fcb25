"""Sequence parallelism of tensor ranks: between divided layers each rank computes on its share of the tokens.

Norms, sums and whatever else a layer does for each token are then divided as its matrices are, and take a share of the
memory. What tensor ranks send stays the same: a sum over all tokens becomes a scatter before and a gather after
(Korthikanti et al., arXiv 2205.05198). Any number of tokens will do; DTensor pads what does not divide evenly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

TOKENS = Shard(-2)
"""Each rank has a run of the tokens of ``[..., tokens, width]``."""

_stacks: WeakKeyDictionary[nn.Module, DividedTokens] = WeakKeyDictionary()


class DividedTokens:
    """The tokens that go through a stack of layers, of which every tensor rank has a share.

    The first layer takes this rank's share of what it is given, the last one puts together what it returns.

    Args:
        layers: follow each other; the first argument and the (first) result of each is ``[..., tokens, width]``.
        mesh: the tensor ranks, in one dimension.
    """

    def __init__(self, layers: Sequence[nn.Module], mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._tokens = 0  # of the latest forward
        for layer in layers:
            _stacks[layer] = self
        layers[0].register_forward_pre_hook(self._begin, with_kwargs=True)
        layers[-1].register_forward_hook(self._end)

    def of_own(self, tensor: Tensor) -> DTensor:
        """All tokens, of which this rank gives its share, ``[..., own tokens, width]``."""
        shape = torch.Size((*tensor.shape[:-2], self._tokens, tensor.shape[-1]))
        stride = torch.empty(shape, device="meta").stride()
        dims = [Shard(tensor.ndim - 2)]
        return DTensor.from_local(tensor.contiguous(), self._mesh, dims, shape=shape, stride=stride)

    def own(self, tensor: Tensor) -> Tensor:
        """This rank's share of a tensor that all ranks have; the gradient is again of all tokens, on all ranks."""
        whole = DTensor.from_local(tensor, self._mesh, [Replicate()])
        return whole.redistribute(placements=[Shard(tensor.ndim - 2)]).to_local()

    def gather_input(self, module: nn.Module) -> None:
        """Let a module in the stack see all tokens, as a DTensor that its divided layers take as it is."""

        def gathered(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            return _with_first(args, kwargs, lambda own: self._sent(own).redistribute(placements=[Replicate()]))

        module.register_forward_pre_hook(gathered, with_kwargs=True)

    def give_share(self, layer: nn.Module) -> None:
        """Let a divided layer in the stack know that what it is given is this rank's share of the tokens."""

        def known(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            return args if isinstance(args[0], DTensor) else (self._sent(args[0]), *args[1:])

        layer.register_forward_pre_hook(known)

    def computed_again(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """A forward for the number of tokens of now, whatever other forwards run before it is computed again."""
        tokens = self._tokens

        def again(*args: Any, **kwargs: Any) -> Any:
            before, self._tokens = self._tokens, tokens
            try:
                return forward(*args, **kwargs)
            finally:
                self._tokens = before

        return again

    def add(self, hidden: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
        """Adds rows at positions among all tokens, each rank those among its own."""
        shape = (*hidden.shape[:-2], self._tokens, hidden.shape[-1])
        return hidden + self.own(rows.new_zeros(shape).index_add(hidden.ndim - 2, positions, rows))

    def _sent(self, own: Tensor) -> DTensor:
        """All tokens, in the precision in which divided layers compute: autocast would make it of them anyway."""
        device = own.device.type
        casts = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
        if casts and own.dtype == torch.float32:
            own = own.to(torch.get_autocast_dtype(device))
        return self.of_own(own)

    def _begin(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        def divided(whole: Tensor) -> Tensor:
            self._tokens = whole.shape[-2]
            return self.own(whole)

        return _with_first(args, kwargs, divided)

    def _end(self, _: nn.Module, args: tuple[Any, ...], result: Any) -> Any:
        own, *others = result if isinstance(result, tuple) else (result,)
        whole = self.of_own(own).redistribute(placements=[Replicate()]).to_local()
        return (whole, *others) if isinstance(result, tuple) else whole


def divide_tokens(layers: Mapping[str, nn.Module], mesh: DeviceMesh) -> dict[str, DividedTokens]:
    """Divide the tokens of layers; those of one parent follow each other.

    Args:
        layers: path -> layer, in order.
        mesh: the tensor ranks, in one dimension.

    Returns:
        path of each layer -> its stack.
    """
    by_parent: dict[str, dict[str, nn.Module]] = {}
    for path, layer in layers.items():
        by_parent.setdefault(path.rpartition(".")[0], {})[path] = layer
    found: dict[str, DividedTokens] = {}
    for of_parent in by_parent.values():
        found |= dict.fromkeys(of_parent, DividedTokens([*of_parent.values()], mesh))
    return found


def layers_of_divided_tokens(modules: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """The layers within modules in which each tensor rank has a share of the tokens."""
    yield from (part for module in modules for part in module.modules() if part in _stacks)


def add_at_tokens(layer: nn.Module, hidden: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
    """Adds rows to what a layer returns, also where tensor ranks have a share of its tokens each.

    Args:
        layer: which is about to return ``hidden``, as in one of its forward hooks.
        hidden: ``[..., tokens, width]``, of all tokens or of this rank's.
        positions: ``[rows]`` int64, among all tokens.
        rows: ``[rows, width]``, with the leading dimensions of ``hidden``.
    """
    stack = _stacks.get(layer)
    if stack is None:
        return hidden.index_add(hidden.ndim - 2, positions, rows)
    return stack.add(hidden, positions, rows)


def for_recomputing(layer: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a layer as it must run when a backward computes it again."""
    stack = _stacks.get(layer)
    return forward if stack is None else stack.computed_again(forward)


def _with_first(
    args: tuple[Any, ...], kwargs: dict[str, Any], change: Callable[[Tensor], Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments whose first one is changed, whether it was given by name or not."""
    if args:
        return (change(args[0]), *args[1:]), kwargs
    name = next(iter(kwargs))
    return args, {**kwargs, name: change(kwargs[name])}
