"""Halves that do not fit: what one of their layers adds is measured, and counts for all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from flowtrain_lightning.allocator.flops import FloatArray
from flowtrain_lightning.module import FlowModule
from flowtrain_lightning.placement.flop_counter import count_flops
from flowtrain_lightning.placement.half_timing import HalfTimes
from flowtrain_lightning.placement.meta_device import copy_on_meta
from flowtrain_lightning.placement.probes import Probe
from flowtrain_lightning.placement.profile import ProfileError

_DEPTHS = (1, 2)
_ALIKE = 0.01
"""Relative difference of FLOPs up to which what one layer adds may stand for every layer."""
_SPREAD = 0.02
"""Of the numbers that weights get; times do not depend on them, unless there are infinite ones among them."""


def extrapolate_layers(
    module: FlowModule, probes: Sequence[Probe], run: Callable[[FlowModule], HalfTimes]
) -> HalfTimes:
    """Extrapolates the halves' times from those with one and with two layers.

    Not every layer of a half need take as long as its second one: some may see a window and some all, and some may
    feed what comes later. So the FLOPs of the whole module are counted as well, and must be what those with one and
    with two layers let expect.

    Args:
        module: whose halves do not fit.
        probes: what is run.
        run: runs the halves of a copy with fewer layers.

    Raises:
        ProfileError: no half has a list of equal layers, or FLOPs say that the layers are not alike.
    """
    roles = module.role_graph.roles
    depths = {role: len(found) for role in roles if (found := longest_list(copy_on_meta(module), role)) is not None}
    name = type(module).__name__
    if not depths:
        raise ProfileError(
            f"{name} does not fit on the device, and none of its halves has an nn.ModuleList of equal layers of "
            "which one could be measured; measure on a larger device."
        )
    one, two = (_with_layers(module, depth) for depth in _DEPTHS)
    whole, of_one, of_two = (_total_flops(each, probes) for each in (module, one, two))
    for role in set(depths) & set(whole):
        expected = of_one[role] + (depths[role] - 1) * (of_two[role] - of_one[role])
        if (np.abs(expected - whole[role]) > _ALIKE * whole[role]).any():
            raise ProfileError(
                f"{name} does not fit on the device, and the layers of its {role} are not alike: by those of one layer "
                f"and of two, all {depths[role]} were to have {expected.sum():.3g} FLOPs, but they have "
                f"{whole[role].sum():.3g}; measure on a larger device."
            )
    return _extended(run(_in_memory(one)), run(_in_memory(two)), depths)


def longest_list(module: FlowModule, role: str) -> nn.ModuleList | None:
    """The list of a half with the most weights, among those with more than two layers that are all of one kind."""
    lists = [
        found
        for path in module.halves[role]
        for found in module.get_submodule(path).modules()
        if isinstance(found, nn.ModuleList) and len(found) > max(_DEPTHS) and len({*map(_kind, found)}) == 1
    ]
    return max(lists, key=lambda found: sum(weight.numel() for weight in found.parameters()), default=None)


def _kind(layer: nn.Module) -> tuple[object, ...]:
    weights = [(name, weight.shape, weight.dtype, weight.requires_grad) for name, weight in layer.named_parameters()]
    return type(layer), *weights


def _with_layers(module: FlowModule, depth: int) -> FlowModule:
    shallow = copy_on_meta(module)
    for role in module.role_graph.roles:
        if (found := longest_list(shallow, role)) is not None:
            del found[depth:]
    return shallow


def _total_flops(module: FlowModule, probes: Sequence[Probe]) -> dict[str, FloatArray]:
    """Role -> ``[2]`` FLOPs of forward and of backward over all probes."""
    return {
        role: np.array([sum(map(cost.of_set, (probe.lengths(role) for probe in probes))) for cost in passes])
        for role, flops in count_flops(module, probes).items()
        for passes in [(flops.forward, flops.backward)]
    }


def _in_memory(shallow: FlowModule) -> FlowModule:
    """Give memory to what has none: weights get small random numbers, buffers zeros."""
    moved: dict[int, Tensor] = {}
    for module in shallow.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            if weight.is_meta:
                drawn = torch.empty_like(weight, device="cpu").normal_(std=_SPREAD)
                setattr(module, name, moved.setdefault(id(weight), nn.Parameter(drawn, weight.requires_grad)))
        for name, buffer in list(module.named_buffers(recurse=False)):
            if buffer.is_meta:
                setattr(module, name, moved.setdefault(id(buffer), torch.zeros_like(buffer, device="cpu")))
    return shallow


def _extended(one: HalfTimes, two: HalfTimes, depths: Mapping[str, int]) -> HalfTimes:
    more = {role: depths.get(role, 1) - 1 for role in one.passes}
    return HalfTimes(
        passes={
            role: {
                probe: first + more[role] * np.maximum(two.passes[role][probe] - first, 0.0)
                for probe, first in of_role.items()
            }
            for role, of_role in one.passes.items()
        },
        optimizer={
            role: first + more[role] * max(two.optimizer[role] - first, 0.0) for role, first in one.optimizer.items()
        },
        feature_bytes=one.feature_bytes,
    )
