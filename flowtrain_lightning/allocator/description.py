"""Describes a module as far as planning needs it: matrices, layers of attention, and the parts that train."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from flowtrain_lightning.allocator.module_parts import Dense, Embedding, Layers, Part
from flowtrain_lightning.allocator.role_layout import PlanningError
from flowtrain_lightning.packing.role_graph import BACKBONE, ENCODER, GENERATOR


@dataclass(frozen=True)
class Half:
    """An encoder, a backbone or a generator: its parts in the order in which data flow through them.

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

    @cached_property
    def parameters(self) -> int:
        """Numbers of all parts."""
        return sum(part.parameters for part in self.parts)

    @cached_property
    def trainable_parameters(self) -> int:
        """Numbers of the parts that train."""
        return sum(part.trained_parameters for part in self.parts)

    @property
    def trains(self) -> bool:
        """Whether any part trains."""
        return self.trainable_parameters > 0

    @cached_property
    def layers(self) -> tuple[Layers, ...]:
        """The parts that are transformer layers."""
        return tuple(part for part in self.parts if isinstance(part, Layers))

    @cached_property
    def depth(self) -> int:
        """Transformer layers in all."""
        return sum(part.count for part in self.layers)

    @cached_property
    def result(self) -> tuple[int, float]:
        """Numbers in a vector of the result, and such vectors per token of the half."""
        if self.handed_over is not None:
            return self.handed_over
        last = self.parts[-1]
        if isinstance(last, Dense):
            return last.outputs * last.copies, last.per_token
        return (last.hidden if isinstance(last, Layers) else last.width), 1.0

    @property
    def levels(self) -> int:
        """Layers behind which features leave it: the last one, and in Qwen3-VL others (deepstack)."""
        if self.projector:
            return self.projector[0].copies
        width, per_token = self.result
        return max(1, round(width * per_token / self.layers[-1].hidden)) if self.layers else 1

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

        def kept(number: int, part: Part) -> bool:
            return (keep_projector and number > last) or (isinstance(part, Embedding) and part.apart)

        numbered = enumerate(self.parts)
        return replace(self, parts=tuple(p if kept(n, p) else replace(p, trainable=False) for n, p in numbered))


@dataclass(frozen=True)
class ModuleDescription:
    """A module with its halves.

    Attributes:
        name: what it is called.
        encoders: modality -> its encoder; empty of a language model.
        backbone: the half that reads tokens and features.
        generators: modality -> what generates such media from rows of the backbone; one, or none.
    """

    name: str
    encoders: Mapping[str, Half]
    backbone: Half
    generators: Mapping[str, Half] = field(default_factory=dict)
    _roles: dict[str, Half] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        roles = {self.role_of(modality): half for modality, half in self.encoders.items()}
        behind = {self.role_of(modality): half for modality, half in self.generators.items()}
        object.__setattr__(self, "_roles", {**roles, BACKBONE: self.backbone, **behind})

    @property
    def modalities(self) -> tuple[str, ...]:
        """The modalities of media that are encoded, and of those that are generated."""
        return (*self.encoders, *self.generators)

    def role_of(self, modality: str) -> str:
        """The role that takes a modality: ``encoder`` where there is one, else ``encoder_<modality>``."""
        if modality in self.generators:
            return GENERATOR
        return ENCODER if len(self.encoders) == 1 else f"{ENCODER}_{modality}"

    @property
    def roles(self) -> Mapping[str, Half]:
        """Role -> its half, encoders first, a generator last."""
        return self._roles

    def receives_gradient(self, role: str) -> bool:
        """Whether gradients must flow out of a role's half, since something before it trains."""
        names = list(self.roles)
        before = names[: names.index(role)] if role not in map(self.role_of, self.encoders) else ()
        return any(self.roles[each].trains for each in before)

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
            if half != "backbone" and not module.encoders:
                raise PlanningError(f"{self.name} has no encoder, so there is no {half} to freeze.")
            if half == "backbone":
                module = replace(module, backbone=module.backbone.frozen())
            else:
                frozen = {name: e.frozen(keep_projector=half == "tower") for name, e in module.encoders.items()}
                module = replace(module, encoders=frozen)
        if not any(half.trains for half in module.roles.values()):
            raise PlanningError("With everything frozen nothing trains; freeze less.")
        return module
