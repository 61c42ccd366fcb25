"""Which settings of Trainer and module flowtrain refuses, before the first step, in sentences that say what to do."""

from __future__ import annotations

import platform
from typing import Any

import lightning as L
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.accelerators import CPUAccelerator, CUDAAccelerator
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision

from flowtrain_lightning.checkpoint import FlowCheckpointIO
from flowtrain_lightning.checkpoint.files import refuse_url
from flowtrain_lightning.compute.whole_module import refuse_accumulation
from flowtrain_lightning.module import FlowModule
from flowtrain_lightning.trainer.callback_refusals import refuse_callbacks

PRECISIONS = ("32-true", "bf16-mixed", "bf16-true", "64-true")

_OWN_METHODS = ("backward", "clip_gradients", "optimizer_zero_grad")


def refuse_other_systems() -> None:
    """Raises where ranks could not share memory and notice each other's end.

    Raises:
        RuntimeError: says what this system is, and what works on it.
    """
    if platform.system() != "Linux":
        raise RuntimeError(
            f"strategy='flowtrain' connects processes by what only Linux has, and this is {platform.system()}. Debug "
            "here with strategy='auto': the same module, data and losses. `flowtrain plan`, `pack` and `simulate` "
            "work here, too."
        )


def refuse_foreign_module(module: L.LightningModule) -> None:
    """Raises for modules without halves.

    Raises:
        TypeError: says what was given and what to derive it from.
    """
    if not isinstance(module, FlowModule):
        raise TypeError(
            f"strategy='flowtrain' splits a flowtrain_lightning.FlowModule into its halves, but got "
            f"{type(module).__name__}. Derive it from FlowModule, or use strategy='auto' or 'ddp'."
        )


def refuse_unsupported(trainer: L.Trainer) -> None:
    """Raises for settings under which flowtrain could not keep its promises. Needs no process group.

    Raises:
        TypeError: names the object that does not fit, and what to do.
        ValueError: names the setting, what was given, and what to do.
    """
    _refuse_module(trainer)
    _refuse_machine(trainer)
    _refuse_precision(trainer)
    _refuse_settings(trainer)
    _refuse_uploads(trainer)
    _refuse_urls(trainer)
    refuse_callbacks(trainer)


def refuse_storage_options(storage_options: Any) -> None:
    """Raises where options are given to which nobody would listen.

    Raises:
        TypeError: says what was given, and what to do.
    """
    if storage_options is not None:
        raise TypeError(
            f"storage_options={storage_options!r} was given, but flowtrain writes checkpoint directories itself, "
            "with no plugin that takes options. Leave them out."
        )


def _refuse_module(trainer: L.Trainer) -> None:
    module = trainer.lightning_module
    name = type(module).__name__
    if not module.automatic_optimization:
        raise ValueError(
            "automatic_optimization=False was set, but flowtrain runs forward and backward of a step itself. Remove "
            "it: an `optimizer_step` or `configure_gradient_clipping` hook works, and one optimizer with several "
            "parameter groups takes several learning rates."
        )
    for method in _OWN_METHODS:
        if getattr(type(module), method) is not getattr(FlowModule, method):
            raise TypeError(
                f"{name} overrides `{method}`, in which FlowModule keeps the gradients of a whole step. Remove it; "
                "`on_before_optimizer_step` and `configure_gradient_clipping` see the final gradients."
            )


def _refuse_machine(trainer: L.Trainer) -> None:
    if not isinstance(trainer.accelerator, CPUAccelerator | CUDAAccelerator):
        raise ValueError(
            f"The accelerator is {type(trainer.accelerator).__name__}, but flowtrain's ranks share memory of CPUs and "
            "CUDA devices. Set Trainer(accelerator='cuda') or 'cpu'."
        )
    checkpoint_io = trainer.strategy.checkpoint_io
    if type(checkpoint_io) not in (TorchCheckpointIO, FlowCheckpointIO):  # what others do would be passed over
        raise ValueError(
            f"Trainer(plugins=[{type(checkpoint_io).__name__}()]) was given, but flowtrain writes checkpoint "
            "directories itself, one folder per role. Remove the plugin."
        )


def _refuse_precision(trainer: L.Trainer) -> None:
    plugin = trainer.precision_plugin
    known = type(plugin) in (Precision, MixedPrecision, HalfPrecision, DoublePrecision)
    if not known or plugin.precision not in PRECISIONS:
        raise ValueError(
            f"Trainer(precision={plugin.precision!r}) was given, but flowtrain supports {', '.join(PRECISIONS)}. "
            "Float16 needs a loss scale that all roles agree on; use 'bf16-mixed'."
        )


def _refuse_settings(trainer: L.Trainer) -> None:
    refuse_accumulation(trainer)
    if getattr(trainer.strategy, "_layer_sync", None) is not None:
        raise ValueError(
            "Trainer(sync_batchnorm=True) was given, but encoder ranks run different numbers of batches, so their "
            "BatchNorm layers cannot wait for each other. Set it to False, and prefer LayerNorm or frozen BatchNorm."
        )
    if getattr(trainer, "_val_check_time_interval", None) is not None:
        raise ValueError(
            "Trainer(val_check_interval=...) was given a time, but each rank would read it from its own clock. Give a "
            "number of steps, or a fraction of an epoch."
        )


def _refuse_uploads(trainer: L.Trainer) -> None:
    advice = "Checkpoints are directories under flowtrain: upload the file that `flowtrain export` writes"
    if getattr(trainer, "_model_registry", None):
        raise ValueError(f"Trainer(model_registry=...) was given, which uploads single files. {advice}.")
    for logger in trainer.loggers:
        if getattr(logger, "_log_model", False) or getattr(logger, "_log_model_checkpoints", False):
            raise ValueError(
                f"{type(logger).__name__} is set to upload checkpoints as single files. Set log_model=False "
                f"(NeptuneLogger: log_model_checkpoints=False). {advice}."
            )


def _refuse_urls(trainer: L.Trainer) -> None:
    if not trainer.training:
        return
    refuse_url(trainer.default_root_dir, "The Trainer's default_root_dir")  # SIGTERM saves there
    default = trainer.loggers[0].save_dir if trainer.loggers else None
    for callback in trainer.checkpoint_callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, ModelCheckpoint):
            refuse_url(callback.dirpath or default, "ModelCheckpoint's folder")
