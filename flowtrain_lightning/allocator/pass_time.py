"""Time of one forward and backward of a half over one microbatch: kernels, starting them, and collectives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from flowtrain_lightning.allocator.collectives import ring
from flowtrain_lightning.allocator.division import division, sharers
from flowtrain_lightning.allocator.flops import FLASH_BACKWARD, FloatArray
from flowtrain_lightning.allocator.kernels import attention_seconds, moving_seconds, product_seconds
from flowtrain_lightning.allocator.module_parts import Dense, Layers
from flowtrain_lightning.allocator.operations import moved_bytes, operations
from flowtrain_lightning.allocator.role_problem import Family, RoleProblem

LOSS_BYTES = 32
"""Bytes that eager code moves per logit, forward and backward together: the copy in float32, log-probabilities, their
gradient, and its copy in bf16, each written once and read once or twice."""


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


def pass_time(
    problem: RoleProblem, family: Family, tokens: FloatArray, pairs_per_token: Sequence[FloatArray] | None = None
) -> PassTime:
    """Time of one microbatch.

    Args:
        problem: the role.
        family: how a replica shares its work.
        tokens: ``[layouts]`` tokens of the microbatch; or ``[microbatches]`` of a family of one layout.
        pairs_per_token: for every part with layers the ``[microbatches]`` attended pairs of a mean token; None is as in
            the problem's data.
    """
    zero = np.zeros_like(tokens)
    forward, backward, exchange, slowest, ends = zero, zero, zero, zero, zero
    flows = problem.receives_gradient
    pairs: Iterator[FloatArray | float] = iter(pairs_per_token or problem.pairs_per_token)
    for part in problem.half.parts:
        if isinstance(part, Dense):
            there, back = _dense_seconds(problem, part, family, tokens, flows)
            forward, backward, ends = forward + there, backward + back, ends + there + back
        elif isinstance(part, Layers):
            there, back, sent = _layer_seconds(
                problem, part, family, tokens, next(pairs), flows or part.trained_parameters > 0
            )
            forward, backward = forward + part.count * there, backward + part.count * back
            exchange, slowest = exchange + part.count * sent, np.maximum(slowest, there + back + sent)
        flows = flows or part.trained_parameters > 0
    return PassTime(forward, backward, exchange, slowest, ends)


def _dense_seconds(
    problem: RoleProblem, part: Dense, family: Family, tokens: FloatArray, flows: bool
) -> tuple[FloatArray, FloatArray]:
    device, share, width = problem.cluster.device, problem.efficiency, problem.precision.computing
    vectors, by = tokens * part.per_token / family.context, sharers(problem.half, part.outputs, family.tensor)
    once = part.copies * product_seconds(vectors, part.outputs / by, float(part.inputs), device, share, width)
    if not (problem.is_trunk and part is problem.half.parts[-1]):
        moved = moving_seconds(part.copies * vectors * part.outputs / by * 3.0 * width, device, share)
        return once + moved, (int(part.trainable) + int(flows)) * once + moved * (part.trainable or flows)
    # Tensor ranks gather their shares of the logits. A loss in chunks makes all of it a second time in the backward.
    logits = vectors * part.outputs
    sent = ring(problem.cluster, by, 1, share.exchange).gather(logits * width) if part.gathered else 0.0
    moved = moving_seconds(logits / (1 if part.gathered else by) * (LOSS_BYTES / 3), device, share)
    forward = once + moved + sent
    backward = (int(part.trainable) + int(flows)) * once + 2 * moved * (part.trainable or flows)
    return forward, backward + forward * (vectors > (problem.load.loss_chunk or np.inf))


def _layer_seconds(
    problem: RoleProblem, part: Layers, family: Family, tokens: FloatArray, pairs: FloatArray | float, trains: bool
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Forward, backward and exposed exchange of one layer. ``trains`` says that gradients flow into or through it."""
    trains = trains and not part.unused
    device, share, width = problem.cluster.device, problem.efficiency, problem.precision.computing
    products, adapters = _products(problem, part, family, tokens), _adapters(problem, part, family, tokens)
    ranks, mine = division(problem.half, part, family.tensor), tokens / family.context
    attention = attention_seconds(part, pairs, mine / ranks.attention, device, share, width)
    casts = _cast_bytes(part) / ranks.feed_forward if problem.precision.multiplied < width else 0.0
    divided = family.expert_ranks > 1
    bytes_of_token = moved_bytes(part, width, ranks, eager=problem.precision.eager, divided=divided) + casts
    moved = moving_seconds(mine * bytes_of_token, device, share)
    start = share.launch * _operations(problem, part, mine, pairs, divided)
    forward = np.maximum(products + adapters + attention + moved, start)
    tensor, context = _exchange(problem, part, family, tokens)
    gathered = tensor / 2  # the other half is scattered, which selective recomputing keeps
    tensor = tensor + _dispatch(problem, part, family, tokens)
    sent = tensor + np.maximum(context - attention, 0.0)
    if not trains:
        return forward, np.zeros_like(forward), sent
    backward = (1 + part.trainable) * products + 2 * adapters + FLASH_BACKWARD * attention + 2 * moved
    backward = np.maximum(backward, 2 * start)
    sent = sent + tensor + np.maximum(2 * context - FLASH_BACKWARD * attention, 0.0)
    if family.recompute == "full":
        backward, sent = backward + forward, sent + tensor
    elif family.recompute == "selective":
        backward, sent = backward + moved, sent + gathered
    return forward, backward, sent


def _operations(
    problem: RoleProblem, part: Layers, tokens: FloatArray, pairs: FloatArray | float, divided: bool
) -> FloatArray:
    """Operations that a layer's forward starts; in float32 attention is one for each sequence."""
    each = operations(part, eight_bits=problem.precision.multiplied < 2, divided=divided)
    sequences = tokens / np.maximum(1.0, pairs * (1 + part.causal))
    return each + np.maximum(0.0, sequences - 1) * (problem.precision.computing > 2)


def _products(problem: RoleProblem, part: Layers, family: Family, tokens: FloatArray) -> FloatArray:
    """Seconds of a layer's products with weights, forward."""
    device, share, width = problem.cluster.device, problem.efficiency, problem.precision.multiplied
    vectors, ranks = tokens / family.context, division(problem.half, part, family.tensor)

    def seconds(m: FloatArray, n: float, k: float, groups: int = 1) -> FloatArray:
        return product_seconds(m, n, k, device, share, width, groups)

    query, key_value = part.query_width / ranks.attention, part.key_value_width / ranks.attention
    total = seconds(vectors, query + 2 * max(key_value, part.head_size), part.hidden)
    total = total + seconds(vectors, part.hidden, query)
    tensor = ranks.feed_forward
    ups = 2 if part.gated else 1
    if (mixture := part.experts) is None:
        total = total + seconds(vectors, ups * part.feed_forward / tensor, part.hidden)
        return total + seconds(vectors, part.hidden, part.feed_forward / tensor)
    own = vectors / tensor
    if mixture.shared:
        total = total + seconds(own, ups * mixture.shared, part.hidden)
        total = total + seconds(own, part.hidden, mixture.shared)
    # A rank has some of the experts, and gets their tokens from all ranks that share them.
    here = mixture.count // family.expert_ranks
    each = own * mixture.chosen / here
    total = total + seconds(each, ups * mixture.feed_forward, part.hidden, here)
    return total + seconds(each, part.hidden, mixture.feed_forward, here)


def _adapters(problem: RoleProblem, part: Layers, family: Family, tokens: FloatArray) -> FloatArray:
    """Seconds of a layer's adapters, forward: two thin products beside each matrix, taken as two of all of them."""
    if not part.adapters:
        return np.zeros_like(tokens)
    device, share, width = problem.cluster.device, problem.efficiency, problem.precision.computing
    vectors, wide = tokens / family.context, part.adapted_width / 2 / family.tensor
    down = product_seconds(vectors, part.adapters, wide, device, share, width)
    return down + product_seconds(vectors, wide, part.adapters, device, share, width)


def _cast_bytes(part: Layers) -> float:
    """Bytes per token that are read and written to have a layer's inputs of products in 8 bits, and transposed."""
    inputs = 2 * part.hidden + part.query_width + part.active_feed_forward
    return 4.0 * inputs


def _exchange(problem: RoleProblem, part: Layers, family: Family, tokens: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Seconds of a layer's forward collectives among tensor ranks, and among context ranks.

    Tensor ranks gather and scatter the hidden state around attention and around the feed-forward network, with
    sequence parallelism between (Korthikanti et al., arXiv 2205.05198, section 4.2). To experts each brings its share.
    Where they share feed-forward networks alone, they sum their results. Context ranks gather keys and values.
    """
    cluster, share, width = problem.cluster, problem.efficiency, problem.precision.computing
    hidden = tokens / family.context * part.hidden * width
    ranks = division(problem.half, part, family.tensor)
    if ranks.attention == family.tensor:
        around = 4 if part.experts is None else 2
        tensor = around * ring(cluster, family.tensor, 1, share.exchange).gather(hidden)
    else:
        tensor = ring(cluster, ranks.feed_forward, 1, share.exchange).reduce(hidden)
    keys = tokens * 2 * part.key_value_width / family.tensor * width
    return tensor, ring(cluster, family.context, family.tensor, share.exchange).gather(keys)


def _dispatch(problem: RoleProblem, part: Layers, family: Family, tokens: FloatArray) -> FloatArray:
    """Seconds in which tokens go to the ranks that hold their experts and come back, forward, with balanced experts."""
    ranks = family.expert_ranks
    if part.experts is None or ranks == 1:
        return np.zeros_like(tokens)
    among = ring(problem.cluster, ranks, family.context if family.expert > 1 else 1, problem.efficiency.exchange)
    own = tokens / family.context / family.tensor
    size = own * part.experts.sent(ranks) * part.hidden * problem.precision.computing
    return 2 * among.gather(size)  # every rank sends all but its own share, as in a gather
