"""Time of one forward and backward of a half over one microbatch: products, attention, data movement, collectives."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flowtrain_lightning.allocator.description import Dense, Layers
from flowtrain_lightning.allocator.devices import Cluster, Device, Efficiency
from flowtrain_lightning.allocator.flops import FLASH_BACKWARD, FloatArray
from flowtrain_lightning.allocator.role_problem import Family, RoleProblem

TILE = 128
"""Side of the tile of a result that one processor computes at a time (NVIDIA, "Matrix multiplication background user's
guide", tile and wave quantization)."""


@dataclass(frozen=True)
class PassTime:
    """Seconds of one microbatch on the devices of one replica, all stages together.

    Attributes:
        forward: computing forward.
        backward: computing backward, with what is computed again.
        exchange: collectives among tensor and context ranks that nothing hides.
        layer: the slowest layer, forward and backward: a pipeline is cut between layers.
        ends: of forward and backward, what is outside of layers, such as the head.
    """

    forward: FloatArray
    backward: FloatArray
    exchange: FloatArray
    layer: FloatArray
    ends: FloatArray

    @property
    def total(self) -> FloatArray:
        """Seconds of computing and collectives."""
        return self.forward + self.backward + self.exchange


def pass_time(problem: RoleProblem, family: Family, tokens: FloatArray) -> PassTime:
    """Time of one microbatch.

    Args:
        problem: the role.
        family: how a replica shares its work.
        tokens: ``[layouts]`` tokens of the microbatch.
    """
    zero = np.zeros_like(tokens)
    forward, backward, exchange, slowest, ends = zero, zero, zero, zero, zero
    flows = problem.receives_gradient
    pairs = iter(problem.pairs_per_token)
    for part in problem.half.parts:
        if isinstance(part, Dense):
            there, back = _dense_seconds(problem, part, family, tokens, flows)
            forward, backward, ends = forward + there, backward + back, ends + there + back
        elif isinstance(part, Layers):
            there, back, sent = _layer_seconds(problem, part, family, tokens, next(pairs), flows or part.trainable)
            forward, backward = forward + part.count * there, backward + part.count * back
            exchange, slowest = exchange + part.count * sent, np.maximum(slowest, there + back + sent)
        flows = flows or part.trainable
    slack = problem.efficiency.slack
    return PassTime(slack * forward, slack * backward, slack * exchange, slack * slowest, slack * ends)


def _dense_seconds(
    problem: RoleProblem, part: Dense, family: Family, tokens: FloatArray, flows: bool
) -> tuple[FloatArray, FloatArray]:
    device, share, width = problem.cluster.device, problem.efficiency, problem.precision.computing
    vectors = tokens * part.per_token / family.context
    outputs = part.outputs / family.tensor
    once = part.copies * product_seconds(vectors, outputs, float(part.inputs), device, share, width)
    # Reading and writing the result and its gradient; a head's logits become float32 in the loss.
    moved = part.copies * vectors * outputs * 3 * width / (device.memory_bandwidth * share.memory)
    return once + moved, (int(part.trainable) + int(flows)) * once + moved * (part.trainable or flows)


def _layer_seconds(
    problem: RoleProblem, part: Layers, family: Family, tokens: FloatArray, pairs: float, trains: bool
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Forward, backward and exposed exchange of one layer. ``trains`` says that gradients flow into or through it."""
    trains = trains and not part.unused
    device, share, width = problem.cluster.device, problem.efficiency, problem.precision.computing
    products = _products(problem, part, family, tokens)
    sharers = family.tensor * family.context
    attention = 4.0 * part.query_width * pairs * tokens / sharers / (device.peak_for(width) * share.attention)
    moved = tokens * _moved_bytes(part, width) / sharers / (device.memory_bandwidth * share.memory)
    forward = np.maximum(products + attention + moved, share.launch)
    tensor, context = _exchange(problem, part, family, tokens)
    sent = tensor + np.maximum(context - attention, 0.0)
    if not trains:
        return forward, np.zeros_like(forward), sent
    backward = (1 + part.trainable) * products + FLASH_BACKWARD * attention + 2 * moved
    backward = np.maximum(backward, 2 * share.launch)
    sent = sent + tensor + np.maximum(2 * context - FLASH_BACKWARD * attention, 0.0)
    if family.recompute == "full":
        backward, sent = backward + forward, sent + tensor
    elif family.recompute == "selective":
        backward = backward + moved
    return forward, backward, sent


def _products(problem: RoleProblem, part: Layers, family: Family, tokens: FloatArray) -> FloatArray:
    """Seconds of a layer's products with weights, forward."""
    device, share, width = problem.cluster.device, problem.efficiency, problem.precision.computing
    vectors, tensor = tokens / family.context, family.tensor

    def seconds(m: FloatArray, n: float, k: float, groups: int = 1) -> FloatArray:
        return product_seconds(m, n, k, device, share, width, groups)

    key_value = max(part.key_value_width / tensor, part.head_size)
    total = seconds(vectors, part.query_width / tensor + 2 * key_value, part.hidden)
    total = total + seconds(vectors, part.hidden, part.query_width / tensor)
    ups = 2 if part.gated else 1
    dense_width = part.feed_forward if part.experts is None else part.experts.shared
    if dense_width:
        total = total + seconds(vectors, ups * dense_width / tensor, part.hidden)
        total = total + seconds(vectors, part.hidden, dense_width / tensor)
    if (mixture := part.experts) is not None:
        each, inner = vectors * mixture.chosen / mixture.count, mixture.feed_forward / tensor
        total = total + seconds(each, ups * inner, part.hidden, mixture.count)
        total = total + seconds(each, part.hidden, inner, mixture.count)
    return total


def _moved_bytes(part: Layers, width: int) -> float:
    """Bytes per token that a layer's norms, residuals, rotations and activations read and write, forward.

    Two norms read and write the hidden state, two sums read two and write one, the rotation reads and writes queries
    and keys, and a fused activation reads its inputs and writes its output.
    """
    residual = 10 * part.hidden
    rotation = 2 * (part.query_width + part.key_value_width)
    activation = (3 if part.gated else 2) * part.active_feed_forward
    return float(width * (residual + rotation + activation))


def _exchange(problem: RoleProblem, part: Layers, family: Family, tokens: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Seconds of a layer's forward collectives among tensor ranks, and among context ranks.

    Tensor ranks gather and scatter the hidden state around attention and around the feed-forward network, with
    sequence parallelism between (Korthikanti et al., arXiv 2205.05198, section 4.2). Context ranks gather keys and
    values.
    """
    cluster, share, width = problem.cluster, problem.efficiency, problem.precision.computing
    hidden = tokens / family.context * part.hidden * width
    speed = ring_bandwidth(cluster, family.tensor, 1)
    tensor = 4 * gather_seconds(hidden, family.tensor, speed, share)
    keys = tokens * 2 * part.key_value_width / family.tensor * width
    context = gather_seconds(keys, family.context, ring_bandwidth(cluster, family.context, family.tensor), share)
    return tensor, context


def product_seconds(
    m: FloatArray,
    n: float,
    k: FloatArray | float,
    device: Device,
    share: Efficiency,
    width: int,
    groups: int = 1,
) -> FloatArray:
    """Time of the product of ``[m, k]`` and ``[k, n]``: the slower of computing and of moving data.

    Computing is slowed by the last wave of tiles, which leaves half of the processors idle on average, since packed
    microbatches differ in length; a product of less than a wave takes as long as one.

    Args:
        m: tokens, of each group.
        n: numbers in a vector of the result.
        k: the dimension that is summed over.
        device: where.
        share: how much of its peaks is reached.
        width: bytes of a number.
        groups: equal products side by side, such as those of experts.
    """
    waves = groups * (m / TILE) * (n / TILE) / device.units
    full = waves / np.maximum(1.0, waves + 0.5)
    computing = groups * 2.0 * m * n * k / (device.peak_for(width) * share.dense * full)
    moved = groups * width * (m * k + k * n + m * n)
    moving: FloatArray = moved / (device.memory_bandwidth * share.memory)
    slower: FloatArray = np.maximum(computing, moving)
    return slower


def ring_bandwidth(cluster: Cluster, members: FloatArray | float, stride: int) -> FloatArray:
    """Bytes/s per device of a ring over ``members`` devices, every ``stride``-th one.

    A ring that leaves its node uses the network adapter of every member in the node, up to what the links carry.

    Args:
        cluster: where.
        members: devices of a ring.
        stride: devices from one member to the next.
    """
    device = cluster.device
    count = np.asarray(members, dtype=np.float64)
    local = np.maximum(1.0, np.minimum(count, cluster.per_node // stride))
    within = count * stride <= cluster.per_node
    return np.where(within, device.link, np.minimum(device.link, device.network * local))


def gather_seconds(
    size: FloatArray | float, members: FloatArray | float, speed: FloatArray, share: Efficiency
) -> FloatArray:
    """Time of a ring's all-gather or reduce-scatter of ``size`` bytes (Thakur et al. 2005, section 3).

    An all-reduce takes twice that.

    Args:
        size: bytes of the whole.
        members: devices of the ring.
        speed: bytes/s per device on paper.
        share: how much of it is reached.
    """
    count = np.asarray(members, dtype=np.float64)
    moved = np.asarray(size) * (count - 1) / count / (speed * share.exchange)
    return np.where(count > 1, moved + share.latency, 0.0)
