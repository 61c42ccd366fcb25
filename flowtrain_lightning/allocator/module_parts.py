"""The parts that a module is made of, as far as planning needs them: embeddings, matrices, transformer layers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Embedding:
    """A vector for each token id or position: parameters, but no FLOPs.

    Attributes:
        entries: how many vectors.
        width: numbers in a vector.
        trainable: whether it trains.
        apart: it trains also where its half is frozen, as learned queries do.
    """

    entries: int
    width: int
    trainable: bool = True
    apart: bool = False

    @property
    def divided_width(self) -> int:
        """The dimension by which tensor ranks may divide it."""
        return self.entries

    @property
    def parameters(self) -> int:
        """Numbers that it holds."""
        return self.entries * self.width

    @property
    def trained_parameters(self) -> int:
        """Those that train."""
        return self.parameters * self.trainable


@dataclass(frozen=True)
class Dense:
    """A matrix that vectors are multiplied by: a patch embedding, a convolution, a projector, a language-model head.

    Attributes:
        inputs: numbers in a vector that goes in.
        outputs: numbers in a vector that comes out.
        per_token: vectors per token of the half; a projector that merges 2 x 2 patches has 1/4.
        copies: equal matrices side by side, such as the mergers of Qwen3-VL's several feature levels.
        tied: the matrix belongs to an embedding, so that it adds no parameters.
        trainable: whether it trains.
        gathered: of a language-model head: tensor ranks gather their shares of the logits, and each computes the loss;
            else the loss is of shares, as Megatron-LM's.
    """

    inputs: int
    outputs: int
    per_token: float = 1.0
    copies: int = 1
    tied: bool = False
    trainable: bool = True
    gathered: bool = True

    @property
    def divided_width(self) -> int:
        """The dimension by which tensor ranks may divide it."""
        return self.outputs

    @property
    def parameters(self) -> int:
        """Numbers that it holds. Biases are left out: they are below a thousandth."""
        return 0 if self.tied else self.inputs * self.outputs * self.copies

    @property
    def trained_parameters(self) -> int:
        """Those that train."""
        return self.parameters * self.trainable


@dataclass(frozen=True)
class MixtureOfExperts:
    """A mixture of experts in place of a layer's feed-forward network.

    Attributes:
        count: experts of a layer.
        chosen: experts that a token passes.
        feed_forward: inner width of one expert.
        shared: inner width of the network that every token passes beside its experts; 0 without one.
        sent_once: a token goes once to each rank that has experts of it (DeepEP); else once for each of these experts.
    """

    count: int
    chosen: int
    feed_forward: int
    shared: int = 0
    sent_once: bool = False

    def sent(self, ranks: int) -> float:
        """How often a token goes to one of so many ranks, itself included, if all choices are as likely."""
        return ranks * (1 - (1 - 1 / ranks) ** self.chosen) if self.sent_once else self.chosen


@dataclass(frozen=True)
class Norms:
    """Norms of a transformer layer.

    Attributes:
        count: of the residual stream; Gemma 2 and 3 have two more, behind attention and the feed-forward network.
        heads: queries and keys are normalised head by head, as Qwen3's and Gemma 3's are.
        in_float32: weights multiply in float32, as Gemma's do, so that what they multiply is kept so.
    """

    count: int = 2
    heads: bool = False
    in_float32: bool = False


@dataclass(frozen=True)
class Layers:
    """Equal transformer layers, one after the other.

    Attributes:
        count: how many.
        hidden: width of the residual stream.
        feed_forward: inner width of the feed-forward network; unused with ``experts``.
        heads: attention heads.
        key_value_heads: heads of keys and values; fewer than ``heads`` with grouped queries.
        head_size: width of one head.
        gated: the feed-forward network has three matrices (SwiGLU and the like), not two.
        causal: a token attends to itself and what is before it.
        window: tokens that attention spans: with ``causal`` a sliding window, else blocks; None is the sequence.
        experts: the mixture in place of the feed-forward network.
        unused: the result is computed but never read, so that nothing flows back.
        trainable: whether they train.
        adapters: rank of the low-rank adapters (LoRA) that train beside every matrix but those of experts; 0 is none.
        fused: queries, keys and values are one product, whose result is kept whole beside rotated queries and keys.
        norms: its norms.
    """

    count: int
    hidden: int
    feed_forward: int
    heads: int
    key_value_heads: int
    head_size: int
    gated: bool = False
    causal: bool = False
    window: int | None = None
    experts: MixtureOfExperts | None = None
    unused: bool = False
    trainable: bool = True
    adapters: int = 0
    fused: bool = False
    norms: Norms = Norms()

    @property
    def query_width(self) -> int:
        """Numbers in a token's queries."""
        return self.heads * self.head_size

    @property
    def key_value_width(self) -> int:
        """Numbers in a token's keys, and in its values."""
        return self.key_value_heads * self.head_size

    @cached_property
    def attention_parameters(self) -> int:
        """Numbers in one layer's attention matrices."""
        return 2 * self.hidden * (self.query_width + self.key_value_width)

    @property
    def active_feed_forward(self) -> int:
        """Inner width that one token passes."""
        if self.experts is None:
            return self.feed_forward
        return self.experts.chosen * self.experts.feed_forward + self.experts.shared

    @property
    def expert_parameters(self) -> int:
        """Numbers of one layer's experts."""
        if self.experts is None:
            return 0
        return (3 if self.gated else 2) * self.hidden * self.experts.count * self.experts.feed_forward

    @cached_property
    def adapted_width(self) -> int:
        """Inputs and outputs of one layer's matrices that have adapters, all together."""
        attention = 4 * self.hidden + 2 * (self.query_width + self.key_value_width)
        inner = self.feed_forward if self.experts is None else self.experts.shared
        return attention + (3 if self.gated else 2) * (self.hidden + inner) * (inner > 0)

    @cached_property
    def trained_parameters(self) -> int:
        """Those that train: all, or adapters."""
        return self.parameters if self.trainable else self.count * self.adapters * self.adapted_width

    @cached_property
    def layer_parameters(self) -> int:
        """Numbers of one layer, its two norms and adapters included."""
        matrices = 3 if self.gated else 2
        if self.experts is None:
            feed_forward = matrices * self.hidden * self.feed_forward
        else:
            width = self.experts.count * self.experts.feed_forward + self.experts.shared
            feed_forward = matrices * self.hidden * width + self.hidden * self.experts.count
        return self.attention_parameters + feed_forward + 2 * self.hidden + self.adapters * self.adapted_width

    @cached_property
    def parameters(self) -> int:
        """Numbers of all layers."""
        return self.count * self.layer_parameters


Part = Embedding | Dense | Layers
