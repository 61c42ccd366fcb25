"""Refuses callbacks that do not work under flowtrain, in sentences that say what to do instead."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import lightning as L
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelCheckpoint,
    ModelPruning,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)

from flowtrain_lightning.allocator import Layout

REFUSED_CALLBACKS: dict[type[L.Callback], str] = {
    BaseFinetuning: (
        "it freezes layers before a FlowModule has built them. Freeze them in `configure_encoder` or "
        "`configure_backbone`, and set `requires_grad` in the module's `on_train_epoch_start`"
    ),
    BatchSizeFinder: "the batch is a plan. Set FlowDataModule(token_budget=...)",
    GradientAccumulationScheduler: (
        "a step holds as many microbatches as it needs. Set FlowDataModule(token_steps=...) or "
        "FlowDataModule(global_batch_size=...)"
    ),
    LearningRateFinder: "it replays steps from a checkpoint of one process. Run it under strategy='auto'",
    ModelPruning: "it masks parameters of both halves, which live on different ranks. Prune an exported checkpoint",
    OnExceptionCheckpoint: (
        "when one rank fails, the others cannot write their part. Set ModelCheckpoint(every_n_train_steps=...); "
        "SIGTERM saves `preempted.ckpt` by itself"
    ),
    StochasticWeightAveraging: (
        "it keeps a copy of both halves on each rank. Take flowtrain_lightning.callbacks.AverageWeights(decay=None), "
        "and a scheduler of learning rates"
    ),
    WeightAveraging: (
        "it copies the module before its halves are on their ranks, and cannot copy shards. Take "
        "flowtrain_lightning.callbacks.AverageWeights, which computes the same on every layout"
    ),
}
"""Callbacks, subclasses included, with the reason and what to do instead."""


def refuse_callbacks(trainer: L.Trainer) -> None:
    """Raises for callbacks that do not work under flowtrain, which it takes out.

    Raises:
        ValueError: names the callback, and what to do instead.
    """
    callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    for callback in callbacks:
        for refused, reason in REFUSED_CALLBACKS.items():
            if isinstance(callback, refused):
                callbacks.remove(callback)  # which might otherwise act on this very error
                raise ValueError(f"The callback {type(callback).__name__} does not work under flowtrain: {reason}.")
        if isinstance(callback, ModelCheckpoint) and getattr(callback, "save_on_exception", False):
            raise ValueError(
                "ModelCheckpoint(save_on_exception=True) does not work under flowtrain: "
                f"{REFUSED_CALLBACKS[OnExceptionCheckpoint]}."
            )


def refuse_averages_of_runs(layouts: Mapping[str, Layout], callbacks: Iterable[L.Callback]) -> None:
    """Raises where averages are wanted of weights of which ranks keep a run of elements each.

    Args:
        layouts: role -> its layout.
        callbacks: of the Trainer.

    Raises:
        ValueError: says what was given and what to do.
    """
    if not any(_is_own(callback, "AverageWeights") for callback in callbacks):
        return
    for role, layout in layouts.items():
        if layout.shard == "deepspeed-3":
            raise ValueError(
                f"The callback AverageWeights was given, but the {role} has shard 'deepspeed-3', whose weights it does "
                "not see. Take shard 'fsdp', or leave the callback out."
            )


def _is_own(callback: L.Callback, name: str) -> bool:
    """Whether it is this one of `flowtrain_lightning.callbacks`, which are built on all of this, or derived from it."""
    kinds = ((kind.__module__.partition(".")[0], kind.__name__) for kind in type(callback).__mro__)
    return (__name__.partition(".")[0], name) in kinds
