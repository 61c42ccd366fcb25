"""Attributes that a module has set on its weights, which stay where other weights take the place of these."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

_PARTS_OF_SHARDS = ("_local_tensor", "_spec", "_is_param")


@contextmanager
def keeping_marks(module: nn.Module) -> Iterator[None]:
    """Inside, weights of a module are replaced; afterwards those of the same names have the attributes of the former.

    ``configure_optimizers`` may sort weights into groups by such marks, as by Mamba's ``_no_weight_decay``: without
    them a weight would get another learning rate or decay than in one process.
    """
    named = module.named_parameters(remove_duplicate=False)
    marks = {name: found for name, weight in named if (found := _marks(weight))}
    yield
    named = module.named_parameters(remove_duplicate=False)
    for name, weight in ((name, weight) for name, weight in named if name in marks):
        for mark, value in marks[name].items():
            if not hasattr(weight, mark):
                setattr(weight, mark, value)


def _marks(weight: nn.Parameter) -> dict[str, Any]:
    """The marks alone: with what a shard is made of, former weights would keep their memory.

    Weights of other classes, such as those in 4 bits, keep there what they are made of, too.
    """
    if not isinstance(weight, DTensor) and type(weight) is not nn.Parameter:
        return {}
    return {name: value for name, value in vars(weight).items() if name not in _PARTS_OF_SHARDS}
