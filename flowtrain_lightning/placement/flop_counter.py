"""FLOPs of a live module's halves, counted without computing: weights and pixels are on the meta device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.utils.flop_counter import FlopCounterMode

from flowtrain_lightning.compute.feature_spec import as_features
from flowtrain_lightning.compute.named_losses import loss_names, returned_losses
from flowtrain_lightning.compute.step_metrics import MetricAccumulator
from flowtrain_lightning.data import Features, PackedMedia, PackedTargets
from flowtrain_lightning.module import FlowModule
from flowtrain_lightning.packing import CostModel
from flowtrain_lightning.packing.cost_model import Observation, fit_cost
from flowtrain_lightning.parallel.halves import half_parameters, half_trains
from flowtrain_lightning.parallel.ranks.random_streams import global_seed, own_streams
from flowtrain_lightning.placement.meta_device import MetaTensorMode, copy_on_meta
from flowtrain_lightning.placement.probes import Probe
from flowtrain_lightning.placement.profile import FlopModel, ProfileError

_COUNTED, _LEAST = 6, 3
"""Probes that are looked at. Three would do for three coefficients if nothing but lengths mattered."""

Passes = dict[str, tuple[float, float]]
"""Role -> FLOPs of forward and of backward."""


def count_flops(module: FlowModule, probes: Sequence[Probe]) -> dict[str, FlopModel]:
    """Role -> FLOPs of its half by the lengths of what it computes; a role without work in any probe is absent.

    Everything is counted that the module's own methods ask torch to multiply, with what is frozen left out as torch
    leaves it out. Attention counts the pairs that its mask leaves (half of them where it is causal), and twice that in
    the backward; see `flowtrain_lightning.allocator.flops.model_flops`.

    Args:
        module: built or not. It is left as it is.
        probes: microbatches and encoder batches, of which a few that differ most are looked at.

    Raises:
        ProfileError: the module reads numbers that are not there without computing.
    """
    probes = _few(probes)
    try:
        copy = copy_on_meta(module)
        with own_streams():
            counted = [_count(copy, probe) for probe in probes]
    except Exception as error:  # of the user's methods, or of torch on their behalf
        reason = next(iter(str(error).splitlines()), "")
        raise ProfileError(
            f"The FLOPs of {type(module).__name__} cannot be counted, since its methods do not run without weights "
            f"and pixels ({type(error).__name__}: {reason})."
        ) from error
    roles = module.role_graph.roles
    return {role: _fitted(role, probes, counted) for role in roles if any(role in passes for passes in counted)}


def _few(probes: Sequence[Probe]) -> list[Probe]:
    """Some of those with the most kinds of media, and for roles with too few of these some more, by mean length."""

    def mean_length(probe: Probe) -> float:
        item = Observation.of(probe.lengths(probe.graph.trunk), 0.0)
        return item.squares / item.tokens

    def spread(among: Sequence[Probe]) -> list[Probe]:
        ordered = sorted(among, key=mean_length)
        picked = np.linspace(0, len(ordered) - 1, min(_COUNTED, len(ordered))).round().astype(int)
        return [ordered[number] for number in picked]

    most = max(len(probe.media) for probe in probes)
    found = spread([probe for probe in probes if len(probe.media) == most])
    for role in dict.fromkeys(role for probe in probes for role in probe.media):
        if sum(role in probe.media for probe in found) < _LEAST:
            found += [probe for probe in spread([each for each in probes if role in each.media]) if probe not in found]
    return found


class _Counter:
    """Runs parts of a pass on the meta device, and says how many FLOPs each has."""

    def __init__(self) -> None:
        self._mode = MetaTensorMode()

    def run(self, part: Callable[[], Any]) -> tuple[Any, float]:
        """Runs the part; returns its result and its FLOPs."""
        before = self._mode.attention_flops
        with self._mode, FlopCounterMode(display=False) as counter:
            result = part()
        return result, counter.get_total_flops() + self._mode.attention_flops - before

    def backward(self, outputs: tuple[Tensor, ...]) -> float:
        """FLOPs of the backward of all outputs that want one."""
        wanted = [out for out in outputs if out.requires_grad]
        if not wanted:
            return 0.0
        # Given tensors, `backward` is a function that a mode sees, and does not see what is computed again inside.
        edges = [get_gradient_edge(out) for out in wanted]
        gradients = [torch.empty_like(out) for out in wanted]
        return self.run(lambda: torch.autograd.backward(edges, gradients))[1]


def _count(module: FlowModule, probe: Probe) -> Passes:
    """The halves share no graph, as if they lived on two ranks."""
    counter, found = _Counter(), {}
    features: Features = {}
    graph = module.role_graph
    for role in filter(probe.media.__contains__, graph.producers):
        media = probe.media[role]
        trains = half_trains(module, role)
        pixels = _without_numbers(module, role, media)
        with torch.set_grad_enabled(trains):
            output, encoding = counter.run(partial(module.encode, pixels))
        outputs = output if isinstance(output, tuple) else (output,)
        leaves = tuple(out.detach().requires_grad_(trains and out.is_floating_point()) for out in outputs)
        features |= as_features(media.modality, leaves)
        found[role] = encoding, counter.backward(outputs)
    with module.logging_into(MetricAccumulator()):
        output, forward = counter.run(lambda: module.backbone_step(probe.packed, features, "train"))
        returned = returned_losses(output, loss_names(module), "backbone_step", more=True)
        made = returned.rest
        rows = tuple(made[0]) if made and isinstance(made[0], tuple) else tuple(made)
        read = tuple(row.detach().requires_grad_(row.requires_grad) for row in rows)
        for role in filter(probe.media.__contains__, graph.behind):
            media = _without_numbers(module, role, probe.media[role])
            items = PackedTargets(media, global_seed(), probe.batch.epoch, probe.batch.step)
            given = read[0] if len(read) == 1 else read
            (drawn, _), drawing = counter.run(partial(module.generator_loss, items, given))
            found[role] = drawing, counter.backward((drawn,))
    found[graph.trunk] = forward, counter.backward((*returned.losses, *rows))
    return found


def _without_numbers(module: FlowModule, role: str, media: PackedMedia) -> PackedMedia:
    """Media on the meta device, in the precision of the role's weights."""
    dtypes = (weight.dtype for weight in half_parameters(module, role) if weight.is_floating_point())
    return media.with_patches(media.pixels.to("meta", next(dtypes, torch.float32)))


def _fitted(role: str, probes: Sequence[Probe], counted: Sequence[Passes]) -> FlopModel:
    pairs = [
        (probe.lengths(role), passes[role]) for probe, passes in zip(probes, counted, strict=True) if role in passes
    ]
    forward, backward = (
        [Observation.of(lengths, passes[direction]) for lengths, passes in pairs] for direction in range(2)
    )
    return FlopModel(_cost(forward), _cost(backward))


def _cost(observations: Sequence[Observation]) -> CostModel:
    worked = [item for item in observations if item.seconds]
    return fit_cost(worked) if worked else CostModel(0.0, 0.0, 0.0)
