"""Refuses settings of Trainer, module, layouts and nodes before the first step, in sentences that say what to do."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.accelerators import CPUAccelerator, CUDAAccelerator
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from torch import nn
from torch.distributed.tensor import DTensor

from flowtrain_lightning.allocator import Allocation, Layout
from flowtrain_lightning.checkpoint import FlowCheckpointIO
from flowtrain_lightning.checkpoint.files import refuse_unshared_folder, refuse_url
from flowtrain_lightning.compute.whole_module import refuse_accumulation
from flowtrain_lightning.data import DataError, FlowDataModule
from flowtrain_lightning.module import FlowModule
from flowtrain_lightning.parallel.blocks import is_recomputed
from flowtrain_lightning.parallel.deepspeed.deepspeed_partition import is_partitioned
from flowtrain_lightning.parallel.halves import half_trains, role_of
from flowtrain_lightning.parallel.ranks.cross_group import CrossGroup
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
            f"{type(module).__name__}. Derive it from FlowModule, as docs/migrating.md shows of a whole module, or use "
            "strategy='auto' or 'ddp'."
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


def refuse_precision_of_deepspeed(layouts: Mapping[str, Layout], precision: str) -> None:
    """Raises where DeepSpeed would get weights that are not float32.

    Args:
        layouts: role -> its layout.
        precision: of the Trainer.

    Raises:
        ValueError: says what was given and what to do.
    """
    for role, layout in layouts.items():
        if layout.by_deepspeed and precision not in ("32-true", "bf16-mixed"):
            raise ValueError(
                f"The {role} has shard {layout.shard!r} and Trainer(precision={precision!r}) was given, but DeepSpeed "
                "sums and optimizes float32 here. Take precision '32-true' or 'bf16-mixed', or shard 'fsdp'."
            )


def refuse_frozen_backbone(layouts: Mapping[str, Layout], module: FlowModule) -> None:
    """Raises where ranks share the weights of a backbone that is frozen while the encoder trains.

    Args:
        layouts: role -> its layout.
        module: that trains; its absent half has names and ``requires_grad`` too.

    Raises:
        ValueError: says what was given and what to do.
    """
    graph = module.role_graph
    an_encoder_trains = any(half_trains(module, role) for role in graph.producers)
    if layouts[graph.trunk].meets.passes and an_encoder_trains and not half_trains(module, graph.trunk):
        raise ValueError(
            f"All weights of the {graph.trunk} are frozen and sharded while the encoder trains: a microbatch without "
            "media items has no backward then, which other ranks wait for. Let some of its weights train, or take "
            f"whole copies of the {graph.trunk}."
        )


def refuse_layers_computed_again(allocation: Allocation, module: FlowModule) -> None:
    """Raises for layers that the module itself lets keep less, where it is counted what batches keep.

    Args:
        allocation: who does what.
        module: that trains.

    Raises:
        ValueError: says what to leave out.
    """
    if allocation.activation_bytes is None:
        return
    for name, part in module.named_modules():
        if getattr(part, "gradient_checkpointing", False) is True or is_recomputed(part):
            raise ValueError(
                f"The allocation has activation_bytes, but {type(module).__name__} lets {name!r} compute again by "
                "itself, and what such layers keep is not counted. Leave the module's recompute out: whole batches are "
                "computed again where they find no room."
            )


def refuse_scalars_in_shards(layouts: Mapping[str, Layout], module: FlowModule) -> None:
    """Raises for parameters of which ranks cannot hold shares, by FSDP2 or DeepSpeed: of no dimension, or no element.

    Args:
        layouts: role -> its layout.
        module: that trains.

    Raises:
        ValueError: names the parameter, and what to do.
    """
    for name, parameter in module.named_parameters():
        role = role_of(name, module.halves)
        if role is not None and layouts[role].shard != "replicate" and (parameter.ndim == 0 or parameter.numel() == 0):
            lacking = "element" if parameter.ndim else "dimension"
            raise ValueError(
                f"The parameter {name!r} has no {lacking}, but the {role} has shard {layouts[role].shard!r}, in which "
                "ranks hold shares of every weight. Make it a tensor of one element or more, such as "
                "nn.Parameter(torch.zeros(1)), or take whole copies (shard 'replicate')."
            )


def refuse_sparse_gradients(layouts: Mapping[str, Layout], module: FlowModule) -> None:
    """Raises for embeddings whose gradients are sparse, where several ranks would sum them.

    Args:
        layouts: role -> its layout.
        module: that trains.

    Raises:
        ValueError: names the embedding, and what to do.
    """
    for path, part in module.named_modules():
        role = role_of(f"{path}.", module.halves)
        is_sparse = getattr(part, "sparse", False) is True and any(weight.requires_grad for weight in part.parameters())
        if role is not None and is_sparse and layouts[role].ranks > 1:
            raise ValueError(
                f"The embedding {path!r} has sparse=True, but the {role} has {layouts[role].ranks} ranks, which sum "
                "dense gradients. Set sparse=False."
            )


def refuse_conditional_modules(layouts: Mapping[str, Layout], module: FlowModule) -> None:
    """Raises for modules that only some samples run, where ranks gather the weights of each together, by ZeRO-3.

    Args:
        layouts: role -> its layout.
        module: that trains, and was checked.

    Raises:
        ValueError: names the module, and what to do.
    """
    for path in module.conditional_modules:
        role = role_of(f"{path}.", module.halves)
        if role is not None and layouts[role].shard == "deepspeed-3":
            raise ValueError(
                f"The module {path!r} is run for some samples and not for others, but the {role} has shard "
                "'deepspeed-3', in which all ranks gather the weights of every module together: a rank whose samples "
                "do not run it would hang the others. Run it for every sample, on no rows where there is nothing for "
                "it, or take shard 'fsdp', 'deepspeed-2' or 'replicate'."
            )


def refuse_unshared_sequences(layouts: Mapping[str, Layout], module: FlowModule) -> None:
    """Raises where context ranks are to share sequences that nobody would slice for them.

    Args:
        layouts: role -> its layout.
        module: that trains.

    Raises:
        ValueError: says what was given and what to do.
    """
    trunk = module.role_graph.trunk
    if (degree := layouts[trunk].context) == 1:
        return
    kind, instead = type(module), f"or give the {trunk} a layout without a context degree"
    if kind.slice_tokens is FlowModule.slice_tokens:
        raise ValueError(
            f"The {trunk} has context {degree}, but {kind.__name__} does not say how its sequences "
            f"are sliced. Define slice_tokens, {instead}."
        )
    if kind.backbone_step is not FlowModule.backbone_step:
        raise ValueError(
            f"The {trunk} has context {degree}, but {kind.__name__} overrides backbone_step, in "
            f"which sequences are sliced. Define merge and loss instead of it, {instead}."
        )


def refuse_sharded_before(module: nn.Module) -> None:
    """Raises for a module that another Trainer's run has left in shards.

    Raises:
        ValueError: says what to do.
    """
    named = module.named_parameters()
    sharded = next((name for name, weight in named if isinstance(weight, DTensor) or is_partitioned(weight)), None)
    if sharded is not None:
        raise ValueError(
            f"The weight {sharded!r} is in shards, which an earlier run of another Trainer has left. Build the module "
            "anew and give the checkpoint of that run as ckpt_path, or go on with the same Trainer."
        )


def refuse_unmet_nodes(trainer: L.Trainer) -> None:
    """Raises where a script that was started by hand on each node does not know how to find the other nodes.

    Raises:
        ValueError: names the variables that are missing, and what to do.
    """
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK") if name not in os.environ]
    if trainer.num_nodes > 1 and missing:
        raise ValueError(
            f"Trainer(num_nodes={trainer.num_nodes}) was given, but the environment has no {' and no '.join(missing)}, "
            "so this process cannot find those of the other nodes. Start the script on every node with the address "
            "and a free port of node 0, and with the node's number from 0, or by torchrun or SLURM's srun."
        )


def refuse_unlike_nodes(trainer: L.Trainer, cross: CrossGroup) -> None:
    """Raises on every rank where nodes have other data, or folders of their own for checkpoints. All ranks call it.

    Raises:
        DataError: names the ranks whose data differ from those of rank 0.
        FileNotFoundError: names the folder and the ranks that do not see it.
    """
    _refuse_other_data(trainer, cross)
    if trainer.training:  # the checkpoint of a later step would be too late to notice
        callbacks = trainer.checkpoint_callbacks  # type: ignore[attr-defined]
        folders = {str(getattr(callback, "dirpath", None) or "") for callback in callbacks}
        for folder in sorted(folder for folder in folders if folder and "://" not in folder):
            refuse_unshared_folder(Path(folder), cross)


def _refuse_other_data(trainer: L.Trainer, cross: CrossGroup) -> None:
    data = trainer.datamodule  # type: ignore[attr-defined]
    stage = trainer.state.fn
    if stage is None or not isinstance(data, FlowDataModule):
        return
    content = hashlib.sha256(data.fingerprint(stage.value).encode()).digest()
    contents = torch.zeros(cross.ranks, dtype=torch.int64)
    contents[cross.rank] = int.from_bytes(content[:7], "big")
    others = (cross.all_reduce(contents) != contents[0]).nonzero().flatten().tolist()
    if others:
        raise DataError(
            f"{'Rank' if len(others) == 1 else 'Ranks'} {', '.join(map(str, others))} would read other data than rank "
            "0: the files of that name differ between the nodes, and so would the steps that the ranks plan. Put the "
            "same files onto every node, or onto a file system that all nodes share."
        )
