"""Refuses optimizers that a run cannot step, in sentences that say what to do."""

from __future__ import annotations

from collections.abc import Iterable

from torch.distributed.tensor import DTensor
from torch.optim import LBFGS, Optimizer, SparseAdam

from flowtrain_lightning.parallel.muon import MuonAdamW

_ELEMENTWISE = ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD")
"""Optimizers of `torch.optim` for which a shard of a weight is as good as the whole."""

_COUPLING = ("Prodigy", "DAdaptAdam", "DAdaptAdaGrad", "DAdaptAdan", "DAdaptLion", "DAdaptSGD")
"""Known optimizers whose step for each weight follows from all weights, of which a rank may have one half only."""

_FUSED_ON_SHARDS = ("Adam", "AdamW")
"""Those whose fused kernels PyTorch runs on shards, too."""


def refuse_optimizers(optimizers: Iterable[Optimizer]) -> None:
    """Raises for what ``configure_optimizers`` may not return.

    Raises:
        TypeError: names the optimizer and what to do.
    """
    for optimizer in optimizers:
        if isinstance(optimizer, LBFGS):
            raise TypeError(
                "LBFGS runs a step's closure several times, but flowtrain runs each step once over all ranks. Use "
                "an optimizer that needs one evaluation per step, such as AdamW."
            )
        if isinstance(optimizer, SparseAdam):
            raise TypeError(
                "SparseAdam takes sparse gradients, but flowtrain sums dense ones over the ranks of a role. Use AdamW, "
                "and embeddings with sparse=False."
            )
        if type(optimizer).__module__.startswith("torchao."):
            raise TypeError(
                f"torchao's {type(optimizer).__name__} keeps its moments in a kind of tensor of its own, which "
                "checkpoints cannot hold. Take bitsandbytes.optim.AdamW8bit."
            )
        sharded = any(isinstance(weight, DTensor) for group in optimizer.param_groups for weight in group["params"])
        if sharded and type(optimizer).__name__ not in _ELEMENTWISE and not isinstance(optimizer, MuonAdamW):
            raise TypeError(
                f"{type(optimizer).__name__} is not known to treat every element of a weight by itself, and ranks hold "
                f"shards of the weights (FSDP2). Use one of {', '.join(_ELEMENTWISE)}, flow.MuonAdamW, which gathers "
                "what it needs whole, or whole copies."
            )
        is_split = any(weight.is_meta for group in optimizer.param_groups for weight in group["params"])
        if is_split and type(optimizer).__name__ in _COUPLING:
            raise TypeError(
                f"{type(optimizer).__name__} takes its step's size from all weights together, of which each rank has "
                f"those of its roles. Use an optimizer that steps each weight by itself, such as {_ELEMENTWISE[2]}, or "
                "placement='colocated' with whole copies."
            )
        if is_split and any(group.get("max_grad_norm") for group in optimizer.param_groups):
            raise TypeError(
                f"{type(optimizer).__name__}(max_grad_norm=...) clips by the norm of its own rank, which has weights "
                "of its roles only. Set it to None or 0, and Trainer(gradient_clip_val=...), which has one norm of all."
            )
        is_fused = any(group.get("fused") for group in optimizer.param_groups)
        if sharded and is_fused and type(optimizer).__name__ not in _FUSED_ON_SHARDS:
            raise TypeError(
                f"{type(optimizer).__name__}(fused=True) was given, but ranks hold shards of weights, which PyTorch's "
                f"fused kernels take for {' and '.join(_FUSED_ON_SHARDS)} only. Leave `fused` out: on GPUs "
                "`foreach` is used then, which steps all weights together, too."
            )
        if type(optimizer).__module__.startswith("lightning."):  # its stand-in where the user returned None
            raise TypeError(
                "configure_optimizers returned no optimizer. Return one that holds the parameters of both halves; "
                "`requires_grad_(False)` keeps weights as they are."
            )


def refuse_optimizers_of_shares(optimizers: Iterable[Optimizer]) -> None:
    """Raises for optimizers that cannot step a run of a weight's elements as they step the weight.

    Raises:
        TypeError: names the optimizer and what to do.
    """
    known = [name for name in _ELEMENTWISE if name != "Adagrad"]  # which makes its state before its part is known
    for optimizer in optimizers:
        if type(optimizer).__name__ not in known:
            raise TypeError(
                f"{type(optimizer).__name__} was given, but DeepSpeed optimizes a half, and its ranks step a run of "
                f"all weights' elements each. Use one of {', '.join(known)}, or whole copies (shard 'replicate')."
            )
