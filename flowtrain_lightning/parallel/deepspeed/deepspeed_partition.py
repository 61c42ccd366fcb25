"""Cuts weights as ZeRO-3 does: every rank keeps a run of elements, and the weight has none between uses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flowtrain_lightning.parallel.deepspeed.deepspeed_engine import deepspeed_environment, import_deepspeed
from flowtrain_lightning.parallel.halves import HalvedModule
from flowtrain_lightning.parallel.regions import ElementRun


def partition_weight(weight: nn.Parameter, ranks: dist.ProcessGroup | None, device: torch.device) -> None:
    """Takes from a weight all but this rank's run of elements. All ranks call it, for the same weights in one order.

    Args:
        weight: the first rank's numbers count. Nothing happens to one that was cut before.
        ranks: those among which it is cut; None is the default group.
        device: of this rank.
    """
    if is_partitioned(weight):
        return
    with deepspeed_environment(device):
        import_deepspeed().zero.Init(
            nn.ParameterList([weight]), data_parallel_group=ranks, dtype=torch.float32, mem_efficient_linear=False
        )


def is_partitioned(weight: Tensor) -> bool:
    """Whether ZeRO-3 has cut a weight."""
    return hasattr(weight, "ds_tensor")


def held_run(weight: Tensor) -> ElementRun:
    """The elements that this rank keeps of a weight that was cut; the last ranks may have none of a small one."""
    cut: Any = weight
    kept, shape = cut.ds_tensor, tuple(cut.ds_shape)
    start = dist.get_rank(cut.ds_process_group) * kept.numel()
    size = max(0, min(kept.numel(), cut.ds_numel - start))
    return ElementRun(kept.detach()[:size], start if size else 0, shape)


@contextmanager
def showing_shapes(module: nn.Module) -> Iterator[None]:
    """Inside, weights that were cut have the shapes that they have when they are gathered, and no numbers."""
    cut: list[Any] = [weight for weight in module.parameters() if is_partitioned(weight)]
    former = [weight.data for weight in cut]
    for weight in cut:
        weight.data = weight.data.new_zeros(()).expand(weight.ds_shape)
    try:
        yield
    finally:
        for weight, data in zip(cut, former, strict=True):
            weight.data = data


def held_state(module: HalvedModule) -> dict[str, Any]:
    """`nn.Module.state_dict`, with the run that this rank keeps of each weight that was cut."""
    assert isinstance(module, nn.Module)
    known = module.state_dict(keep_vars=True)
    return {
        name: value if not isinstance(value, Tensor) else held_run(value) if is_partitioned(value) else value.detach()
        for name, value in known.items()
    }
