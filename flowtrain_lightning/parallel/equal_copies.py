"""Weights that ranks hold alike must start alike and get equal gradients: compared in the first steps of a run."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from flowtrain_lightning.parallel.experts.expert_parallel import EXPERT
from flowtrain_lightning.parallel.gradients import local_part

STEPS = 10
"""A weight whose gradient is zero at first, such as the first factor of an adapter, is looked at this long."""

_TIMES = 2  # that a weight is compared with a gradient that is not zero
_CHUNK_BYTES = 32 << 20
_MOST_ROUNDING = 0.05
_BEYOND_NOISE = 1e3
_TINY = torch.finfo(torch.float64).tiny

Differences = Mapping[str, float]
"""Path of a weight -> how far a rank is from the mean of all, as a share of the mean's norm; the largest first."""


class EqualCopies:
    """Compares what ranks hold of the same weights, and of their gradients.

    Args:
        weights: path -> a weight of which each rank of the group holds the same elements.
        group: the ranks that are compared.
        device_type: on which the group communicates.
    """

    def __init__(self, weights: Mapping[str, nn.Parameter], group: dist.ProcessGroup, device_type: str) -> None:
        self._weights = dict(weights)
        self._group = group
        self._device_type = device_type
        self._steps = 0
        self._times_left = dict.fromkeys(weights, _TIMES)

    def compare_weights(self) -> Differences:
        """The weights in which ranks differ."""
        named = {name: weight for name, weight in self._weights.items() if weight.is_floating_point()}
        held = [local_part(weight.detach()) for weight in named.values()]
        return _beyond_rounding([*named], held, *self._measured(held, 0.0))

    def compare_gradients(self, gradients: Sequence[Tensor]) -> Differences:
        """The weights in whose gradients ranks differ, after a step. All ranks call it and get the same answer.

        A weight is done when its gradient was compared in two steps in which it was not zero. Then, and after the first
        ten steps, nothing is sent any more.

        Args:
            gradients: all that this rank holds; what is small beside their norm may be rounding.
        """
        self._steps += 1
        wanted = {name: weight for name, weight in self._weights.items() if weight.requires_grad}
        pending = {name: weight for name, weight in wanted.items() if self._times_left[name] > 0}
        if not pending or self._steps > STEPS:
            return {}
        held = [_gradient(weight) for weight in pending.values()]
        scale, pairs = self._measured(held, _norm(gradients))
        for name, (norm, _) in zip(pending, pairs, strict=True):
            self._times_left[name] -= norm > 0
        return _beyond_rounding([*pending], held, scale, pairs)

    def equal_gradients(self, gradients: Sequence[Tensor]) -> list[str]:
        """The weights in whose gradients ranks do not differ, after a step; see `compare_gradients`.

        Where each rank has a summand of a gradient, these differ. Gradients that may be rounding are passed over.

        Args:
            gradients: see there.
        """
        self._steps += 1
        wanted = {name: weight for name, weight in self._weights.items() if weight.requires_grad}
        pending = {name: weight for name, weight in wanted.items() if self._times_left[name] > 0}
        if not pending or self._steps > STEPS:
            return []
        held, found = [_gradient(weight) for weight in pending.values()], []
        scale, pairs = self._measured(held, _norm(gradients))
        for name, value, (norm, distance) in zip(pending, held, pairs, strict=True):
            noise = 8 * _rounding(value) * scale
            self._times_left[name] -= norm > 0
            if norm > _BEYOND_NOISE * noise and distance <= math.sqrt(_rounding(value)) * norm:
                found.append(name)
        return found

    def _measured(self, values: Sequence[Tensor], scale: float) -> tuple[float, list[tuple[float, float]]]:
        """The largest ``scale`` of all ranks; of each value the norm of its mean, and how far a rank is from it."""
        numbers = [scale, *(number for chunk in _chunks(values) for number in self._distances(chunk))]
        found = torch.tensor(numbers, dtype=torch.float64, device=self._device_type)
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self._group)
        scale, *rest = found.tolist()
        return scale, [*zip(rest[::2], rest[1::2], strict=True)]

    def _distances(self, values: Sequence[Tensor]) -> list[float]:
        """Of each value the norm of its mean over all ranks, and how far this rank's is from it."""
        dtype = torch.promote_types(values[0].dtype, torch.float32)
        flat = torch.cat([value.reshape(-1) for value in values]).to(self._device_type, dtype)
        mean = flat.clone()
        dist.all_reduce(mean, group=self._group)
        mean /= dist.get_world_size(self._group)
        sizes = [value.numel() for value in values]
        norms = [
            torch.linalg.vector_norm(part)
            for pair in zip(torch.split(mean, sizes), torch.split(flat - mean, sizes), strict=True)
            for part in pair
        ]
        found: list[float] = torch.stack(norms).tolist()
        return found


def _beyond_rounding(
    names: Sequence[str], values: Sequence[Tensor], scale: float, pairs: Sequence[tuple[float, float]]
) -> Differences:
    """Returns weights that differ between ranks beyond rounding, the most different first."""
    found: dict[str, float] = {}
    for name, value, (norm, distance) in zip(names, values, pairs, strict=True):
        rounding = _rounding(value)
        allowed = min(math.sqrt(rounding), _MOST_ROUNDING) * norm + 8 * rounding * scale
        if distance > allowed:
            found[name] = distance / max(norm, allowed, _TINY)
    return dict(sorted(found.items(), key=lambda pair: -pair[1]))


def whole_on_tensor_ranks(weight: nn.Parameter) -> bool:
    """Whether every tensor rank holds the same of a weight; what data-parallel ranks hold of it does not matter."""
    if not isinstance(weight, DTensor):
        return True
    names = weight.device_mesh.mesh_dim_names or ()
    divided = ("tensor", EXPERT)
    return all(
        name not in divided or place.is_replicate() for name, place in zip(names, weight.placements, strict=False)
    )


def forgotten_in_plan(differences: Differences) -> str:
    """The sentence on whole weights whose gradients differ between tensor ranks."""
    modules = [re.sub(r"(?<=\.)\d+(?=\.)", "*", name).rpartition(".")[0] for name in differences]
    lines = ", ".join(f'"{module}": "replicated_with_grad_allreduce"' for module in dict.fromkeys(modules))
    return (
        f"The gradient of {_named(differences)}, though each of them holds the whole weight: it is that of the rank's "
        "own share of the heads, of the width or of the tokens, and the ranks' weights would drift apart. If the "
        f"module sees this rank's share only, as a norm of each head does, write {lines} in tensor_plan. If it sees "
        "what all ranks see, something else differs between ranks that compute the same samples, such as random "
        "numbers of a generator of your own, or a condition on the rank."
    )


def unequal_weights(differences: Differences) -> str:
    """The sentence on weights that tensor ranks should hold alike before the first step, and do not."""
    return (
        f"The value of {_named(differences)} before the first step, though each of them should hold the same. Weights "
        "are equal after `setup`, so they were changed since on some ranks only, or with numbers that differ by rank, "
        "for example in `on_fit_start`. Change them alike on every rank, or where the half is built."
    )


def _named(differences: Differences) -> str:
    name, difference = next(iter(differences.items()))
    more = f" (and of {len(differences) - 1} more)" if len(differences) > 1 else ""
    return f"{name!r}{more} differs between tensor ranks by {difference:.1e} of its norm"


def needless_in_plan(names: Sequence[str]) -> str:
    """The sentence on weights whose gradients tensor ranks would sum, though each of them has the whole of it."""
    modules = ", ".join(dict.fromkeys(repr(name.rpartition(".")[0]) for name in names[:3]))
    return (
        f"The gradient of {names[0]!r} is equal on all tensor ranks, and its style in tensor_plan, "
        "'replicated_with_grad_allreduce' or that of a module around it, would sum it over them: it would be as many "
        f"times too large as there are ranks. What {modules} computes is whole on every rank: leave it out of "
        "tensor_plan, which names only what works on this rank's share of the heads, of the width or of the tokens."
    )


def _norm(gradients: Sequence[Tensor]) -> float:
    parts = [local_part(gradient) for gradient in gradients]
    return float(nn.utils.get_total_norm(parts)) if parts else 0.0


def _gradient(weight: nn.Parameter) -> Tensor:
    return torch.zeros_like(local_part(weight.detach())) if weight.grad is None else local_part(weight.grad)


def _rounding(value: Tensor) -> float:
    """The relative rounding of what a value was computed in."""
    kind = value.device.type
    computed_in = value.dtype
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind) and value.dtype == torch.float32:
        computed_in = torch.get_autocast_dtype(kind)
    return torch.finfo(computed_in).eps


def _chunks(values: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """The values in order, in lists of one dtype that are copied at a time."""
    chunk: list[Tensor] = []
    for value in values:
        if chunk and (chunk[0].dtype != value.dtype or sum(each.nbytes for each in chunk) >= _CHUNK_BYTES):
            yield chunk
            chunk = []
        chunk.append(value)
    if chunk:
        yield chunk
