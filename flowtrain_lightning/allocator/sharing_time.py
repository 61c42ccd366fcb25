"""Time that weights and gradients take beside computing: cast, gathered and scattered, added up, summed over ranks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flowtrain_lightning.allocator.collectives import ring
from flowtrain_lightning.allocator.division import experts_share
from flowtrain_lightning.allocator.flops import FloatArray
from flowtrain_lightning.allocator.kernels import moving_seconds
from flowtrain_lightning.allocator.pass_time import PassTime
from flowtrain_lightning.allocator.role_problem import DIVIDED, Family, Precision, RoleProblem
from flowtrain_lightning.allocator.stage_layers import parameters_of_a_stage


@dataclass(frozen=True)
class SharingTime:
    """Seconds that weights and gradients add, as arrays over the data degrees of a family.

    Attributes:
        forward: to the forward of a microbatch: weights cast or gathered.
        backward: to its backward, in the mean of a step: weights gathered again, gradients scattered, cast, added up.
        end: to a step: gradients summed over the ranks, and what was updated in shares sent to all.
    """

    forward: FloatArray
    backward: FloatArray
    end: FloatArray


def sharing_time(problem: RoleProblem, family: Family, once: PassTime, microbatches: FloatArray) -> SharingTime:
    """Seconds for casting, gathering and scattering, for adding gradients up, and for their sum over ranks.

    Layers are exchanged one by one beside the computing of their neighbours on the same stage; what is outside of
    layers is exchanged before the first and after the last one, where nothing hides it.

    Args:
        problem: the role.
        family: how it is laid out.
        once: a microbatch's computing, of all stages.
        microbatches: ``[layouts]`` of a replica and step, which add their gradients up.
    """
    half, precision = problem.half, problem.precision
    experts = experts_share(half, family.tensor) * (1 - 1 / family.expert)
    here = parameters_of_a_stage(problem, family) * (1 - experts)
    trained = here * half.trainable_parameters / max(1, half.parameters)
    holders = ring(problem.cluster, family.shards, family.tensor, problem.efficiency.exchange)
    depth = max(1, round(half.depth / family.pipeline))
    outside = 1 - sum(part.parameters for part in half.layers) / max(1, half.parameters)
    contention = problem.efficiency.contention

    def layered(computing: FloatArray, *sizes: float) -> FloatArray:
        """Exchange of so many bytes each, by layers beside ``computing``, the part outside of layers alone."""
        beside, alone = computing / half.depth, np.zeros_like(computing)
        exchange = alone
        for size in sizes:
            exchange = exchange + holders.gather(size * (1 - outside) / depth)
            alone = alone + (holders.gather(size * outside) if outside * size else 0.0)
        return alone + _beside(exchange, beside, depth, contention)

    def moved(size: FloatArray | float) -> FloatArray:
        """Reading and writing so many bytes, beside nothing."""
        return moving_seconds(np.zeros_like(family.data) + size, problem.cluster.device, problem.efficiency)

    gradients = _reduction(problem, family, once, trained * precision.reduced)
    added = moved(trained * accumulated_bytes(precision, family, microbatches))
    if family.sharded:
        weights, back = here * precision.computing, trained * precision.reduced
        flows = half.trains or problem.receives_gradient
        forward = layered(once.forward, weights)
        scattered = [back] if half.trains else []
        backward = layered(once.backward, weights, *scattered) if flows else np.zeros_like(forward)
        return SharingTime(forward, backward + added, gradients)
    # Autocast makes its copies of the weights anew for every microbatch, but of those that are kept in its type.
    cast = here if precision.frozen is None else trained
    copies = moved(cast * (precision.weights + precision.copies) * (precision.copies > 0))
    updated = holders.gather(trained * precision.computing)
    if family.shard in ("zero2", "deepspeed-2"):
        return SharingTime(copies, layered(once.backward, trained * precision.reduced) + added, updated)
    if family.shard in ("zero1", "deepspeed-1"):
        return SharingTime(copies, added, layered(once.backward, trained * precision.reduced) + updated)
    return SharingTime(copies, added, gradients)


def accumulated_bytes(precision: Precision, family: Family, microbatches: FloatArray) -> FloatArray:
    """Bytes that a microbatch's backward reads and writes to add its gradients up, per trained weight, in the mean.

    Under autocast the node ``ToCopyBackward0`` makes a weight's gradient as wide as the weight, and ``AccumulateGrad``
    adds it to ``grad``: it reads both and writes one, but in the first microbatch of a step, whose gradient it takes
    over (PyTorch, ``torch/csrc/autograd/functions/accumulate_grad.h``). Ranks that scatter gradients in each backward
    add up no more than their shares (FSDP2: ``foreach_reduce`` in ``torch/distributed/fsdp/_fully_shard``, which also
    casts, while it copies gradients to scatter them; that is taken to be in the fitted rate of collectives).
    Gradients wider than their weights are Megatron-LM's, to which the product adds that makes them
    (``gradient_accumulation_fusion``).

    Args:
        precision: bytes per number.
        family: how gradients are held.
        microbatches: ``[layouts]`` of a replica and step.
    """
    if not precision.eager:
        return np.zeros_like(family.data)
    wide = precision.reduced if "gradients" in DIVIDED[family.shard] else precision.gradients
    cast = 0 if family.sharded or wide == precision.computing else precision.computing + wide
    return np.asarray(cast + 3 * precision.gradients * family.kept_share("gradients") * (1 - 1 / microbatches))


def _reduction(problem: RoleProblem, family: Family, once: PassTime, size: float) -> FloatArray:
    """Summing gradients of ``size`` bytes over the replicas of whole or sharded weights, beside the last backward."""
    if not problem.half.trains:
        return np.zeros_like(family.data)
    stride = family.tensor * (int(family.shards[0]) if family.group is not None else 1)
    replicas = ring(problem.cluster, family.copies, stride, problem.efficiency.exchange)
    depth = max(1, round(problem.half.depth / family.pipeline))
    each = replicas.reduce(size / family.shards / depth)
    return _beside(each, once.backward / problem.half.depth, depth, problem.efficiency.contention)


def _beside(exchange: FloatArray, computing: FloatArray, depth: int, contention: float) -> FloatArray:
    """Seconds that exchanges of ``depth`` layers add to computing: the first one alone, then what outlasts a layer.

    Args:
        exchange: ``[layouts]`` seconds of a layer's exchange.
        computing: ``[layouts]`` seconds of a layer.
        depth: layers.
        contention: see `Efficiency`.
    """
    outlasting = np.maximum(exchange - computing, 0.0)
    slowed = contention * np.minimum(exchange, computing)
    return np.asarray(exchange + (depth - 1) * (outlasting + slowed))
