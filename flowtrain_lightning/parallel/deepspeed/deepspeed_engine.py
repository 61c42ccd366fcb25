"""DeepSpeed's engine for the ranks of one role: how it is started, and what it has no public name for."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from flowtrain_lightning.parallel.regions import OptimizerShare

Stage = Literal[1, 2, 3]
"""Of ZeRO: ranks share optimizer states, or those and gradients, or those and weights."""

_BUCKET_ELEMENTS = 16 << 20
_IN_ONE_PIECE = 1 << 50  # elements


def start_engine(
    model: nn.Module, groups: list[list[nn.Parameter]], ranks: Any, device: torch.device, stage: Stage
) -> tuple[Any, list[Tensor]]:
    """Gives a model to DeepSpeed, which cuts the weights of each group into a part for every rank.

    Args:
        model: its weights are float32.
        groups: weights that are optimized with the same settings; by ZeRO-3 there may be none, and no backward then.
        ranks: the process group of those that hold the model.
        device: of this rank.
        stage: of ZeRO.

    Returns:
        a `deepspeed.DeepSpeedEngine`, and of each group this rank's part, flat, which is to be stepped before the
        engine's own `step`; by ZeRO-3, instead of it.
    """
    # It calls collectives by names that torch has replaced; nobody who trains can change that.
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated\. Please use .*_single")
    optimizer = _SteppedByUser(groups) if groups else None
    config = {
        "train_micro_batch_size_per_gpu": 1,  # it counts forwards by itself only where it runs them
        "gradient_accumulation_steps": 1,
        "gradient_allreduce_op": "mean" if stage == 3 else "sum",  # ZeRO-3 knows no other
        "gradient_clipping": 0.0,  # else it clips to 1
        "zero_allow_untested_optimizer": True,
        "steps_per_print": None,
        "zero_optimization": {
            "stage": stage,
            "contiguous_gradients": stage > 1,  # without, ZeRO-1 needs no hooks on weights
            "overlap_comm": False,
            "reduce_bucket_size": _BUCKET_ELEMENTS,
            "allgather_bucket_size": _BUCKET_ELEMENTS,
            # Where the norm is not finite DeepSpeed would leave out the step; ZeRO-3's is never called.
            "compute_grad_norm": stage == 3,
            "sub_group_size": _IN_ONE_PIECE,
            # Weights are gathered for one module, and by the order of the last step no others ahead of it.
            "stage3_prefetch_bucket_size": 0,
            "stage3_max_reuse_distance": 0,
            "stage3_param_persistence_threshold": 0,
            "memory_efficient_linear": False,  # it would replace PyTorch's for all modules of the process
        },
    }
    with deepspeed_environment(device):
        engine, *_ = import_deepspeed().initialize(model=model, optimizer=optimizer, config=config, mpu=_Ranks(ranks))
    if optimizer is None:
        return engine, []
    return engine, _flat_shards(engine) if stage == 3 else _flat_parts(engine, dist.get_rank(ranks))


def import_deepspeed() -> Any:
    """The package, set to compile nothing and to be quiet."""
    import deepspeed

    # On a CPU it would compile an operation of its own for messages within a node. On a GPU it compiles its optimizers
    # alone, of which none is used, so that nvcc may be missing: it says so when it is imported, and goes on.
    deepspeed.ops.__compatible_ops__ = {**deepspeed.ops.__compatible_ops__, "deepspeed_shm_comm": False}
    deepspeed.utils.logger.setLevel("WARNING")
    return deepspeed


class _SteppedByUser(Optimizer):
    """An optimizer for DeepSpeed, which does nothing: the user's has stepped already when it is called."""

    def __init__(self, groups: list[list[nn.Parameter]]) -> None:
        super().__init__([{"params": weights} for weights in groups], {"lr": 0.0})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Does nothing."""


class _Ranks:
    """The ranks of a role, as DeepSpeed asks for them (its ``mpu``)."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        """The ranks that hold copies."""
        return self._group

    def get_data_parallel_world_size(self) -> int:
        """Their number."""
        return dist.get_world_size(self._group)

    def get_data_parallel_rank(self) -> int:
        """This one's number among them."""
        return dist.get_rank(self._group)

    def get_model_parallel_group(self) -> None:
        """There are no ranks that share a layer."""

    def get_model_parallel_world_size(self) -> int:
        """This rank alone."""
        return 1

    def get_model_parallel_rank(self) -> int:
        """Its number."""
        return 0


@contextmanager
def deepspeed_environment(device: torch.device) -> Iterator[None]:
    """Inside are the variables by which DeepSpeed finds its device and, where they are missing, asks MPI."""
    rank, ranks = str(dist.get_rank()), str(dist.get_world_size())
    found = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": str(device.index or 0), "DS_ACCELERATOR": device.type}
    former = {name: os.environ.get(name) for name in found}
    os.environ.update(found)
    try:
        yield
    finally:
        for name, value in former.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


# ---- what DeepSpeed has no public name for --------------------------------------------------------------------------


def share_of(weight: nn.Parameter, flat: Tensor) -> OptimizerShare:
    """Places of a weight's parts in a flat tensor of this rank."""
    mapping: Any = weight._hp_mapping  # type: ignore[attr-defined]
    if mapping is None:
        return OptimizerShare(flat, tuple(weight.shape), 0, 0, 0)
    part, place = mapping.lp_fragment_address, mapping.hp_fragment_address
    return OptimizerShare(flat, tuple(weight.shape), place.start, part.start, part.numel)


def summed_gradient(weight: nn.Parameter) -> Tensor:
    """This rank's part of a weight's gradient, as it was summed last."""
    mapping: Any = weight._hp_mapping  # type: ignore[attr-defined]
    gradient: Tensor = mapping.get_lp_grad_fragment(weight._index_in_param_group)  # type: ignore[attr-defined]
    return gradient


def _flat_parts(engine: Any, rank: int) -> list[Tensor]:
    """The memory that the optimizer steps by ZeRO-1 and ZeRO-2: this rank's parts of the weights.

    DeepSpeed would step a copy, which it makes for weights of half precision, and with these too.
    """
    optimizer = engine.optimizer
    flats = [parts[rank].detach().requires_grad_() for parts in optimizer.parallel_partitioned_bit16_groups]
    # Whatever knows of the copy forgets it, so that it takes no memory.
    optimizer.single_partition_of_fp32_groups = flats
    for group, flat in zip(optimizer.optimizer.param_groups, flats, strict=True):
        group["params"] = [flat]
    optimizer._link_all_hp_params()
    return flats


def _flat_shards(engine: Any) -> list[Tensor]:
    """The same by ZeRO-3."""
    optimizer = engine.optimizer
    optimizer.fp32_partitioned_groups_flat = flats = list(optimizer.fp16_partitioned_groups_flat)
    for flat in flats:
        flat.requires_grad_()
    return flats


def flat_gradients(engine: Any, flats: Sequence[Tensor]) -> list[Tensor]:
    """The memory in which ZeRO-3 sums this rank's parts of gradients, laid out as the flat tensors that are stepped."""
    return list(torch.split(engine.optimizer.grad_partitions_flat_buffer, [flat.numel() for flat in flats]))


def forget_hooks(engine: Any) -> None:
    """After an engine of ZeRO-3 was destroyed: lets another one set hooks of its own onto the same modules."""
    engine.module_forward_pre_hook.remove()
    engine.module_forward_post_hook.remove()
    for module in engine.module.modules():
        for name in ("pre_bwd_fn", "post_bwd_fn"):
            vars(module).pop(name, None)


@contextmanager
def linear_without_weights() -> Iterator[None]:
    """Inside, what linear layers keep for their backward are not the numbers of their weights, so that these can go."""
    from deepspeed.runtime.zero.linear import zero3_linear_wrap

    former, F.linear = F.linear, zero3_linear_wrap
    try:
        yield
    finally:
        F.linear = former
