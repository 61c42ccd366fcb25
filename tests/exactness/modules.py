"""Modules that train in the tests of exactness, by name."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from flowtrain_lightning.data import PackedBatch, PackedMedia
from tests.tiny import WIDTH, Backbone, Block, Encoder, TinyVLM


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


class DeepEncoder(Encoder):
    """Two blocks in a list."""

    def __init__(self, levels: int, dropout: float) -> None:
        super().__init__(levels, dropout)
        self.more = nn.ModuleList(Block(WIDTH) for _ in range(2))

    def forward(self, media: PackedMedia) -> tuple[Tensor, ...]:
        x = self.block(self.embed(media.patches), media.cu_seqlens, media.max_seqlen, False)
        for block in self.more:
            x = block(x, media.cu_seqlens, media.max_seqlen, False)
        return tuple(head(x.unflatten(0, (-1, 4)).flatten(1)) for head in self.heads)


class DeepBackbone(Backbone):
    """Three blocks in a list, and one tensor for the embedding and the head."""

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.ModuleList(Block(WIDTH) for _ in range(3))
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor, position_ids: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
        x = self.block(x + self.place(position_ids), cu_seqlens, max_seqlen, True)
        for block in self.more:
            x = block(x, cu_seqlens, max_seqlen, True)
        return self.head(x)


class Deep(TinyVLM):
    """Halves of repeated blocks, with tied weights."""

    def configure_encoder(self) -> None:
        self.encoder = DeepEncoder(self.hparams["levels"], self.hparams["dropout"])
        if self.hparams["freeze_encoder"]:
            self.encoder.requires_grad_(False)

    def configure_backbone(self) -> None:
        self.backbone = DeepBackbone()


KINDS: dict[str, type[TinyVLM]] = {"tiny": TinyVLM, "unused level": UnusedLevel, "whole": Whole, "deep": Deep}
