"""From a module and its data to a profile: the halves are run alone on this device, and cost models fitted."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn

from flowtrain_lightning.allocator.roles import ROLES
from flowtrain_lightning.data import FlowDataModule
from flowtrain_lightning.packing.cost_model import Observation
from flowtrain_lightning.parallel.halves import half_parameters
from flowtrain_lightning.profiling.counting import count_flops
from flowtrain_lightning.profiling.errors import ProfileError
from flowtrain_lightning.profiling.fitting import plainest_cost
from flowtrain_lightning.profiling.layers import layer_by_layer
from flowtrain_lightning.profiling.origin import copy_on_meta, detached_copy, device_name, origin_of
from flowtrain_lightning.profiling.probes import Probe, load_probes
from flowtrain_lightning.profiling.profile import Flops, Profile, Reduction, RoleProfile
from flowtrain_lightning.profiling.reduction import measure_reduction
from flowtrain_lightning.profiling.running import Taken, profiling_trainer, run_halves

if TYPE_CHECKING:
    from flowtrain_lightning.module import FlowModule


def profile_module(
    module: FlowModule,
    data: FlowDataModule,
    *,
    accelerator: str = "auto",
    precision: Any = "32-true",
    seconds: float = 20.0,
    reduction: bool = True,
    flops: bool = False,
    progress: bool = True,
) -> Profile:
    """Measure the two halves of a module on one device of this machine, with real samples of several sizes.

    Each half computes as in training, with the threads that torch has in this process. The module itself is left as it
    is: a copy of it is built and run. Where the halves do not fit on the device whole, each is measured with one and
    with two of its layers.

    Args:
        module: best not built yet.
        data: its training data are used.
        accelerator: as for the Trainer.
        precision: as for the Trainer.
        seconds: about how long to measure; every size is measured at least once.
        reduction: also measure how long two ranks take to sum gradients; on CPUs only.
        flops: also count the FLOPs of both halves, which takes some seconds more.
        progress: show a bar.

    Raises:
        DataError: there are no training data, or they cannot be read.
        ProfileError: the halves do not fit, and their layers are not alike.
    """
    trainer = profiling_trainer(accelerator, precision)
    device, precision = trainer.strategy.root_device, trainer.precision
    data.prepare_data()
    data.setup("fit")
    reduced = _reduction() if reduction and device.type == "cpu" else None
    probes = load_probes(data)
    run = partial(run_halves, data=data, probes=probes, seconds=seconds, progress=progress)
    built = detached_copy(module)
    taken = _unless_out_of_memory(partial(run, built, trainer))
    whole = taken is not None
    if taken is None:
        del built
        trainer = profiling_trainer(accelerator, precision)
        gc.collect()  # what ran out of memory is in circles of references
        rank_zero_warn(
            f"{type(module).__name__} does not fit on {device_name(device)} whole. Each half is measured with one and "
            "with two of its layers, and what a layer adds counts for all of them."
        )
        with trainer.precision_plugin.module_init_context():
            built = copy_on_meta(module)
        taken = layer_by_layer(module, probes, lambda shallow: run(shallow, profiling_trainer(accelerator, precision)))
    counted = _flops(trainer, built, probes) if flops else {}
    return Profile(
        origin_of(built, data, device, precision),
        {role: replace(_role_profile(built, taken, probes, role), flops=counted.get(role)) for role in ROLES},
        taken.feature_bytes,
        reduced,
        whole,
    )


def _unless_out_of_memory(run: Callable[[], Taken]) -> Taken | None:
    try:
        return run()
    except torch.OutOfMemoryError:
        return None


def _reduction() -> Reduction | None:
    try:
        return measure_reduction()
    except ProfileError as error:
        rank_zero_warn(f"{error} The profile says nothing about that.")
        return None


def _flops(trainer: L.Trainer, module: FlowModule, probes: Sequence[Probe]) -> dict[str, Flops]:
    try:
        with trainer.precision_plugin.forward_context():
            return count_flops(module, probes)
    except ProfileError as error:
        rank_zero_warn(f"{error} The profile says nothing about FLOPs.")
        return {}


def _role_profile(module: FlowModule, taken: Taken, probes: Sequence[Probe], role: str) -> RoleProfile:
    weights = half_parameters(module, role)
    trained = [weight for weight in weights if weight.requires_grad]
    passes = taken.passes[role]
    measured = tuple(Observation.of(probes[probe].lengths(role), float(times.sum())) for probe, times in passes.items())
    both = np.sum(list(passes.values()), axis=0)
    return RoleProfile(
        cost=plainest_cost(measured),
        trains=bool(trained),
        parameters=sum(weight.numel() for weight in weights),
        gradient_bytes=sum(weight.numel() * weight.element_size() for weight in trained),
        optimizer_seconds=taken.optimizer[role] if trained and measured else 0.0,
        forward_share=float(both[0] / both.sum()) if measured else 1.0,
        measured=measured,
    )
