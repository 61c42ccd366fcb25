"""What was measured, where and with what: found before anything runs, so that a kept profile can stand in."""

from __future__ import annotations

import copy
import platform
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from torch import nn

import flowtrain_lightning
from flowtrain_lightning.allocator.roles import ROLES
from flowtrain_lightning.data import FlowDataModule
from flowtrain_lightning.data.fingerprint import fingerprint
from flowtrain_lightning.parallel.halves import build_halves
from flowtrain_lightning.profiling.profile import Origin

if TYPE_CHECKING:
    from flowtrain_lightning.module import FlowModule


def origin_of(module: FlowModule, data: FlowDataModule, device: torch.device, precision: str) -> Origin:
    """The origin of a profile that would be made here and now.

    Args:
        module: built or not. One that is not is built without memory, unless it builds both halves at once.
        data: of the run.
        device: on which the halves would run.
        precision: in Lightning's words, as ``trainer.precision`` has it.
    """
    versions = {"torch": torch.__version__, "lightning": L.__version__, "flowtrain": flowtrain_lightning.__version__}
    settings: dict[str, str | int] = {
        "precision": precision,
        "threads": torch.get_num_threads(),
        "token_budget": data.token_budget,
    }
    return Origin(_module_name(module), device_name(device), versions, settings)


def device_name(device: torch.device) -> str:
    """The maker's name of a device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return device.type
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor() or platform.machine())


def detached_copy(module: FlowModule, weights: Mapping[int, nn.Parameter] | None = None) -> FlowModule:
    """A copy of the module that belongs to no Trainer.

    Args:
        module: built or not.
        weights: ``id`` of a parameter -> what the copy has in its place.
    """
    instead: dict[int, Any] = dict(weights or {})  # what is found here is not copied
    with suppress(RuntimeError):
        instead[id(module.trainer)] = None
    return copy.deepcopy(module, instead)


def copy_on_meta(module: FlowModule) -> FlowModule:
    """A built copy whose weights take no memory, with the Trainer of the module, if it has one.

    Buffers of a module that is built are copied as they are, since models read them.
    """
    weights = {
        id(weight): nn.Parameter(torch.empty_like(weight, device="meta"), weight.requires_grad)
        for weight in module.parameters()
    }
    copy = detached_copy(module, weights)
    with suppress(RuntimeError):
        copy.trainer = module.trainer
    copy.set_local_roles(ROLES)
    with torch.device("meta"):
        copy.configure_model()
    return copy


def _module_name(module: FlowModule) -> str:
    if not any(True for _ in module.parameters()):
        module = detached_copy(module)
        build_halves(module, ())
    weights = [
        [name, list(weight.shape), str(weight.dtype), weight.requires_grad]
        for name, weight in module.named_parameters()
    ]
    return f"{type(module).__module__}.{type(module).__qualname__} {fingerprint(weights)}"
