"""Bytes on the fullest device of a role: weights, gradients, states, activations, logits, features, overhead."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np

from flowtrain_lightning.allocator.description import Half
from flowtrain_lightning.allocator.division import Division, division, experts_share, parameters_of_rank
from flowtrain_lightning.allocator.flops import FloatArray
from flowtrain_lightning.allocator.late_bytes import late_bytes, late_bytes_outside
from flowtrain_lightning.allocator.module_parts import Dense, Layers
from flowtrain_lightning.allocator.role_layout import Recompute
from flowtrain_lightning.allocator.role_problem import Family, RoleProblem
from flowtrain_lightning.allocator.stage_layers import layers_of_stages, parameters_of_a_stage
from flowtrain_lightning.packing.role_graph import GENERATOR

LOGIT_BYTES = 12
"""Bytes per logit at the peak of the loss's backward: log-probabilities and their gradient in float32, and the logits
and their gradient in bf16 (in float32: the logits, which their gradient replaces). A loss in chunks of tokens holds
those of one chunk."""

AUTOCAST_BYTES = 2
"""Bytes by which a number in float32 is wider than one that autocast computes with."""

RMS_NORM_BYTES = 4
"""Bytes of a number in float32, in which eager norms by the root mean square keep their input."""

CHOICE_BYTES = 28
"""Bytes of one choice of an expert by a token, which layers keep that are computed again: score and number, and what
sorts tokens by experts."""

USABLE = 0.94
"""Share of the memory that may be planned for; the rest is lost between blocks of torch's caching allocator."""

_UNDIVIDED = Division()

GATHERED_LAYERS = 2
"""Layers whose gathered weights exist at the same time under full sharding: the present and the next one. What is
outside of layers, such as embeddings and head, is gathered for the whole forward and backward (FSDP2's root)."""


@dataclass(frozen=True)
class MemoryUse:
    """Bytes on one device, by purpose; arrays over the data degrees of a family.

    Attributes:
        weights: parameters, their copies for computing, gathered layers.
        gradients: gradients of what trains.
        states: moments and master weights of the optimizer.
        activations: what forwards keep for backwards, and what one layer works with.
        logits: what the loss needs, beyond what a layer works with at another time.
        features: entries of the pool, with their gradients.
        overhead: context, libraries, communication buffers.
    """

    weights: FloatArray
    gradients: FloatArray
    states: FloatArray
    activations: FloatArray
    logits: FloatArray
    features: FloatArray
    overhead: FloatArray

    @property
    def total(self) -> FloatArray:
        """``[data degrees]`` bytes for all purposes."""
        found: FloatArray = np.sum([getattr(self, field.name) for field in fields(self)], axis=0)
        return found

    def or_if_more(self, other: MemoryUse) -> MemoryUse:
        """Of two moments of one role the one that takes more, for each data degree."""
        more = other.total > self.total
        return MemoryUse(
            **{f.name: np.where(more, getattr(other, f.name), getattr(self, f.name)) for f in fields(self)}
        )

    def at(self, number: int) -> dict[str, float]:
        """Bytes by purpose for the ``number``-th data degree."""
        return {f.name: float(np.broadcast_to(getattr(self, f.name), self.total.shape)[number]) for f in fields(self)}


def memory_use(problem: RoleProblem, family: Family, tokens: FloatArray, microbatches: FloatArray) -> MemoryUse:
    """Bytes on the fullest device of a role.

    Args:
        problem: the role.
        family: how it is laid out.
        tokens: ``[layouts]`` tokens of the largest microbatch.
        microbatches: ``[layouts]`` microbatches of a replica and step.
    """
    half, precision = problem.half, problem.precision
    here = parameters_of_a_stage(problem, family)
    trains = half.trainable_parameters / max(1, half.parameters)

    def kept(what: str, width: float) -> FloatArray:
        """Bytes of a rank's share: experts are divided anyway, among fewer ranks than the rest."""
        experts = here * experts_share(half, family.tensor) * (1 - 1 / family.expert) * (family.kept_share(what) == 1)
        return np.asarray((here * family.kept_share(what) - experts) * width)

    # Sharded weights are cast while they are gathered, so that no second copy of them is kept.
    width = precision.weights if family.sharded else precision.weights + precision.copies
    frozen = width if precision.frozen is None else precision.frozen
    weights = kept("weights", trains * width + (1 - trains) * frozen)
    gradients = kept("gradients", trains * precision.gradients)
    states = kept("states", trains * precision.states * (not family.host_states(precision)))
    if family.host_weights:
        weights, gradients = np.zeros_like(weights), np.zeros_like(gradients)
    activations, logits, features = _batch_bytes(problem, family, tokens, microbatches)
    overhead = np.full(tokens.shape, problem.cluster.device.overhead)
    use = MemoryUse(weights, gradients, states, activations, logits, features, overhead)
    if not family.sharded:
        return use
    share = trains if trains < 0.5 else 1.0
    computing, ending = (
        replace(use, weights=weights + gathered, gradients=gradients + share * unreduced)
        for gathered, unreduced in _gathered_bytes(problem, family)
    )
    left = np.maximum(_in_flight(problem, family, microbatches) - 1, 0) * _kept_bytes(problem, family, tokens)[0]
    return computing.or_if_more(replace(ending, activations=left, logits=np.zeros_like(logits)))


def _gathered_bytes(problem: RoleProblem, family: Family) -> tuple[tuple[float, float], tuple[float, float]]:
    """Bytes of gathered weights, and of gradients that are not scattered yet: in a backward of FSDP2, and at its end.

    In a backward, what is outside of layers is there whole beside two layers, with the gradients of one layer in both
    widths and of what comes after the layers. At its end, what is outside is reduced: its gradient is there in both
    widths, and of layers nothing. Equal projectors side by side, as Qwen3-VL's mergers, are gathered one by one as
    layers are.
    """
    width, reduced = problem.precision.computing, problem.precision.reduced
    half, tensor = problem.half, family.tensor
    aside = [part for part in half.parts if isinstance(part, Dense) and part.copies > 1]
    last = max((number for number, part in enumerate(half.parts) if isinstance(part, Layers)), default=-1)
    sizes = [
        0.0 if isinstance(part, Layers) or part in aside else parameters_of_rank(half, part, tensor)
        for part in half.parts
    ]
    layer = max((_gathered_parameters(half, part, family) for part in half.layers), default=0.0)
    layer = max(layer, sum(parameters_of_rank(half, part, tensor) / part.copies for part in aside))
    outside, after = sum(sizes), sum(sizes[last + 1 :])
    if any(isinstance(part, Dense) and part.tied for part in half.parts):
        after = outside
    computing = (GATHERED_LAYERS * layer + outside) * width, layer * (width + reduced) + after * width
    return computing, (outside * width, outside * (width + reduced))


def _batch_bytes(
    problem: RoleProblem, family: Family, tokens: FloatArray, microbatches: FloatArray
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Activations, logits and features on the fullest stage of a pipeline.

    The first stage holds the most microbatches, the last one holds one and the logits. These are gone when the last
    layer's backward begins, as is what was kept outside of layers, so that what a layer works with takes their place.
    """
    in_flight, kept = _in_flight(problem, family, microbatches), _kept_bytes(problem, family, tokens)
    outside = _kept_outside(problem, family)
    working = max(0.0, _working_bytes(problem, family) - outside) * tokens
    logits = _logit_bytes(problem, family) * np.minimum(tokens, problem.load.loss_chunk or np.inf)
    features = in_flight * tokens * _feature_bytes(problem, family)
    more = np.maximum(logits - working, 0.0)
    if family.schedule != "1f1b":
        first, last = _bytes_of_split_stages(problem, family, tokens, in_flight * kept.max(axis=0), in_flight)
        at_first = first >= last + more
        return np.where(at_first, first, last) + working, np.where(at_first, 0.0, more), features
    if family.pipeline == 1:
        return np.minimum(in_flight * kept[0], family.activation_bytes) + working, more, features
    open_in_stage = np.array([np.minimum(in_flight, family.pipeline - stage) for stage in range(family.pipeline)])
    if not problem.load.fills_stages:
        open_in_stage[:] = in_flight
    before_last = np.minimum((open_in_stage * kept).max(axis=0), family.activation_bytes)
    at_last = np.minimum(kept[-1], family.activation_bytes)
    at_first = before_last - at_last >= more
    return np.where(at_first, before_last, at_last) + working, np.where(at_first, 0.0, more), features


def _bytes_of_split_stages(
    problem: RoleProblem, family: Family, tokens: FloatArray, kept: FloatArray, in_flight: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Activations of a pipeline's first and last stage where backwards are in two parts; in a V the first is both.

    All stages have as many microbatches as the first one has. The first waits for backwards, and has activations of
    all; the last waits for nobody, and has done the first part of nearly all, whose second part fills its time later.
    In a V a stage may have as many of either.

    Args:
        problem: the role.
        family: its layout.
        tokens: of a microbatch.
        kept: bytes of the activations of all microbatches of a stage.
        in_flight: how many these are.
    """
    half, width = problem.half, problem.precision.computing
    casts = problem.precision.copies > 0 and problem.precision.eager
    most = layers_of_stages(problem, family).max() / half.depth
    layers = sum(part.count * late_bytes(part, width, casts) for part in half.layers) * most
    number = next(number for number, part in enumerate(half.parts) if isinstance(part, Layers))
    before, behind = (
        sum(late_bytes_outside(part, width) for part in parts) for parts in (half.parts[:number], half.parts[number:])
    )
    every = in_flight * tokens / family.context
    if family.schedule == "zb-v":
        both = np.maximum(kept, every * layers) + every * (before + behind)
        return both, both
    return np.maximum(kept, every * (layers + before)), every * (layers + behind)


def _in_flight(problem: RoleProblem, family: Family, microbatches: FloatArray) -> FloatArray:
    """Microbatches whose activations are kept at once: on the first stage of a pipeline that they fill, or on each."""
    fills = family.pipeline > 1 and problem.load.fills_stages
    most = family.pipeline if fills else problem.batches_in_flight
    return np.minimum(microbatches, most)


def _kept_bytes(problem: RoleProblem, family: Family, tokens: FloatArray) -> FloatArray:
    """``[stages, layouts]`` bytes on the device that a microbatch keeps from its forward to its backward."""
    layers = layers_of_stages(problem, family) if family.pipeline > 1 else np.array([max(1.0, problem.half.depth)])
    kept = np.outer(layers / layers.sum(), kept_activations(problem, family) * tokens)
    if family.host_activations:
        kept = kept * np.minimum(1.0, GATHERED_LAYERS / layers)[:, None]
    return kept


def activation_bytes(
    part: Layers, width: int, recompute: Recompute, keeps: bool = True, ranks: Division = _UNDIVIDED
) -> float:
    """Bytes per token that one layer keeps for its backward (after Korthikanti et al., arXiv 2205.05198, section 4.1).

    Without recomputing it keeps the inputs of both norms and of every product, queries, keys, values and attention's
    result and logarithms, and what activations need. Attention's scores are not kept, since its kernel is fused. Layers
    with gated networks, Llama's and those after it, normalise by the root mean square, which Hugging Face's models
    compute in float32 step by step: each norm keeps its input so, and its result before the weight; those of heads,
    too. Tensor ranks keep a share each, but for the inputs of attention and of the feed-forward network: these are
    gathered, and kept so, where the paper gathers them a second time. Where results are recomputed selectively, those
    of the last products of attention and of the network are kept twice: of all tokens, since each rank has a summand of
    them, and summed. To experts each rank brings its share of the tokens, so that nothing is gathered or summed there.
    Of a fused product of queries, keys and values all is kept for the values, though queries and keys are kept anew
    once they are rotated.

    Args:
        part: the layers.
        width: bytes of a number.
        recompute: what is computed again; ``"selective"`` does without norms' and activations' results.
        keeps: the weights train, so that products keep their inputs.
        ranks: tensor ranks that share the layer.
    """
    inner = part.active_feed_forward
    attention = 2 * part.query_width + 2 * part.key_value_width
    logarithms = 4 * part.heads
    choices = 0 if part.experts is None else CHOICE_BYTES * part.experts.chosen / ranks.feed_forward
    if recompute == "full":
        return width * part.hidden / ranks.attention + choices
    if recompute == "selective":
        products = (width * (2 * part.hidden + attention) + logarithms) / ranks.attention + choices
        unsummed = (2 if part.experts is None else 1) * part.hidden if ranks.attention > 1 else 0
        results = (2 if part.gated else 1) * inner
        if part.experts is not None:  # of each expert that a token passes: there is no last product of all of them
            results += (part.experts.chosen - (0 if part.experts.shared else 1)) * part.hidden
        return products + width * unsummed + width * results / ranks.feed_forward
    rotated = part.query_width + part.key_value_width if part.fused else 0
    activation = (3 if part.gated else 1) * inner
    gathered, inputs = (2 * part.hidden, inner) if keeps else (0, 0)
    if keeps and part.experts is not None:
        gathered, inputs = part.hidden, inputs + part.hidden + 2 * part.experts.chosen * part.hidden
    normalised = part.norms.count * part.hidden + part.norms.heads * (part.query_width + part.key_value_width)
    norms = normalised * _norm_bytes(part, width)
    shared = (norms + width * (attention + rotated) + logarithms) / ranks.attention
    if part.experts is not None:
        shared += choices + 4 * part.experts.count / ranks.feed_forward  # a score of each expert, in float32
    return width * gathered + shared + width * (activation + inputs) / ranks.feed_forward


def _norm_bytes(part: Layers, width: int) -> int:
    """Bytes that a norm keeps of a number: of its input, which is float32 in a root mean square, and its result."""
    if not part.gated:
        return width
    return RMS_NORM_BYTES + (RMS_NORM_BYTES if part.norms.in_float32 else width)


def outside_bytes(half: Half, part: Dense, width: int) -> float:
    """Bytes per token that a product outside of layers keeps for its backward: inputs, and before those their cause.

    After layers that is their last norm, which keeps its input; after another product an activation, which does too.
    """
    before = half.parts[: half.parts.index(part)]
    inputs = part.copies * part.per_token * part.inputs * width
    if before and isinstance(before[-1], Layers):
        last = before[-1]
        return inputs * part.trainable + last.hidden * _norm_bytes(last, width)
    return inputs * (int(part.trainable) + bool(before and isinstance(before[-1], Dense)))


def _gathered_parameters(half: Half, part: Layers, family: Family) -> float:
    """Parameters of a layer that a rank has while it computes it."""
    experts = part.expert_parameters * (1 - 1 / family.expert) / family.tensor
    return parameters_of_rank(half, part, family.tensor) / max(1, part.count) - experts


def kept_activations(problem: RoleProblem, family: Family) -> float:
    """Bytes per token of a microbatch that all layers together keep, and what is around them."""
    half, width = problem.half, problem.precision.computing
    flows, total = problem.receives_gradient, 0.0
    for part in half.parts:
        flows = flows or part.trained_parameters > 0
        if isinstance(part, Layers) and flows and not part.unused:
            ranks = division(half, part, family.tensor)
            trains = part.trained_parameters > 0
            total += part.count * activation_bytes(part, width, family.recompute, trains, ranks)
            total += part.count * _autocast_bytes(problem, family, part, family.recompute) / ranks.attention
    return total / family.context + _kept_outside(problem, family)


def _kept_outside(problem: RoleProblem, family: Family) -> float:
    """Bytes per token of a microbatch that products outside of layers keep."""
    half, flows, total = problem.half, problem.receives_gradient, 0.0
    for part in half.parts:
        flows = flows or part.trained_parameters > 0
        if isinstance(part, Dense) and flows:
            total += outside_bytes(half, part, problem.precision.computing)
        if isinstance(part, Layers) and flows and half.layers[-1] is part:  # the norm behind them and what it gives
            total += 2 * _autocast_bytes(problem, family, part, "full")
    return total / family.context


def _autocast_bytes(problem: RoleProblem, family: Family, part: Layers, recompute: Recompute) -> float:
    """Bytes per token that a layer of a backbone keeps more under autocast, which leaves weights in float32.

    What embeddings give is in float32 then, and so is the hidden state between layers: a layer's input, and what its
    norms give before their weights. Each product that trains keeps a copy in bf16 of its own of what a norm gives:
    queries, keys and values, gate and up. Towers begin with a product, and FSDP2 casts weights: these compute in bf16.
    """
    casts = problem.precision.copies > 0 and problem.precision.eager and not family.sharded
    if not problem.is_trunk or not casts or not part.trainable:
        return 0.0
    numbers = part.hidden * AUTOCAST_BYTES
    if recompute != "none":
        return numbers
    norms = 2 if part.gated else 0  # a layer norm's input is in float32 anyway
    return numbers * (norms + 2 * (not part.fused) + int(part.gated))


def _working_bytes(problem: RoleProblem, family: Family) -> float:
    """Bytes per token that the largest layer works with: what it computes again and then keeps, and gradients.

    Gradients are most in the feed-forward network: of the hidden state on both sides, and of what the activation takes.
    A forward without a backward needs about half of what a layer would keep.
    """
    half, width = problem.half, problem.precision.computing
    flows = problem.receives_gradient or any(part.trained_parameters for part in half.layers)

    def working(part: Layers) -> float:
        ranks = division(half, part, family.tensor)
        whole = activation_bytes(part, width, "none", ranks=ranks)
        if not flows:
            return whole / 2
        wider = (_autocast_bytes(problem, family, part, each) for each in ("none", family.recompute))
        whole += (next(wider) - next(wider)) / ranks.attention
        inner = (2 if part.gated else 1) * part.active_feed_forward / ranks.feed_forward
        return whole - activation_bytes(part, width, family.recompute, ranks=ranks) + width * (inner + 2 * part.hidden)

    return max(map(working, half.layers), default=0.0) / family.context


def _logit_bytes(problem: RoleProblem, family: Family) -> float:
    """Bytes of logits per token of a microbatch; encoders have none."""
    if not problem.is_trunk:
        return 0.0
    (vocabulary, _), head = problem.half.result, problem.half.parts[-1]
    if isinstance(head, Dense) and not head.gathered:
        vocabulary //= family.tensor
    return LOGIT_BYTES * vocabulary / family.context


def _feature_bytes(problem: RoleProblem, family: Family) -> float:
    """Bytes in the pool per encoder token: a feature, and its gradient where the encoder trains; others hold few."""
    if problem.is_trunk or problem.role == GENERATOR:
        return 0.0
    width, per_token = problem.half.result
    return width * per_token * problem.precision.computing * (1 + problem.half.trains) / family.tensor
