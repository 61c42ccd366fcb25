"""Whether an encoder may encode a batch before its step, or take features that are kept: if nothing else decides."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from lightning.pytorch.core.hooks import DataHooks

from flowtrain_lightning.data.features.written_code import is_of_a_library, names_from

_OF_BATCHES = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
"""Hooks that may change a batch, which Lightning calls when its step begins."""

_OF_STEPS = ("global_step", "current_epoch", "fit_loop")
"""Names through which code reads what differs from step to step."""


_OUT_OF_STEPS = ("on_fit", "on_load", "on_predict", "on_sanity", "on_test", "on_train_e", "on_train_start")
"""Beginnings of the names of hooks that run where nothing is encoded ahead, such as between epochs."""

_IN_STEPS = ("training_step", "optimizer_step", "lr_scheduler_step", "configure_gradient_clipping")
"""Methods beside hooks that run in each step."""

_OF_WEIGHTS = {"grad", "data", "requires_grad"}
"""Names of what hooks set in weights."""

_WRITTEN_BY_OTHERS = ("flowtrain_lightning", "timm", "transformers")
"""Packages beside `is_of_a_library` whose code sets nothing that a user's reads, and reads nothing that it sets."""


def bound_to_step(module: Any, data: Any = None, callbacks: Iterable[Any] = ()) -> str | None:
    """What of the user's code makes features depend on the step in which they are made, beside media and weights.

    Args:
        module: its ``encode`` is looked through, with the methods that it names, and the forwards of its encoders.
        data: the data module, if there is one.
        callbacks: that may set what these read, as hooks of the module may.

    Returns:
        a clause that says it; None where there is nothing.
    """
    for owner in (module, data):
        for hook in _OF_BATCHES:
            if getattr(type(owner), hook, None) not in (None, getattr(DataHooks, hook)):
                return f"{type(owner).__name__} overrides `{hook}`, which may change a batch when its step begins"
    read = {name for name, _ in names_from(type(module), ["encode", "prepare_media"])}
    for name in _OF_STEPS:
        if name in read:
            return f"{type(module).__name__}.encode reads `{name}`, which may differ from step to step"
    for kind in {type(part) for part in _parts_of_encoders(module)}:
        read |= {name for name, _ in names_from(kind, ["forward"])} if _is_the_users(kind) else set()
    for owner in (module, *callbacks):
        for hook in _hooks_in_steps(type(owner)):
            changed = {name for name, sets in names_from(type(owner), [hook]) if sets} & read - _OF_WEIGHTS
            if changed:
                return (
                    f"{type(owner).__name__}.{hook} sets `{min(changed)}`, which {type(module).__name__}.encode reads"
                )
    return None


def _parts_of_encoders(module: Any) -> Iterator[Any]:
    """All modules of the halves that encode, as far as they are built."""
    for role in module.role_graph.producers:
        for path in module.halves[role]:
            try:
                yield from module.get_submodule(path).modules()
            except AttributeError:  # it is not built yet
                continue


def _hooks_in_steps(kind: type) -> list[str]:
    """Names of the methods of a user's class that run between the steps of an epoch, or in them."""
    own = (name for owner in kind.__mro__ if _is_the_users(owner) for name in vars(owner))
    hooks = (name for name in own if name in _IN_STEPS or name.startswith(("on_", "optimizer_")))
    return sorted({name for name in hooks if not name.startswith(_OUT_OF_STEPS)})


def _is_the_users(kind: type) -> bool:
    return not is_of_a_library(kind) and kind.__module__.partition(".")[0] not in _WRITTEN_BY_OTHERS
