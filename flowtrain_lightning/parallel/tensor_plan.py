"""How the layers of a half are divided among tensor-parallel ranks: a plan by module path, applied to its weights."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Literal, get_args

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

TensorStyle = Literal[
    "colwise", "rowwise", "colwise_gather_output", "embedding_rowwise", "replicated_with_grad_allreduce"
]
"""What a rank holds of one module, by the names that `transformers` has for it.

``"colwise"``: a linear layer's share of the outputs, which stay divided; ``"rowwise"``: its share of the inputs, which
come divided, and outputs are summed; ``"colwise_gather_output"``: a share of the outputs, which are put together, as of
a head; ``"embedding_rowwise"``: a share of the vocabulary; ``"replicated_with_grad_allreduce"``: all of a module that
works on divided outputs, such as the norm of each attention head. Modules without a style are whole on every rank.
"""

_DIVIDED: Mapping[str, tuple[type[nn.Module], str]] = {
    "colwise": (nn.Linear, "out_features"),
    "rowwise": (nn.Linear, "in_features"),
    "colwise_gather_output": (nn.Linear, "out_features"),
    "embedding_rowwise": (nn.Embedding, "num_embeddings"),
}
"""Style -> the kind of module that has it, and which of its sizes is divided."""

TensorPlan = Mapping[str, TensorStyle]
"""Path of a module -> its style; ``*`` stands for one part of a path, such as the number of a layer."""


def divide_layers(modules: Mapping[str, nn.Module], plan: TensorPlan, mesh: DeviceMesh) -> list[tuple[nn.Module, str]]:
    """Leave each rank its share of the layers that a plan names, whose weights become DTensors.

    Args:
        modules: path -> module, together the half.
        plan: its paths begin with those of ``modules``.
        mesh: the tensor-parallel ranks, in one dimension. All hold equal weights.

    Returns:
        owner and name of each parameter of which every rank has a summand of the gradient only.

    Raises:
        ValueError: the plan names no module, or one that cannot be divided so.
    """
    tied = _tied_parameters(modules.values())
    summed: list[tuple[nn.Module, str]] = []
    found = {name: module for path, half in modules.items() for name, module in half.named_modules(prefix=path)}
    for pattern, style in plan.items():
        matching = re.compile(re.escape(pattern).replace(r"\*", "[^.]+"))
        layers = {name: module for name, module in found.items() if matching.fullmatch(name)}
        if not layers:
            parts = ", ".join([*found][:5])
            raise ValueError(f"tensor_plan names {pattern!r}, but the half has no such module; it has {parts} ...")
        for name, layer in layers.items():
            if style == "replicated_with_grad_allreduce":
                summed += [
                    (owner, own) for owner in layer.modules() for own, _ in owner.named_parameters(recurse=False)
                ]
            else:
                parallelize_module(layer, mesh, _checked_style(name, layer, style, mesh.size()))
    for places in tied:
        _tie_again(places)
    return summed


def _checked_style(name: str, layer: nn.Module, style: TensorStyle, ranks: int) -> ParallelStyle:
    """How `parallelize_module` divides a layer, if it can be done evenly."""
    if style not in _DIVIDED:
        known = ", ".join(get_args(TensorStyle))
        raise ValueError(f"tensor_plan gives {name!r} the style {style!r}; known are {known}.")
    kind, divided = _DIVIDED[style]
    if not isinstance(layer, kind):
        raise ValueError(
            f"tensor_plan gives {name!r} the style {style!r}, but it is {type(layer).__name__}, no {kind.__name__}."
        )
    size = int(getattr(layer, divided))
    if size % ranks:
        raise ValueError(
            f"{name!r} has {divided} {size}, which {ranks} tensor ranks cannot divide evenly. Take another tensor "
            "degree, or leave the module out of tensor_plan."
        )
    match style:
        case "colwise":
            return ColwiseParallel()
        case "colwise_gather_output":
            return ColwiseParallel(output_layouts=Replicate())
        case "embedding_rowwise":
            return RowwiseParallel(input_layouts=Replicate())
        case _:
            return RowwiseParallel()


def _tied_parameters(modules: Iterable[nn.Module]) -> list[list[tuple[nn.Module, str]]]:
    """Owners and names of each parameter that stands in several places."""
    places: defaultdict[int, list[tuple[nn.Module, str]]] = defaultdict(list)
    for owner in dict.fromkeys(part for module in modules for part in module.modules()):
        for name, parameter in owner.named_parameters(recurse=False):
            places[id(parameter)].append((owner, name))
    return [of_one for of_one in places.values() if len(of_one) > 1]


def _tie_again(places: list[tuple[nn.Module, str]]) -> None:
    """Make one parameter of those in ``places``, which were one before they were divided.

    Raises:
        ValueError: they are divided differently.
    """
    (first, name), *others = places
    weight = first.get_parameter(name)
    for owner, own in others:
        other = owner.get_parameter(own)
        if _placements(other) != _placements(weight):
            raise ValueError(
                f"{type(first).__name__} and {type(owner).__name__} share one weight, but tensor_plan divides it in "
                "one of them only, or differently. Give an embedding 'embedding_rowwise' and its head "
                "'colwise_gather_output', or leave out both."
            )
        owner.register_parameter(own, weight)


def _placements(weight: nn.Parameter) -> object:
    return weight.placements if isinstance(weight, DTensor) else None
