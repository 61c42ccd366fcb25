"""A module of which every sample uses other weights: experts, a mark for pictures, a second head, and spare ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from flowtrain_lightning.data import PackedBatch, PackedMedia
from flowtrain_lightning.parallel.fully_shard import shard_repeated_blocks
from tests.tiny import WIDTH, Backbone, Block, CharTokenizer, Encoder, TinyVLM

_SELDOM = ord("w") + 6
"""A token of one word in ten."""


class Experts(nn.Module):
    """Perceptrons of which each row of numbers takes one; those that no row takes are not called."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4, bias=False)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        shares = self.router(x).softmax(-1)
        chosen = shares.argmax(-1)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().flatten()
            if len(rows):
                x = x.index_add(0, rows, expert(x[rows]).tanh() * shares[rows, number, None])
        return x


class UnevenBlock(Block):
    """A layer with experts."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.routed = Experts()
        self.spare = nn.Linear(width, width)  # used by nobody, at any time

    def forward(self, x: Tensor, cu_seqlens: Tensor, max_seqlen: int, causal: bool) -> Tensor:
        return self.routed(super().forward(x, cu_seqlens, max_seqlen, causal))


class PictureLayer(nn.Module):
    """A layer for rows of pictures alone."""

    def __init__(self) -> None:
        super().__init__()
        self.widen, self.narrow = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(self.widen(x).tanh())


class UnevenEncoder(Encoder):
    """Has experts in two of three layers, and one level of features more than the backbone reads."""

    def __init__(self, levels: int, dropout: float) -> None:
        super().__init__(levels + 1, dropout)
        self.more = nn.ModuleList(UnevenBlock(WIDTH) for _ in range(2))

    def forward(self, media: PackedMedia) -> tuple[Tensor, ...]:
        x = self.block(self.embed(media.patches), media.cu_seqlens, media.max_seqlen, False)
        for block in self.more:
            x = block(x, media.cu_seqlens, media.max_seqlen, False)
        return tuple(head(x.unflatten(0, (-1, 4)).flatten(1)) for head in self.heads)


class UnevenBackbone(Backbone):
    """Has experts in two of three layers, a vector and two layers for rows of pictures, and a head for one token."""

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.ModuleList(UnevenBlock(WIDTH) for _ in range(2))
        self.of_pictures = nn.ModuleList(PictureLayer() for _ in range(2))
        self.mark = nn.Parameter(torch.randn(WIDTH))
        self.second = nn.Linear(WIDTH, CharTokenizer.vocabulary)
        self.spare = nn.Parameter(torch.randn(3, 5))

    def forward(self, x: Tensor, position_ids: Tensor, cu_seqlens: Tensor, max_seqlen: int, seldom: Tensor) -> Tensor:
        x = self.block(x + self.place(position_ids), cu_seqlens, max_seqlen, True)
        for block in self.more:
            x = block(x, cu_seqlens, max_seqlen, True)
        logits, rows = self.head(x), seldom.nonzero().flatten()
        return logits.index_add(0, rows, self.second(x[rows])) if len(rows) else logits


class Uneven(TinyVLM):
    """Halves of which no two microbatches use the same weights."""

    def configure_encoder(self) -> None:
        self.encoder = UnevenEncoder(self.hparams["levels"], self.hparams["dropout"])

    def configure_backbone(self) -> None:
        self.backbone = UnevenBackbone()

    def merge(self, batch: PackedBatch, features: dict[str, Any]) -> dict[str, Any]:
        merged = super().merge(batch, {modality: levels[:-1] for modality, levels in features.items()})
        places = batch.media_positions["image"] if "image" in features else torch.empty(0, dtype=torch.int64)
        if len(places):
            rows = merged["x"][places] + self.backbone.mark
            for layer in self.backbone.of_pictures:
                rows = layer(rows)
            merged["x"] = merged["x"].index_copy(0, places, rows)
        return {**merged, "seldom": batch.tokens == _SELDOM}

    def parallelize_backbone(self, mesh: DeviceMesh, **settings: Any) -> None:
        shard_repeated_blocks([self.backbone.more], mesh, **settings)  # not the layers that some ranks leave out

    def slice_tokens(self, arguments: dict[str, Any], own: slice) -> dict[str, Any]:
        return {**arguments, **{name: arguments[name][own] for name in ("x", "position_ids", "seldom")}}

    def configure_optimizers(self) -> Any:
        configured = super().configure_optimizers()
        configured["optimizer"].param_groups[1]["weight_decay"] = 0.2
        return configured
