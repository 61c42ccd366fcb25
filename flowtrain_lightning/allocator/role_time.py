"""Time of one role's part of a step in a layout, and what it consists of."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from scipy.special import ndtri

from flowtrain_lightning.allocator.division import share_of_rank
from flowtrain_lightning.allocator.flops import FloatArray
from flowtrain_lightning.allocator.memory_use import kept_activations
from flowtrain_lightning.allocator.pass_time import PassTime, pass_time
from flowtrain_lightning.allocator.role_problem import Family, RoleProblem
from flowtrain_lightning.allocator.sharing_time import sharing_time
from flowtrain_lightning.allocator.stage_layers import layers_of_stages, parameters_of_a_stage
from flowtrain_lightning.allocator.stages import seconds_between_stages
from flowtrain_lightning.packing.stage_microbatches import wanted_microbatches
from flowtrain_lightning.packing.stage_schedule import Schedule

_BUBBLE: dict[Schedule, float] = {"1f1b": 1.0, "zb-h1": 1 / 3, "zb-v": 1 / 4}
"""Share of the bubble of 1F1B that a schedule leaves, of passes that are equally long."""


@dataclass(frozen=True)
class RoleTime:
    """Seconds of a role's step, as arrays over the data degrees of a family; all but the last two add up.

    Attributes:
        forward: computing forward, on the busiest stage.
        backward: computing backward, with what is computed again.
        exchange: collectives of tensor and context ranks, and activations between stages.
        bubble: stages that wait for the first and the last microbatch.
        stragglers: waiting for the slowest of the ranks, which differ by chance.
        sharding: weights gathered and gradients scattered per microbatch: what computing does not hide, and by how
            much what it hides slows it. Also weights that are cast, and gradients that are cast and added up.
        reduction: gradients summed over the data-parallel ranks: what computing does not hide, and by how much what it
            hides slows it.
        optimizer: the update of the weights.
        offload: activations and weights that go to the host's memory and back: what computing does not hide.
        microbatches: microbatches of a replica.
        tokens: tokens of a mean microbatch; the busiest replica's cost as much as more.
    """

    forward: FloatArray
    backward: FloatArray
    exchange: FloatArray
    bubble: FloatArray
    stragglers: FloatArray
    sharding: FloatArray
    reduction: FloatArray
    optimizer: FloatArray
    offload: FloatArray
    microbatches: FloatArray
    tokens: FloatArray

    @property
    def total(self) -> FloatArray:
        """``[data degrees]`` seconds in all."""
        found: FloatArray = np.sum([getattr(self, name) for name in _PARTS], axis=0)
        return found

    @property
    def batch(self) -> FloatArray:
        """``[data degrees]`` seconds of one microbatch or encoder batch, forward and backward."""
        return np.asarray((self.forward + self.backward + self.exchange) / self.microbatches)

    @property
    def at_the_end(self) -> FloatArray:
        """``[data degrees]`` seconds that do not shrink with the work: what follows the last microbatch."""
        return self.reduction + self.optimizer

    def at(self, number: int) -> dict[str, float]:
        """Seconds by purpose for the ``number``-th data degree."""
        return {name: float(getattr(self, name)[number]) for name in _PARTS}


_PARTS = tuple(field.name for field in fields(RoleTime))[:-2]


def role_time(problem: RoleProblem, family: Family, interleave: int = 1) -> RoleTime:
    """Time of a role's part of a step.

    In a pipeline of 1F1B a step takes ``microbatches + (stages - 1) / interleave`` times the slowest stage (Narayanan
    et al., arXiv 2104.04473, section 2.2). Backwards in two parts fill most of what stages wait.

    Args:
        problem: the role.
        family: how it is laid out.
        interleave: chunks of layers that every stage holds.
    """
    microbatches, tokens = batches(problem, family)
    busiest = tokens * problem.unevenness(family.data)
    once = pass_time(problem, family, busiest)
    stage, between = _stage_seconds(problem, family, once, tokens, interleave)
    scale = stage / np.maximum(once.total, 1e-30)
    sharing = sharing_time(problem, family, once, microbatches)
    busy = microbatches * (once.forward + once.backward) * scale
    return RoleTime(
        forward=microbatches * once.forward * scale,
        backward=microbatches * once.backward * scale,
        exchange=microbatches * (once.exchange * scale + between),
        bubble=_BUBBLE[family.schedule] * (family.pipeline - 1) / interleave * (stage + between),
        stragglers=busy * problem.efficiency.jitter * slowest_of(family.data * family.replica),
        sharding=microbatches * (sharing.forward + sharing.backward),
        reduction=sharing.end,
        optimizer=_optimizer_seconds(problem, family),
        offload=microbatches * offload_seconds(problem, family, once, tokens),
        microbatches=microbatches,
        tokens=tokens,
    )


def slowest_of(ranks: FloatArray) -> FloatArray:
    """Expected largest of ``ranks``, ``[data degrees]``, normal numbers (Blom 1958): what the slowest is behind."""
    return np.asarray(np.where(ranks > 1, ndtri((ranks - 0.375) / (ranks + 0.25)), 0.0))


def batches(problem: RoleProblem, family: Family) -> tuple[FloatArray, FloatArray]:
    """Microbatches of a replica, and the tokens of a mean one: within the budget, and enough to fill the stages.

    Replicas have as many of them. That some cost more, since samples differ, makes none of them two.
    """
    load = problem.load
    wanted = family.pipeline
    if load.forwards is None:  # as the packer has it
        wanted = wanted_microbatches(family.pipeline, "microbatch" if family.sharded else "step")
    fewest = np.minimum(wanted, np.maximum(1.0, np.floor(load.items / family.data)))
    microbatches = np.maximum(np.ceil(problem.full_batches / family.data - 1e-9), fewest)
    return microbatches, load.tokens / family.data / microbatches


def _stage_seconds(
    problem: RoleProblem, family: Family, once: PassTime, tokens: FloatArray, interleave: int
) -> tuple[FloatArray, FloatArray]:
    """One microbatch on the slowest stage, and sending its activations and gradients on."""
    if family.pipeline == 1:
        return once.total, np.zeros_like(tokens)
    if family.cut == "time":
        layers = layers_of_stages(problem, family)
        last = -1 if family.schedule != "zb-v" else 0
        slowest = np.maximum(once.layer * layers.max(), once.layer * layers[last] + once.ends)
    else:
        slowest = once.layer * _most_layers_by_number(once, family.pipeline, interleave)
    return slowest, 2 * interleave * seconds_between_stages(problem, family, tokens)


def _most_layers_by_number(once: PassTime, stages: int, interleave: int) -> FloatArray:
    """Time of the slowest stage in layers: stages have as many of them, as far as they divide, and the last the head.

    Other systems cut so by themselves; that the head is worth some layers is what makes their other stages wait.
    """
    layers, ends = (once.total - once.ends) / once.layer, once.ends / once.layer
    each = interleave * np.ceil(layers / (stages * interleave) - 1e-6)
    return np.asarray(np.maximum(each, layers - (stages - 1) * each + ends))


def _optimizer_seconds(problem: RoleProblem, family: Family) -> FloatArray:
    """States and weights read and written, gradients read."""
    precision, device = problem.precision, problem.cluster.device
    half = problem.half
    trained = parameters_of_a_stage(problem, family) * half.trainable_parameters / max(1, half.parameters)
    kept = trained * family.kept_share("states")
    if family.host_weights:  # all is there; the host reads and writes it no faster than the link is
        return kept * precision.updated / device.host
    if family.host_states(precision):
        # Gradients go there, weights come back, and the host reads and writes the states no faster than that.
        return kept * (precision.updated - precision.weights) / device.host
    return kept * precision.updated / (device.memory_bandwidth * problem.efficiency.update)


def offload_seconds(problem: RoleProblem, family: Family, once: PassTime, tokens: FloatArray) -> FloatArray:
    """Seconds by which sending activations to the host and back outlasts the computing, or a rank's weights."""
    there = back = np.zeros_like(tokens)
    if family.host_activations:
        there = back = kept_activations(problem, family) * tokens / family.pipeline
    if family.host_weights:  # as wide as they are kept: they come for each pass, and gradients of the second leave
        half, precision = problem.half, problem.precision
        here = half.parameters * share_of_rank(half, family.tensor) / family.pipeline
        trained = here * half.trainable_parameters / max(1, half.parameters)
        there = there + here * precision.weights * family.kept_share("weights")
        back = back + (here * precision.weights + trained * precision.gradients) * family.kept_share("weights")
    forward, backward = once.forward / family.pipeline, once.backward / family.pipeline
    host = problem.cluster.device.host
    return np.asarray(np.maximum(there / host - forward, 0.0) + np.maximum(back / host - backward, 0.0))
