"""A copy of a module that belongs to no Trainer, and shares with the module only what nobody can copy."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, TypeVar

from torch import nn

AnyModule = TypeVar("AnyModule", bound=nn.Module)


def detached_copy(module: AnyModule, weights: Mapping[int, nn.Parameter] | None = None) -> AnyModule:
    """A copy of a LightningModule that belongs to no Trainer.

    Args:
        module: built or not.
        weights: ``id`` of a parameter -> what the copy has in its stead.
    """
    instead: dict[int, Any] = dict(weights or {})  # what is found here is not copied
    with suppress(RuntimeError):
        instead[id(module.trainer)] = None
    try:
        return copy.deepcopy(module, dict(instead))
    except Exception:  # of a lock, an open file, a tensor of a graph: the copy shares these
        return copy.deepcopy(module, instead | _uncopyable(module, instead))


def _uncopyable(module: nn.Module, instead: Mapping[int, Any]) -> dict[int, Any]:
    """``id`` of the innermost objects of a module that cannot be copied -> the objects."""
    found: dict[int, Any] = {}
    known = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())} | dict(instead)
    at_fault: dict[int, bool] = {}

    def look(value: Any) -> bool:
        """Whether it cannot be copied; true too of an object that is being looked at, which points back at itself."""
        if id(value) not in at_fault:
            at_fault[id(value)] = True
            try:
                copy.deepcopy(value, known | found)
            except Exception:  # whatever objects raise that are not made to be copied
                if True not in [look(part) for part in _parts(value)]:
                    found[id(value)] = value
            else:
                at_fault[id(value)] = False
        return at_fault[id(value)]

    look(module)
    return found


def _parts(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, list | tuple | set | frozenset):
        return list(value)
    return list(getattr(value, "__dict__", {}).values())
