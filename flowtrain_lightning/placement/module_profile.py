"""The profile of a module: its halves are run alone on this device, and cost models fitted to their times."""

from __future__ import annotations

import gc
import platform
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn

import flowtrain_lightning
from flowtrain_lightning.data import FlowDataModule
from flowtrain_lightning.data.fingerprint import fingerprint
from flowtrain_lightning.module import FlowModule
from flowtrain_lightning.packing import CostModel
from flowtrain_lightning.packing.cost_model import Observation, fit_cost, predict
from flowtrain_lightning.packing_check import detached_copy
from flowtrain_lightning.parallel.halves import build_halves, half_parameters
from flowtrain_lightning.placement.flop_counter import count_flops
from flowtrain_lightning.placement.gradient_reduction import measure_reduction
from flowtrain_lightning.placement.half_timing import HalfTimes, profiling_trainer, time_halves
from flowtrain_lightning.placement.layer_extrapolation import extrapolate_layers
from flowtrain_lightning.placement.meta_device import copy_on_meta
from flowtrain_lightning.placement.probes import Probe, load_probes
from flowtrain_lightning.placement.profile import (
    FlopModel,
    Profile,
    ProfileError,
    ProfileOrigin,
    ReductionCost,
    RoleProfile,
)

_TELLABLE = 0.005
"""Mean relative errors that differ by less are alike: times differ by more from run to run."""


def profile_module(
    module: FlowModule,
    data: FlowDataModule,
    *,
    accelerator: str = "auto",
    device_number: int | None = None,
    precision: Any = "32-true",
    seconds: float = 20.0,
    reduction: bool = True,
    flops: bool = False,
    progress: bool = True,
) -> Profile:
    """Measure the halves of a module on one device of this machine, with real samples of several sizes.

    Each half computes as in training, with the threads that torch has in this process. The module itself is left as it
    is: a copy of it is built and run. Where the halves do not fit on the device whole, each is measured with one and
    with two of its layers.

    Args:
        module: best not built yet.
        data: its training data are used.
        accelerator: as for the Trainer.
        device_number: of the device, where there are several of its kind.
        precision: as for the Trainer.
        seconds: about how long to measure; every size is measured at least once.
        reduction: also measure how long two ranks take to sum gradients; on CPUs only.
        flops: also count the FLOPs of all halves, which takes some seconds more.
        progress: show a bar.

    Raises:
        DataError: there are no training data, or they cannot be read.
        ProfileError: the halves do not fit, and their layers are not alike.
    """
    trainer = profiling_trainer(accelerator, precision, device_number)
    device, precision = trainer.strategy.root_device, trainer.precision
    data.prepare_data()
    data.setup("fit")
    reduced = _reduction() if reduction and device.type == "cpu" else None
    probes = load_probes(data, module.role_graph)
    run = partial(time_halves, data=data, probes=probes, seconds=seconds, progress=progress)
    built = detached_copy(module)
    times = _unless_out_of_memory(partial(run, built, trainer))
    whole = times is not None
    if times is None:
        del built
        trainer = profiling_trainer(accelerator, precision, device_number)
        gc.collect()  # what ran out of memory is in circles of references
        rank_zero_warn(
            f"{type(module).__name__} does not fit on {device_name(device)} whole. Each half is measured with one and "
            "with two of its layers, and what a layer adds counts for all of them."
        )
        with trainer.precision_plugin.module_init_context():
            built = copy_on_meta(module)
        times = extrapolate_layers(
            module, probes, lambda shallow: run(shallow, profiling_trainer(accelerator, precision, device_number))
        )
    counted = _flops(trainer, built, probes) if flops else {}
    return Profile(
        origin_of(built, data, device, precision),
        {
            role: replace(_role_profile(built, times, probes, role), flops=counted.get(role))
            for role in module.role_graph.roles
        },
        times.feature_bytes,
        reduced,
        whole,
        module.role_graph.behind,
    )


def _unless_out_of_memory(run: Callable[[], HalfTimes]) -> HalfTimes | None:
    try:
        return run()
    except torch.OutOfMemoryError:
        return None


def _reduction() -> ReductionCost | None:
    try:
        return measure_reduction()
    except ProfileError as error:
        rank_zero_warn(f"{error} The profile says nothing about that.")
        return None


def _flops(trainer: L.Trainer, module: FlowModule, probes: Sequence[Probe]) -> dict[str, FlopModel]:
    try:
        with trainer.precision_plugin.forward_context():
            return count_flops(module, probes)
    except ProfileError as error:
        rank_zero_warn(f"{error} The profile says nothing about FLOPs.")
        return {}


def _role_profile(module: FlowModule, times: HalfTimes, probes: Sequence[Probe], role: str) -> RoleProfile:
    weights = half_parameters(module, role)
    trained = [weight for weight in weights if weight.requires_grad]
    passes = times.passes[role]
    measured = tuple(Observation.of(probes[probe].lengths(role), float(both.sum())) for probe, both in passes.items())
    both = np.sum(list(passes.values()), axis=0)
    return RoleProfile(
        cost=plainest_cost(measured),
        trains=bool(trained),
        parameters=sum(weight.numel() for weight in weights),
        gradient_bytes=sum(weight.numel() * weight.element_size() for weight in trained),
        optimizer_seconds=times.optimizer[role] if trained and measured else 0.0,
        forward_share=float(both[0] / both.sum()) if measured else 1.0,
        measured=measured,
    )


def plainest_cost(measured: Sequence[Observation]) -> CostModel:
    """The best cost model, or the best one without a quadratic term where that explains the times as well.

    Where all lengths are nearly alike, as those of pictures that are scaled to one size, the sum of their squares is as
    good as a multiple of their sum. Which of the two explains the times would be chance, and a model that had lost its
    linear term would be wrong for every other length. Then all goes to the linear term.

    Args:
        measured: at least 3 sizes; none where the half has no work.
    """
    if not measured:
        return CostModel(0.0, 0.0, 0.0)
    whole = fit_cost(measured)
    plain = fit_cost([replace(item, squares=0.0) for item in measured])
    return plain if _mean_error(plain, measured) <= _mean_error(whole, measured) + _TELLABLE else whole


def _mean_error(cost: CostModel, measured: Sequence[Observation]) -> float:
    return float(np.mean([abs(predict(cost, item) / item.seconds - 1) for item in measured]))


def origin_of(module: FlowModule, data: FlowDataModule, device: torch.device, precision: str) -> ProfileOrigin:
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
    return ProfileOrigin(_module_name(module), device_name(device), versions, settings)


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


def _module_name(module: FlowModule) -> str:
    if not any(True for _ in module.parameters()):
        module = detached_copy(module)
        build_halves(module, ())
    weights = [
        [name, list(weight.shape), str(weight.dtype), weight.requires_grad]
        for name, weight in module.named_parameters()
    ]
    return f"{type(module).__module__}.{type(module).__qualname__} {fingerprint(weights)}"
