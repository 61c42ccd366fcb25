"""What a module is made of, as far as planning needs it: matrices, layers of attention, and what of it trains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from flowtrain_lightning.allocator.role_layout import BACKBONE, ENCODER, PlanningError


@dataclass(frozen=True)
class Embedding:
    """A vector for each token id or position: parameters, but no FLOPs.

    Attributes:
        entries: how many vectors.
        width: numbers in a vector.
        trainable: whether it trains.
    """

    entries: int
    width: int
    trainable: bool = True

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
class Experts:
    """A mixture of experts in place of a layer's feed-forward network.

    Attributes:
        count: experts of a layer.
        chosen: experts that a token passes.
        feed_forward: inner width of one expert.
        shared: inner width of the network that every token passes beside its experts; 0 without one.
    """

    count: int
    chosen: int
    feed_forward: int
    shared: int = 0


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
    experts: Experts | None = None
    unused: bool = False
    trainable: bool = True
    adapters: int = 0
    fused: bool = False

    @property
    def query_width(self) -> int:
        """Numbers in a token's queries."""
        return self.heads * self.head_size

    @property
    def key_value_width(self) -> int:
        """Numbers in a token's keys, and in its values."""
        return self.key_value_heads * self.head_size

    @property
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

    @property
    def adapted_width(self) -> int:
        """Inputs and outputs of one layer's matrices that have adapters, all together."""
        attention = 4 * self.hidden + 2 * (self.query_width + self.key_value_width)
        inner = self.feed_forward if self.experts is None else self.experts.shared
        return attention + (3 if self.gated else 2) * (self.hidden + inner) * (inner > 0)

    @property
    def trained_parameters(self) -> int:
        """Those that train: all, or adapters."""
        return self.parameters if self.trainable else self.count * self.adapters * self.adapted_width

    @property
    def layer_parameters(self) -> int:
        """Numbers of one layer, its two norms and adapters included."""
        matrices = 3 if self.gated else 2
        if self.experts is None:
            feed_forward = matrices * self.hidden * self.feed_forward
        else:
            width = self.experts.count * self.experts.feed_forward + self.experts.shared
            feed_forward = matrices * self.hidden * width + self.hidden * self.experts.count
        return self.attention_parameters + feed_forward + 2 * self.hidden + self.adapters * self.adapted_width

    @property
    def parameters(self) -> int:
        """Numbers of all layers."""
        return self.count * self.layer_parameters


Part = Embedding | Dense | Layers


@dataclass(frozen=True)
class Half:
    """An encoder or a backbone: its parts in the order in which data flow through them.

    Attributes:
        parts: what it is made of. The last one gives its result: features, or the logits of a backbone.
        extra_tokens: tokens that its layers add to every sequence, such as a class token.
        handed_over: numbers in a vector of its result, and such vectors per token, where a projector is apart from it;
            None: what the last part gives.
        perceptrons_only: tensor ranks divide the feed-forward networks of its layers, and have all else whole, as of
            the towers of Hugging Face's models.
    """

    parts: tuple[Part, ...]
    extra_tokens: int = 0
    handed_over: tuple[int, float] | None = None
    perceptrons_only: bool = False

    @property
    def parameters(self) -> int:
        """Numbers of all parts."""
        return sum(part.parameters for part in self.parts)

    @property
    def trainable_parameters(self) -> int:
        """Numbers of the parts that train."""
        return sum(part.trained_parameters for part in self.parts)

    @property
    def trains(self) -> bool:
        """Whether any part trains."""
        return self.trainable_parameters > 0

    @property
    def layers(self) -> tuple[Layers, ...]:
        """The parts that are transformer layers."""
        return tuple(part for part in self.parts if isinstance(part, Layers))

    @property
    def depth(self) -> int:
        """Transformer layers in all."""
        return sum(part.count for part in self.layers)

    @property
    def result(self) -> tuple[int, float]:
        """Numbers in a vector of the result, and such vectors per token of the half."""
        if self.handed_over is not None:
            return self.handed_over
        last = self.parts[-1]
        if isinstance(last, Dense):
            return last.outputs * last.copies, last.per_token
        return (last.hidden if isinstance(last, Layers) else last.width), 1.0

    @property
    def projector(self) -> tuple[Dense, ...]:
        """The matrices after the last layer; ``()`` without layers."""
        layered = [number for number, part in enumerate(self.parts) if isinstance(part, Layers)]
        after = self.parts[layered[-1] + 1 :] if layered else ()
        return tuple(part for part in after if isinstance(part, Dense))

    def without_projector(self) -> Half:
        """This half up to its last layer. What it hands over is what the projector is given."""
        first, kept = self.projector[0], len(self.parts) - len(self.projector)
        return replace(self, parts=self.parts[:kept], handed_over=(first.inputs * first.copies, first.per_token))

    def adapted(self, rank: int) -> Half:
        """This half with nothing that trains but adapters of so low a rank in its layers."""
        parts = self.frozen().parts
        return replace(self, parts=tuple(replace(p, adapters=rank) if isinstance(p, Layers) else p for p in parts))

    def frozen(self, keep_projector: bool = False) -> Half:
        """This half with nothing that trains, or with nothing but what follows the last layer.

        Args:
            keep_projector: let the parts after the last layer train.
        """
        last = max((number for number, part in enumerate(self.parts) if isinstance(part, Layers)), default=-1)
        return replace(
            self,
            parts=tuple(
                part if keep_projector and number > last else replace(part, trainable=False)
                for number, part in enumerate(self.parts)
            ),
        )


@dataclass(frozen=True)
class ModuleDescription:
    """A module with its halves.

    Attributes:
        name: what it is called.
        encoders: modality -> its encoder.
        backbone: the half that reads tokens and features.
    """

    name: str
    encoders: Mapping[str, Half]
    backbone: Half
    _roles: dict[str, Half] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.encoders:
            raise PlanningError(f"{self.name} has no encoder, so there is nothing to divide; train it with DDP.")
        roles = {self.role_of(modality): half for modality, half in self.encoders.items()}
        object.__setattr__(self, "_roles", {**roles, BACKBONE: self.backbone})

    def role_of(self, modality: str) -> str:
        """The role that encodes a modality: ``encoder`` where there is one, else ``encoder_<modality>``."""
        return ENCODER if len(self.encoders) == 1 else f"{ENCODER}_{modality}"

    @property
    def roles(self) -> Mapping[str, Half]:
        """Role -> its half, encoders first."""
        return self._roles

    def receives_gradient(self, role: str) -> bool:
        """Whether gradients must flow out of a role's half into what is before it: encoders that train."""
        return role == BACKBONE and any(half.trains for half in self.encoders.values())

    def with_projectors_apart(self, tokens: Mapping[str, float]) -> ModuleDescription:
        """This module with every projector that trains behind a frozen tower in the backbone, as it is trained.

        Args:
            tokens: modality -> tokens of its encoder for each token of the backbone, if there are any.
        """
        module = self
        for modality, encoder in self.encoders.items():
            if not encoder.trains or not encoder.projector or encoder.without_projector().trains:
                continue
            each = tokens.get(modality, 0.0)
            moved = tuple(replace(part, per_token=part.per_token * each) for part in encoder.projector)
            encoders = {**module.encoders, modality: encoder.without_projector()}
            backbone = replace(module.backbone, parts=(*moved, *module.backbone.parts))
            module = replace(module, encoders=encoders, backbone=backbone)
        return module

    def with_adapters(self, rank: int) -> ModuleDescription:
        """This module with low-rank adapters (LoRA) in the backbone's layers, in place of its weights, to train.

        Raises:
            PlanningError: a rank below 1.
        """
        if rank < 1:
            raise PlanningError(f"Adapters of rank {rank} cannot be made; the rank must be at least 1.")
        return replace(self, backbone=self.backbone.adapted(rank))

    def with_frozen(self, *halves: str) -> ModuleDescription:
        """This module with some of it frozen.

        Args:
            halves: ``"encoder"`` (all encoders whole), ``"tower"`` (all encoders but their projectors), ``"backbone"``.

        Raises:
            PlanningError: another name, or nothing trains any more.
        """
        module = self
        for half in halves:
            if half not in ("encoder", "tower", "backbone"):
                raise PlanningError(f"There is no half {half!r} to freeze; choose from encoder, tower, backbone.")
            if half == "backbone":
                module = replace(module, backbone=module.backbone.frozen())
            else:
                frozen = {name: e.frozen(keep_projector=half == "tower") for name, e in module.encoders.items()}
                module = replace(module, encoders=frozen)
        if not any(half.trains for half in module.roles.values()):
            raise PlanningError("With everything frozen nothing trains; freeze less.")
        return module
