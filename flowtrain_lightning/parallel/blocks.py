"""The repeated blocks of a half: what they are, how a backward computes them again, and how they are compiled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from flowtrain_lightning.allocator.role_layout import Recompute
from flowtrain_lightning.attention import kernel_for
from flowtrain_lightning.parallel.experts.experts import number_of_experts
from flowtrain_lightning.parallel.experts.kept_choices import CHOICES, Contexts, keeping_choices
from flowtrain_lightning.parallel.sequence_parallel import for_recomputing

Compile = Literal["none", "blocks"]

_aten = torch.ops.aten
_KEPT = [
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.baddbmm.default,
    _aten._grouped_mm.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
]
"""Products of matrices, attention as one operation, and sums over ranks: what is dear to compute, or to send, for the
bytes that it takes to keep."""

_KEPT_PACKAGES = {"torch_attn", "flash_attn", "flash_attn_3"}
"""Namespaces of the kernels of packed attention, which may not be there."""


def repeated_blocks(module: nn.Module) -> list[nn.Module]:
    """The layers that a half is made of: classes with weights that a list of modules holds several times.

    The outermost ones count, in the order in which they stand.
    """
    kinds: set[type[nn.Module]] = set()
    for part in module.modules():
        if isinstance(part, nn.ModuleList | nn.Sequential):
            counts = Counter(type(child) for child in part if any(True for _ in child.parameters()))
            kinds |= {kind for kind, count in counts.items() if count > 1}
    kinds -= {nn.Linear, nn.LayerNorm, nn.Embedding, nn.ModuleList, nn.Sequential}
    found: list[nn.Module] = []

    def walk(part: nn.Module) -> None:
        for child in part.children():
            if type(child) in kinds:
                found.append(child)
            else:
                walk(child)

    walk(module)
    return found


def _keeps(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_dear = operation in _KEPT or operation.namespace in _KEPT_PACKAGES
    return CheckpointPolicy.MUST_SAVE if is_dear else CheckpointPolicy.PREFER_RECOMPUTE


def _keeps_choices(
    keep: Callable[..., CheckpointPolicy] | None, context: Any, operation: Any, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    """The policy of a compiled layer with experts; ``keep`` says what it would keep without them."""
    if operation in CHOICES:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE if keep is None else keep(context, operation, *args, **kwargs)


def recompute_in_backward(block: nn.Module, recompute: Recompute) -> None:
    """Let a block keep less and compute part of its forward again in the backward. No parameter is renamed.

    Args:
        block: whose ``forward`` is replaced.
        recompute: ``"full"`` keeps its inputs only, and which experts its tokens chose, ``"selective"`` also what
            products of matrices give, and ``"none"`` leaves the block as it is.
    """
    if recompute == "none":
        return
    keep = _keeps if recompute == "selective" else None
    eager = compiled = None if keep is None else partial(create_selective_checkpoint_contexts, keep)
    if any(number_of_experts(part) is not None for part in block.modules()):
        eager = partial(keeping_choices, eager)
        compiled = partial(create_selective_checkpoint_contexts, partial(_keeps_choices, keep))
    # A partial, whose arguments are copied with the block: a copy computes with weights of its own.
    block.forward = partial(_recomputed, block, block.forward, eager, compiled)  # type: ignore[method-assign]


def is_recomputed(block: nn.Module) -> bool:
    """Whether `recompute_in_backward` has let a block keep less."""
    return isinstance(block.forward, partial) and block.forward.func is _recomputed


def _recomputed(
    block: nn.Module,
    forward: Callable[..., Any],
    eager: Callable[[], Contexts] | None,
    compiled: Callable[[], Contexts] | None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    again = for_recomputing(block, forward)
    contexts = compiled if torch.compiler.is_compiling() else eager
    keeping: dict[str, Any] = {} if contexts is None else {"context_fn": contexts}
    return checkpoint(again, *args, use_reentrant=False, **keeping, **kwargs)


def compile_blocks(module: nn.Module, backend: str | Callable[..., Any] = "inductor") -> None:
    """Lets PyTorch compile each repeated layer in place, for any number of tokens; names of weights stay.

    All layers of a kind run the same code, so one compilation serves all of them: it takes minutes less than compiling
    the whole model, which is then nearly as fast.

    Args:
        module: whose layers; see `repeated_blocks`.
        backend: of ``torch.compile``.
    """
    torch.compiler.assume_constant_result(kernel_for)  # type: ignore[no-untyped-call]
    for block in repeated_blocks(module):
        block.compile(dynamic=True, backend=backend)  # type: ignore[no-untyped-call]
