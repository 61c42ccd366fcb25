"""The copy of a module that is checked: whole or with fewer blocks, in float64, its dropout off."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from flowtrain_lightning.compute.random_layers import dropout_settings
from flowtrain_lightning.compute.whole_module import WholeModule
from flowtrain_lightning.data import Features, PackedBatch, PackedMedia
from flowtrain_lightning.packing_check.detached_copy import detached_copy
from flowtrain_lightning.packing_check.machine import CPU, free_memory, made_on
from flowtrain_lightning.parallel.halves import fill_half
from flowtrain_lightning.parallel.unfilled_weights import UnfilledWeights

WHOLE = 50_000_000
"""Weights of a module up to which all its blocks are checked; above it, those that are of a kind are checked once."""

_FEWEST_BLOCKS = 2
_COPIES = 5
"""Numbers in memory for each weight: itself, its gradient, two sums that are compared, and what layers keep."""

_SMALL = 0.02
"""Size of the numbers that stand for weights of zeros."""

_BATCH_NORM = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class CheckedModule(WholeModule, Protocol):
    """The methods of a module that the check calls; `FlowModule` has them."""

    @property
    def unfilled(self) -> Mapping[str, UnfilledWeights]:
        """Role -> the weights of a half that is built, but has no memory yet."""

    def set_local_roles(self, roles: tuple[str, ...] | None, in_parts: tuple[str, ...] = ()) -> None:
        """Says which halves are built (None: all), and which of them without memory."""

    def attach_runner(self, runner: None) -> None:
        """Nobody runs its steps."""

    def mark_filled(self) -> None:
        """All halves have their weights."""

    def mark_checked(self) -> None:
        """It is not to be checked once more."""

    def configure_model(self) -> None:
        """Builds the halves."""

    def prepare_media(self, media: PackedMedia) -> Mapping[str, Tensor]:
        """Computes inputs of ``encode`` that follow from sizes alone."""

    def step_alone(self, batch: PackedBatch, features: Features) -> Any:
        """One sample as it was computed before anything was changed for packing; None where that is nothing else."""

    def loss(self, outputs: Any, batch: Any) -> Any:
        """Outputs of the backbone -> the summed loss and the number of targets."""


class NotCheckable(Exception):  # no error of the user's
    """The module cannot be checked here; says why."""


def checked_copy(
    module: Any, trainer: L.Trainer, dtype: torch.dtype = torch.float64, device: torch.device = CPU
) -> Any:
    """A built copy to be checked; the module itself stays as it is.

    Args:
        module: a `CheckedModule`, built or not.
        trainer: which the copy may ask for settings.
        dtype: of its weights.
        device: of its weights.

    Raises:
        NotCheckable: it does not fit into memory, even with fewer blocks.
    """
    with default_dtype(dtype), made_on(device):
        copied = _built_copy(module, trainer, device)
    copied.to(device, dtype)
    for layer in copied.modules():
        for name in dropout_settings(layer):  # the log tells of it, see `not_layout_invariant`
            setattr(layer, name, 0.0)
    _fill_zeros(copied)
    return copied


def _fill_zeros(module: nn.Module) -> None:
    """Gives numbers to weights that begin as zeros: gates and adapters of zeros hide what lies behind them."""
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in module.parameters():
            if weight.requires_grad and not is_lazy(weight) and not weight.any():
                weight.add_(_SMALL * _drawn(weight, draw))


def _drawn(weight: Tensor, draw: torch.Generator) -> Tensor:
    """Numbers in the form of a weight, the same on every device."""
    return torch.randn(weight.shape, generator=draw, dtype=torch.float32, device=CPU).to(weight)


def freeze_batch_norms(module: nn.Module) -> list[str]:
    """Lets layers that normalise by a batch use the statistics that they keep, so that the rest can be compared.

    Returns:
        paths of those that would have used a batch's.
    """
    found = []
    for name, layer in module.named_modules():
        if isinstance(layer, _BATCH_NORM):
            if layer.training or not layer.track_running_stats:
                found.append(name)
            # Not by eval(): for a batch of one with transposed gradients torch 2.13 gives wrong ones on CPUs.
            layer.forward = partial(_normalised, layer)  # type: ignore[method-assign]
    return found


def _normalised(layer: Any, batch: Tensor) -> Tensor:
    """A batch, ``[items, channels, ...]``, normalised by the statistics that the layer keeps."""
    shape = (1, -1, *[1] * (batch.ndim - 2))
    if layer.running_mean is not None:
        batch = (batch - layer.running_mean.view(shape)) * (layer.running_var.view(shape) + layer.eps).rsqrt()
    if layer.weight is not None:
        batch = batch * layer.weight.view(shape) + layer.bias.view(shape)
    return batch


def _built_copy(module: Any, trainer: L.Trainer, device: torch.device) -> Any:
    built = any(True for _ in module.parameters())
    shape = module if built else _on_meta(module, trainer)
    large = shape is not None and _count(shape) > WHOLE
    if not large:
        copied = _apart(detached_copy(module), trainer)
        copied.set_local_roles(None)
        copied.configure_model()
        return copied
    _refuse_too_large(shape, device)
    if built:
        dropped = {
            id(weight): nn.Parameter(torch.empty_like(weight, device="meta"), weight.requires_grad)
            for blocks, depth in blocks_to_cut(module)
            for block in list(blocks)[depth:]
            for weight in block.parameters()
        }
        copied = _apart(detached_copy(module, dropped), trainer)
        _cut_blocks(copied)
        return copied
    copied = _apart(detached_copy(module), trainer)
    copied.set_local_roles(None, copied.role_graph.roles)
    copied.configure_model()
    _cut_blocks(copied)
    for role, weights in copied.unfilled.items():
        fill_half(copied, role, weights, device, as_built_whole=False)  # or numbers are drawn for blocks that are cut
    copied.mark_filled()
    return copied


def _apart(copied: Any, trainer: L.Trainer) -> Any:
    copied.attach_runner(None)
    copied.mark_checked()
    copied.trainer = trainer
    return copied


def _on_meta(module: Any, trainer: L.Trainer) -> Any:
    """Builds the module without memory; None where that cannot be done."""
    copied = _apart(detached_copy(module), trainer)
    copied.set_local_roles(None)
    try:
        with torch.device("meta"):
            copied.configure_model()
    except Exception:  # whatever its code does with weights that have no numbers; the real build will say
        return None
    return copied


def blocks_to_cut(module: nn.Module) -> Iterator[tuple[nn.ModuleList, int]]:
    """Lists of blocks that repeat, and how many of each list's first blocks have one of every kind."""
    for blocks in module.modules():
        if isinstance(blocks, nn.ModuleList) and len(blocks) > _FEWEST_BLOCKS:
            kinds = [*map(_kind, blocks)]
            depth = max(_FEWEST_BLOCKS, 1 + max(kinds.index(kind) for kind in kinds))
            if depth < len(blocks):
                yield blocks, depth


def _cut_blocks(module: nn.Module) -> None:
    for blocks, depth in list(blocks_to_cut(module)):
        del blocks[depth:]


def _kind(block: nn.Module) -> tuple[object, ...]:
    """Returns all that tells blocks apart: classes, shapes, and settings that are names, switches or absent."""
    return tuple(
        (
            name,
            type(layer),
            tuple(
                (key, value if isinstance(value, bool | str) else type(value))
                for key, value in vars(layer).items()
                if value is None or isinstance(value, bool | str | int | float)
            ),
            tuple((key, tuple(weight.shape)) for key, weight in layer.named_parameters(recurse=False)),
        )
        for name, layer in block.named_modules()
    )


def _count(module: nn.Module) -> int:
    return sum(weight.numel() for weight in module.parameters())


def _refuse_too_large(shape: nn.Module, device: torch.device) -> None:
    dropped = {
        id(weight): weight.numel()
        for blocks, depth in blocks_to_cut(shape)
        for block in list(blocks)[depth:]
        for weight in block.parameters()
    }
    needed, free = _COPIES * 8 * (_count(shape) - sum(dropped.values())), free_memory(device)
    if free is not None and needed > free:
        raise NotCheckable(
            f"{_count(shape) / 1e9:.1f}e9 weights need {needed / 1e9:.0f} GB in float64, even with one block of every "
            f"kind, and {free / 1e9:.0f} GB of memory are free there"
        )


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Inside, tensors are made of this dtype where nothing else is said."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
