"""Whether an encoder may encode a batch before its step, or take features that are kept: if nothing else decides."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.core.hooks import DataHooks

from flowtrain_lightning.data.features.written_code import names_from

_OF_BATCHES = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
"""Hooks that may change a batch, which Lightning calls when its step begins."""

_OF_STEPS = ("global_step", "current_epoch", "fit_loop")
"""Names through which code reads what differs from step to step."""


def bound_to_step(module: Any, data: Any = None) -> str | None:
    """What of the user's code makes features depend on the step in which they are made, beside media and weights.

    Args:
        module: its ``encode`` is looked through, with the methods that it names.
        data: the data module, if there is one.

    Returns:
        a clause that says it; None where there is nothing.
    """
    for owner in (module, data):
        for hook in _OF_BATCHES:
            if getattr(type(owner), hook, None) not in (None, getattr(DataHooks, hook)):
                return f"{type(owner).__name__} overrides `{hook}`, which may change a batch when its step begins"
    kinds = [kind for kind in type(module).__mro__ if "encode" in vars(kind)]  # one may call that of another
    read = {name for kind in kinds for name, _ in names_from(kind, ["encode"])}
    for name in _OF_STEPS:
        if name in read:
            return f"{type(module).__name__}.encode reads `{name}`, which may differ from step to step"
    return None
