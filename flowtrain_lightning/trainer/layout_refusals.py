"""What may not be asked of a layout: refused before the first step, in sentences that say what to do."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.distributed.tensor import DTensor

from flowtrain_lightning.allocator import BACKBONE, ENCODER, Layout
from flowtrain_lightning.module import FlowModule
from flowtrain_lightning.parallel.deepspeed_partition import is_partitioned
from flowtrain_lightning.parallel.halves import half_trains


def refuse_precision_of_deepspeed(layouts: Mapping[str, Layout], precision: str) -> None:
    """Raises where DeepSpeed would get weights that are not float32.

    Args:
        layouts: role -> its layout.
        precision: of the Trainer.

    Raises:
        ValueError: says what was given and what to do.
    """
    for role, layout in layouts.items():
        if layout.by_deepspeed and precision not in ("32-true", "bf16-mixed"):
            raise ValueError(
                f"The {role} has shard {layout.shard!r} and Trainer(precision={precision!r}) was given, but DeepSpeed "
                "sums and optimizes float32 here. Take precision '32-true' or 'bf16-mixed', or shard 'fsdp'."
            )


def refuse_frozen_backbone(layouts: Mapping[str, Layout], module: FlowModule) -> None:
    """Raises where ranks share the weights of a backbone that is frozen while the encoder trains.

    Args:
        layouts: role -> its layout.
        module: that trains; its absent half has names and ``requires_grad`` too.

    Raises:
        ValueError: says what was given and what to do.
    """
    if layouts[BACKBONE].sums_in_step and half_trains(module, ENCODER) and not half_trains(module, BACKBONE):
        raise ValueError(
            "All weights of the backbone are frozen and sharded while the encoder trains: a microbatch without media "
            "items has no backward then, which other ranks wait for. Let some of its weights train, or take whole "
            "copies of the backbone."
        )


def refuse_unshared_sequences(layouts: Mapping[str, Layout], module: FlowModule) -> None:
    """Raises where context ranks are to share sequences that nobody would slice for them.

    Args:
        layouts: role -> its layout.
        module: that trains.

    Raises:
        ValueError: says what was given and what to do.
    """
    if layouts[BACKBONE].context == 1:
        return
    kind, instead = type(module), "or give the backbone a layout without a context degree"
    if kind.slice_tokens is FlowModule.slice_tokens:
        raise ValueError(
            f"The backbone has context {layouts[BACKBONE].context}, but {kind.__name__} does not say how its sequences "
            f"are sliced. Define slice_tokens, {instead}."
        )
    if kind.backbone_step is not FlowModule.backbone_step:
        raise ValueError(
            f"The backbone has context {layouts[BACKBONE].context}, but {kind.__name__} overrides backbone_step, in "
            f"which sequences are sliced. Define merge and loss instead of it, {instead}."
        )


def refuse_sharded_before(module: nn.Module) -> None:
    """Raises for a module that another Trainer's run has left in shards.

    Raises:
        ValueError: says what to do.
    """
    named = module.named_parameters()
    sharded = next((name for name, weight in named if isinstance(weight, DTensor) or is_partitioned(weight)), None)
    if sharded is not None:
        raise ValueError(
            f"The weight {sharded!r} is in shards, which an earlier run of another Trainer has left. Build the module "
            "anew and give the checkpoint of that run as ckpt_path, or go on with the same Trainer."
        )
