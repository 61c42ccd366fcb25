"""Modules that train in the tests of exactness, by name."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from flowtrain_lightning.data import PackedBatch, PackedMedia
from tests.tiny import Backbone, Encoder, TinyVLM


class UnusedLevel(TinyVLM):
    """Its encoder returns two tensors, of which the backbone takes the first only."""

    def __init__(self) -> None:
        super().__init__(levels=2)

    def merge(self, batch: PackedBatch, features: dict[str, Any]) -> dict[str, Any]:
        return super().merge(batch, {modality: levels[0] for modality, levels in features.items()})


class OnePiece(nn.Module):
    """A model that exists in one piece, as those of Hugging Face do."""

    def __init__(self) -> None:
        super().__init__()
        self.visual = Encoder(levels=1, dropout=0.0)
        self.language = Backbone()


class Whole(TinyVLM):
    """Its halves are paths in a model that is built at once."""

    halves: ClassVar = {"encoder": ("model.visual",), "backbone": ("model.language",)}

    def configure_whole(self) -> None:
        self.model = OnePiece()

    @property
    def encoder(self) -> nn.Module:
        return self.model.visual

    @property
    def backbone(self) -> nn.Module:
        return self.model.language

    def encode(self, media: PackedMedia) -> tuple[Tensor, ...]:
        return self.model.visual(media)


KINDS: dict[str, type[TinyVLM]] = {"tiny": TinyVLM, "unused level": UnusedLevel, "whole": Whole}
