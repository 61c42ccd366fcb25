"""The recipe's FlowModule: the quickstart's language model, frozen, with queries and a generator behind it."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from flowtrain_lightning import PackedBatch
from flowtrain_lightning.data import PackedTargets
from recipes.metaquery.generator import Generator
from recipes.quickstart.model import LanguageModel, Packing, rotary_angles
from recipes.quickstart.module import QuickstartVLM


class HiddenStates(LanguageModel):
    """The language model without its last layer: nobody reads scores here."""

    def forward(self, embeddings: Tensor, position_ids: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
        """``[tokens, width]``; see `LanguageModel`."""
        packing = Packing(cu_seqlens, max_seqlen, rotary_angles(position_ids, self.head_dim, base=10_000.0))
        for block in self.blocks:
            embeddings = block(embeddings, packing)
        hidden: Tensor = self.norm(embeddings)
        return hidden


class MetaQuery(QuickstartVLM):
    """Queries in the place of a picture, whose hidden states tell a generator what to draw.

    Args:
        trained: checkpoint of a quickstart, whose encoder and language model are taken and stay as they are.
        generator_width: of the generator.
        generator_depth: its blocks.
        generator_heads: its attention heads.
        settings: of the quickstart's model.
    """

    halves: ClassVar = {
        "encoder": ("encoder",),
        "backbone": ("backbone", "queries"),
        "generator": ("connector", "drawer"),
    }
    condition_rows = 8

    def __init__(
        self,
        *,
        trained: str | None = None,
        generator_width: int = 128,
        generator_depth: int = 4,
        generator_heads: int = 4,
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        self.save_hyperparameters()

    def configure_encoder(self) -> None:
        """Take the quickstart's encoder, which stays as it is."""
        super().configure_encoder()
        if self.hparams["trained"] is not None:
            self.encoder.load_state_dict(self._trained().encoder.state_dict())
        self.encoder.requires_grad_(False)

    def configure_backbone(self) -> None:
        """Take the quickstart's language model, which stays as it is; and make the queries."""
        sizes = self.hparams
        self.backbone = HiddenStates(
            vocabulary=sizes["vocabulary"],
            feature_width=sizes["feature_width"],
            width=sizes["backbone_width"],
            depth=sizes["backbone_depth"],
            heads=sizes["backbone_heads"],
        )
        if sizes["trained"] is not None:
            self.backbone.load_state_dict(self._trained().backbone.state_dict())
        self.backbone.requires_grad_(False)
        self.queries = nn.Embedding(self.condition_rows, sizes["backbone_width"])
        nn.init.normal_(self.queries.weight, std=0.02)

    def configure_generator(self) -> None:
        """Build what leads from the queries' states to the generator, and the generator."""
        sizes, width = self.hparams, self.hparams["generator_width"]
        self.connector = nn.Sequential(nn.Linear(sizes["backbone_width"], width), nn.GELU(), nn.Linear(width, width))
        self.drawer = Generator(
            sizes["patch_dim"], width, sizes["generator_depth"], sizes["generator_heads"], sizes["merge_size"]
        )

    def merge(self, batch: PackedBatch, features: dict[str, Tensor | tuple[Tensor, ...]]) -> dict[str, Any]:
        """Put the queries where pictures are to be drawn."""
        arguments, queries = super().merge(batch, features), self.queries.weight.repeat(batch.generated, 1)
        embeddings = arguments["embeddings"]
        placed = embeddings.index_copy(0, batch.condition_positions, queries.to(embeddings.dtype))
        return {**arguments, "embeddings": placed}

    def loss(self, outputs: Tensor, batch: PackedBatch) -> tuple[Tensor, int]:
        """Nothing: the language model learns no words here."""
        return outputs.new_zeros(()), 0

    def condition(self, outputs: Tensor, batch: PackedBatch) -> Tensor:
        """The queries' hidden states."""
        return outputs.index_select(0, batch.condition_positions)

    def generator_loss(self, items: PackedTargets, condition: Tensor) -> tuple[Tensor, int]:
        """Flow matching: the way from a picture to noise, at a random place on it."""
        noise, time = items.normal_like("noise"), items.uniform("time")
        there = items.per_patch(time)[:, None]
        noisy = (1 - there) * items.values + there * noise
        found = self.drawer(noisy, time, self.connector(condition), items)
        return ((found - (noise - items.values)) ** 2).sum(), items.values.numel()

    @torch.no_grad()
    def draw(self, items: PackedTargets, condition: Tensor, steps: int = 32) -> Tensor:
        """``[patches, patch_dim]`` new pictures of the sizes of some items, in as many steps from noise."""
        rows, values = self.connector(condition), items.normal_like("drawing")
        for step in range(steps):
            time = values.new_full((len(items),), 1 - step / steps)
            values = values - self.drawer(values, time, rows, items) / steps
        return values

    def logits(self, outputs: Tensor) -> Tensor:
        """Scores of the next token."""
        scores: Tensor = self.backbone.output(outputs)
        return scores

    def _trained(self) -> QuickstartVLM:
        model: QuickstartVLM = QuickstartVLM.load_from_checkpoint(self.hparams["trained"], map_location="cpu")
        return model
