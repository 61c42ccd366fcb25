"""Compiling the repeated layers of a model: minutes less than compiling it whole, and nearly as fast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from torch import nn

from flowtrain_lightning.parallel.blocks import repeated_blocks

Compile = Literal["none", "blocks"]


def compile_blocks(module: nn.Module, backend: str | Callable[..., Any] = "inductor") -> None:
    """Lets PyTorch compile each repeated layer in place, for any number of tokens; names of weights stay.

    All layers of a kind run the same code, so one compilation serves all of them.

    Args:
        module: whose layers; see `repeated_blocks`.
        backend: of ``torch.compile``.
    """
    for block in repeated_blocks(module):
        block.compile(dynamic=True, backend=backend)  # type: ignore[no-untyped-call]
