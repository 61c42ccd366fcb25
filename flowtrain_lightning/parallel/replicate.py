"""The replicated layout: every rank of a role holds the whole half; gradients are summed once a step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

_BUCKET_BYTES = 32 << 20


def broadcast_half(tensors: Iterable[Tensor]) -> None:
    """Gives every rank of the default group the values of its rank 0 (parameters and buffers of one half)."""
    if _alone():
        return
    for tensor in tensors:
        values = tensor.detach()
        in_one_piece = values.contiguous()  # as gloo reads and writes them
        dist.broadcast(in_one_piece, src=0)
        if in_one_piece is not values:
            values.copy_(in_one_piece)


def reduce_gradients(parameters: Iterable[nn.Parameter], scale: float) -> None:
    """Sums the gradients over the ranks of the default group and multiplies them by ``scale``, in place.

    A parameter that got no gradient on any rank keeps ``grad = None``; one that got a gradient on some ranks only
    counts as zero on the others. Every rank passes the same parameters in the same order.

    Args:
        parameters: the parameters of one half; frozen ones are passed over.
        scale: usually one over the step's number of target tokens on all ranks.
    """
    by_kind: dict[tuple[torch.device, torch.dtype], list[nn.Parameter]] = defaultdict(list)
    for parameter in parameters:
        if parameter.requires_grad:
            by_kind[parameter.device, parameter.dtype].append(parameter)
    for group in by_kind.values():
        for bucket in _buckets(group):
            if _alone():
                for parameter in bucket:
                    if parameter.grad is not None:
                        parameter.grad.mul_(scale)
            else:
                _reduce_bucket(bucket, scale)


def _reduce_bucket(bucket: list[nn.Parameter], scale: float) -> None:
    # One collective carries the gradients and, behind them, one flag per parameter: "somebody has a gradient".
    total = sum(parameter.numel() for parameter in bucket)
    flat = bucket[0].new_zeros(total + len(bucket))
    start = 0
    for number, parameter in enumerate(bucket):
        if parameter.grad is not None:
            flat[start : start + parameter.numel()].copy_(parameter.grad.reshape(-1))
            flat[total + number] = 1
        start += parameter.numel()
    dist.all_reduce(flat)
    used = flat[total:].tolist()
    flat.mul_(scale)
    start = 0
    for parameter, flag in zip(bucket, used, strict=True):
        if flag > 0:
            gradient = flat[start : start + parameter.numel()].view_as(parameter)
            if parameter.grad is None:
                parameter.grad = gradient.clone()
            else:
                parameter.grad.copy_(gradient)
        start += parameter.numel()


def _buckets(parameters: list[nn.Parameter]) -> Iterable[list[nn.Parameter]]:
    bucket: list[nn.Parameter] = []
    size = 0
    for parameter in parameters:
        bucket.append(parameter)
        size += parameter.numel() * parameter.element_size()
        if size >= _BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
    if bucket:
        yield bucket


def _alone() -> bool:
    return not dist.is_initialized() or dist.get_world_size() == 1
