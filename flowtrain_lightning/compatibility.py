"""What a Trainer may not ask of flowtrain: refused before the first step, in sentences that say what to do."""

from __future__ import annotations

import lightning as L
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelPruning,
    StochasticWeightAveraging,
)
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision

PRECISIONS = ("32-true", "bf16-mixed", "bf16-true", "64-true")

REFUSED_CALLBACKS: dict[type[L.Callback], str] = {
    BatchSizeFinder: "the batch is a plan: set FlowDataModule(token_budget=...) instead",
    GradientAccumulationScheduler: "a step holds as many microbatches as it needs: set global_batch_size instead",
    LearningRateFinder: "it replays steps with another optimizer: run it under strategy='auto' on one device",
    ModelPruning: "it masks parameters that live on other ranks: prune the exported checkpoint",
    StochasticWeightAveraging: "it averages a copy of the whole module: average exported checkpoints",
}


def refuse_unsupported(trainer: L.Trainer) -> None:
    """Raises for Trainer settings under which flowtrain could not keep its promises.

    Raises:
        ValueError: names the setting, what was given, and what to do.
    """
    module = trainer.lightning_module
    if trainer.accumulate_grad_batches != 1:
        raise ValueError(
            f"Trainer(accumulate_grad_batches={trainer.accumulate_grad_batches}) was given, but a flowtrain step "
            "already accumulates over its microbatches. Leave it at 1 and raise FlowDataModule(global_batch_size=...)."
        )
    if not module.automatic_optimization:
        raise ValueError(
            "automatic_optimization=False was set, but flowtrain runs forward and backward of a step itself. Remove "
            "it; a custom `optimizer_step` or `configure_gradient_clipping` hook works."
        )
    plugin = trainer.precision_plugin
    if type(plugin) not in (Precision, MixedPrecision, HalfPrecision, DoublePrecision) or "16" in str(
        plugin.precision
    ).replace("bf16", ""):
        raise ValueError(
            f"Trainer(precision={plugin.precision!r}) was given, but flowtrain supports {', '.join(PRECISIONS)}. "
            "Float16 needs a loss scale that all roles agree on; use 'bf16-mixed'."
        )
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        for refused, reason in REFUSED_CALLBACKS.items():
            if isinstance(callback, refused):
                raise ValueError(f"The callback {type(callback).__name__} does not work under flowtrain: {reason}.")
