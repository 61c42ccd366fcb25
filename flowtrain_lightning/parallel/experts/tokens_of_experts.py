"""Experts beside tensor ranks: each of these brings a share of the tokens to them, so that none is computed twice.

Between layers of divided tokens a rank has a share anyway. Elsewhere all tensor ranks see the same tokens: there each
takes its share to the experts, and all get all results.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from flowtrain_lightning.parallel.experts.expert_adapters import adapted_stacks
from flowtrain_lightning.parallel.experts.experts import number_of_experts
from flowtrain_lightning.parallel.sequence_parallel import DividedTokens, layers_of_divided_tokens


def divide_tokens_of_experts(
    modules: Iterable[nn.Module], experts: Iterable[nn.Module], mesh: DeviceMesh
) -> list[tuple[nn.Module, str]]:
    """Lets each tensor rank bring a share of the tokens to the experts that ranks share.

    Args:
        modules: a half, whose layers are divided.
        experts: of all its layers.
        mesh: the tensor ranks, in one dimension.

    Returns:
        owner and name of each parameter of which every tensor rank has a summand of the gradient: of adapters (LoRA).
    """
    halves = list(modules)
    have_shares = {part for layer in layers_of_divided_tokens(halves) for part in layer.modules()}
    for module in experts:
        if module not in have_shares:
            tokens = DividedTokens([module], mesh)
            module.register_forward_pre_hook(partial(_take_shares_too, tokens), with_kwargs=True)
    return list(_adapters_of_experts(halves))


def _take_shares_too(
    tokens: DividedTokens, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of experts, the first of which is of a rank's share of the tokens already, with all others so."""
    given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
    first = next(iter(given))
    for key, value in given.items():
        if key != first and isinstance(value, Tensor):
            given[key] = tokens.own(value)
    return tuple(given[index] for index in range(len(args))), {name: given[name] for name in kwargs}


def _adapters_of_experts(modules: Iterable[nn.Module]) -> Iterator[tuple[nn.Module, str]]:
    """Owner and name of each weight of an adapter of experts, which is whole on every rank."""
    for layer in (layer for module in modules for layer in adapted_stacks(module)):
        experts = layer.get_base_layer()
        if number_of_experts(experts) is None:
            continue
        stacks = {id(weight) for weight in experts.parameters()}
        for owner in layer.modules():
            for name, weight in owner.named_parameters(recurse=False):
                if id(weight) not in stacks:
                    yield owner, name
