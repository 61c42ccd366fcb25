"""Trades rows between ranks, each giving the others as many as it likes; gradients take the way back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def traded(tensor: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """All-to-all along the first dimension, with parts of different lengths. All ranks of the group call it.

    Args:
        tensor: ``[sum(sent), ...]`` the rows for every rank, in order of ranks.
        sent: how many are for each.
        received: how many come from each.
        group: the ranks.

    Returns:
        ``[sum(received), ...]`` the rows from every rank, in order of ranks.
    """
    result: Tensor = _Traded.apply(tensor, sent, received, group)  # type: ignore[no-untyped-call]
    return result


class _Traded(torch.autograd.Function):
    """See `traded`."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, tensor: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup
    ) -> Tensor:
        """Trades rows with the other ranks."""
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _trade(tensor, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of what this rank has given, back from the others."""
        return _trade(gradients[0], ctx.received, ctx.sent, ctx.group), None, None, None


def _trade(tensor: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    result = tensor.new_empty((sum(received), *tensor.shape[1:]))
    dist.all_to_all_single(result, tensor.contiguous(), list(received), list(sent), group=group)
    return result
