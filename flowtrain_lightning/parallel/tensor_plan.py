"""Divides the layers of a half among tensor-parallel ranks, by a plan of module paths."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Literal, get_args

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.nn.utils import parametrize

from flowtrain_lightning.parallel.experts.experts import number_of_experts
from flowtrain_lightning.parallel.sequence_parallel import TOKENS, DividedTokens, divide_tokens

TensorStyle = Literal[
    "colwise",
    "rowwise",
    "colwise_gather_output",
    "embedding_rowwise",
    "replicated_with_grad_allreduce",
    "divided_tokens",
    "all_tokens",
]
"""A rank's part of one module and of the tokens, by the names that `transformers` has for it.

``"colwise"``: a linear layer's share of the outputs, which stay divided; ``"rowwise"``: its share of the inputs, which
come divided, and outputs are summed; ``"colwise_gather_output"``: a share of the outputs, which are put together, as of
a head; ``"embedding_rowwise"``: a share of the vocabulary; ``"replicated_with_grad_allreduce"``: all of a module that
works on divided outputs, such as the norm of each attention head. Modules without a style are whole on every rank.

``"divided_tokens"``: of repeated layers that follow each other, between whose divided layers each rank computes on its
share of the tokens (sequence parallelism). The layers that a plan names within are then ``"colwise"`` ones, which are
given a share of the tokens and see all, and ``"rowwise"`` ones, which return a share; norms and all else is whole on
every rank. ``"all_tokens"``: of a module within such a layer that takes a shape from what it is given, such as
attention, or gives it to several layers; its first argument then holds all tokens, as a DTensor for divided layers.
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


def divide_layers(
    modules: Mapping[str, nn.Module],
    plan: TensorPlan,
    mesh: DeviceMesh,
    elsewhere: Callable[[str], bool] = lambda _: False,
) -> list[tuple[nn.Module, str]]:
    """Leave each rank its share of the layers that a plan names, whose weights become DTensors.

    Args:
        modules: path -> module, together the half.
        plan: its paths begin with those of ``modules``.
        mesh: the tensor-parallel ranks, in one dimension. All hold equal weights.
        elsewhere: whether a module of this path computes on the ranks of another stage, where it is divided.

    Returns:
        owner and name of each parameter of which every rank has a summand of the gradient only.

    Raises:
        ValueError: the plan names no module, or one that cannot be divided so.
    """
    tied = _tied_parameters(modules.values())
    found = {name: module for path, half in modules.items() for name, module in half.named_modules(prefix=path)}
    named = []
    for pattern, style in plan.items():
        matching = _matching(pattern, found)
        named.append(({name: layer for name, layer in matching.items() if not elsewhere(name)}, style))
    stacks: dict[str, DividedTokens] = {}
    for layers, style in named:
        if style == "divided_tokens":
            stacks |= divide_tokens(layers, mesh)
    summed: dict[tuple[nn.Module, str], None] = {}
    for name, layer, style in ((name, layer, style) for layers, style in named for name, layer in layers.items()):
        stack = next((stack for path, stack in stacks.items() if name.startswith(f"{path}.")), None)
        match style:
            case "replicated_with_grad_allreduce" | "divided_tokens":
                summed |= dict.fromkeys(_places(layer))
            case "all_tokens":
                if any(number_of_experts(part) is not None for part in layer.modules()):
                    raise ValueError(
                        f"tensor_plan gives {name!r} the style 'all_tokens', but it has experts, to which each tensor "
                        "rank brings its own share of the tokens; leave it out."
                    )
                if stack is None:
                    raise ValueError(
                        f"tensor_plan gives {name!r} the style 'all_tokens', but the layer that it is part of has no "
                        "style 'divided_tokens', so it sees all tokens anyway; leave it out."
                    )
                stack.gather_input(layer)
            case _:
                _refuse_parts_of_heads(name, found, mesh.size())
                parallelize_module(layer, mesh, _checked_style(name, layer, style, mesh.size(), stack))
    for owners in tied:
        _tie_again(owners)
    return [(owner, own) for owner, own in summed if not isinstance(owner.get_parameter(own), DTensor)]


def _matching(pattern: str, modules: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """The modules that a pattern of a plan names."""
    matching = re.compile(re.escape(pattern).replace(r"\*", "[^.]+"))
    found = {name: module for name, module in modules.items() if matching.fullmatch(name)}
    if not found:
        parts = ", ".join([*modules][:5])
        raise ValueError(f"tensor_plan names {pattern!r}, but the half has no such module; it has {parts} ...")
    return found


def _places(module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Owner and name of each parameter."""
    for owner in module.modules():
        for name, _ in owner.named_parameters(recurse=False):
            yield owner, name


def _checked_style(
    name: str, layer: nn.Module, style: TensorStyle, ranks: int, stack: DividedTokens | None
) -> ParallelStyle:
    """Returns the style by which `parallelize_module` divides a layer, if it can be done evenly."""
    if style not in _DIVIDED:
        known = ", ".join(get_args(TensorStyle))
        raise ValueError(f"tensor_plan gives {name!r} the style {style!r}; known are {known}.")
    kind, divided = _DIVIDED[style]
    if not isinstance(layer, kind):
        raise ValueError(
            f"tensor_plan gives {name!r} the style {style!r}, but it is {type(layer).__name__}, no {kind.__name__}."
        )
    if parametrize.is_parametrized(layer):
        raise ValueError(
            f"tensor_plan gives {name!r} the style {style!r}, but its weight is computed from other parameters, as "
            "by weight_norm, which are not divided. Leave the module out of tensor_plan, or remove the parametrization."
        )
    size = int(getattr(layer, divided))
    if size % ranks:
        raise ValueError(
            f"{name!r} has {divided} {size}, which {ranks} tensor ranks cannot divide evenly. Take another tensor "
            "degree, or leave the module out of tensor_plan."
        )
    if stack is not None:
        if style not in ("colwise", "rowwise"):
            raise ValueError(
                f"tensor_plan gives {name!r} the style {style!r}, but it is part of a layer of divided tokens, which "
                "can have 'colwise' and 'rowwise' layers only."
            )
        if style == "rowwise":
            return RowwiseParallel(output_layouts=TOKENS)
        stack.give_share(layer)
        return ColwiseParallel(input_layouts=TOKENS)
    match style:
        case "colwise":
            return ColwiseParallel()
        case "colwise_gather_output":
            return ColwiseParallel(output_layouts=Replicate())
        case "embedding_rowwise":
            return RowwiseParallel(input_layouts=Replicate())
        case _:
            return RowwiseParallel()


_KEYS = ("k_proj", "v_proj", "key", "value", "k", "v", "wk", "wv", "to_k", "to_v", "qkv", "qkv_proj", "kv_proj")
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "kv_heads")


def _refuse_parts_of_heads(name: str, modules: Mapping[str, nn.Module], ranks: int) -> None:
    """Raises where ranks would get parts of a key head, as far as the module says how many it has.

    The layer's width may well be a multiple of the ranks: it is of several heads, each of which is computed whole.

    Raises:
        ValueError: names the weight and the number of heads.
    """
    owner, _, own_name = name.rpartition(".")
    attention = modules.get(owner)
    if attention is None or own_name not in _KEYS:
        return
    says = (getattr(part, key, None) for part in (attention, getattr(attention, "config", None)) for key in _KEY_HEADS)
    heads = next((number for number in says if isinstance(number, int)), ranks)
    if heads % ranks:
        raise ValueError(
            f"{f'{name}.weight'!r} makes {heads} key and value heads, which {ranks} tensor ranks cannot share: each "
            "computes whole heads. Take a tensor degree that divides them, or leave attention out of tensor_plan."
        )


def _tied_parameters(modules: Iterable[nn.Module]) -> list[list[tuple[nn.Module, str]]]:
    """Owners and names of each parameter that several modules own."""
    owners: defaultdict[int, list[tuple[nn.Module, str]]] = defaultdict(list)
    for owner in dict.fromkeys(part for module in modules for part in module.modules()):
        for name, parameter in owner.named_parameters(recurse=False):
            owners[id(parameter)].append((owner, name))
    return [of_one for of_one in owners.values() if len(of_one) > 1]


def _tie_again(owners: list[tuple[nn.Module, str]]) -> None:
    """Make one parameter of those in ``owners``, which were one before they were divided.

    Raises:
        ValueError: they are divided differently.
    """
    (first, name), *others = owners
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
