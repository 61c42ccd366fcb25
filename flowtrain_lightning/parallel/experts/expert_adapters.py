"""Adapters (LoRA) of a mixture's experts by ``peft``: each rank adds to its experts what the adapters make of them.

An adapter is two matrices for all experts of a layer, small beside these, so every rank has them as it has any other
weight. Their gradients are zero but for the rank's own experts, and are summed over all ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from flowtrain_lightning.parallel.gradients import local_part

_ADAPTERS = "expert_adapters"
"""Attribute of divided experts: the path of a stack -> what is added to it."""


@dataclass(frozen=True)
class StackAdapter:
    """What is added to a rank's share of a stack.

    Attributes:
        layer: of ``peft``, which has the adapter's matrices.
        names: of the adapters in it that count.
        own: the experts of this rank.
    """

    layer: Any
    names: tuple[str, ...]
    own: slice

    def __call__(self, stack: Tensor) -> Tensor:
        """A share of a stack with what is added, ``[own experts, ...]``, in its dtype."""
        for name in () if self.layer.disable_adapters else self.names:
            left, right, scale = self.layer.get_delta_factors(name)
            with torch.autocast(stack.device.type, enabled=False):  # which would round the stack, as nowhere else
                stack = torch.baddbmm(stack, left[self.own], right[self.own], alpha=scale)
        return stack


def adapted_stacks(module: nn.Module) -> Iterator[Any]:
    """The layers of ``peft`` in a module that adapt one stack of weights each (``target_parameters``)."""
    lora = sys.modules.get("peft.tuners.lora")
    if lora is not None:
        yield from (part for part in module.modules() if isinstance(part, lora.ParamWrapper))


def divide_adapter(layer: Any, own: slice) -> None:
    """Lets experts that are divided add their share of an adapter themselves: ``peft`` would add that of all.

    Args:
        layer: see `adapted_stacks`; it adapts divided experts.
        own: the experts of this rank.
    """
    experts = layer.get_base_layer()
    adapter = StackAdapter(layer, tuple(layer.active_adapters), own)
    setattr(experts, _ADAPTERS, {**getattr(experts, _ADAPTERS, {}), layer.parameter_name: adapter})
    trains = [weight for weight in layer.parameters() if weight.requires_grad]
    layer.set_adapter([])  # which freezes it, too
    for weight in trains:
        weight.requires_grad_()


def own_stack(experts: nn.Module, path: str) -> Tensor:
    """This rank's share of a stack as its experts compute with it, ``[own experts, ...]``."""
    owner, _, name = path.rpartition(".")
    stack = local_part(getattr(experts.get_submodule(owner), name))
    adapter: StackAdapter | None = getattr(experts, _ADAPTERS, {}).get(path)
    return stack if adapter is None else adapter(stack)


def stack_paths(experts: nn.Module) -> Iterator[str]:
    """The paths of all stacks of experts, also of those that ``peft`` adapts while a layer computes."""
    for path, owner in experts.named_modules():
        if "parametrizations" in path.split("."):
            continue
        names = [name for name, _ in owner.named_parameters(recurse=False)]
        if parametrize.is_parametrized(owner):
            names += owner.parametrizations.keys()  # type: ignore[union-attr,operator]
        yield from (f"{path}.{name}" if path else name for name in names)
