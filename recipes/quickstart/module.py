"""The quickstart's FlowModule: which half is what, how features enter the sequences, and how it is trained."""

from __future__ import annotations

import math
from typing import Any

import torch
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor

from flowtrain_lightning import FlowModule, PackedBatch, PackedMedia
from recipes.quickstart.model import LanguageModel, VisionEncoder, patch_positions


class QuickstartVLM(FlowModule):
    """A vision-language model of three million parameters that names what a drawing shows.

    Args:
        vocabulary: tokens of the tokenizer.
        end_token: the id that ends a turn, ``<|im_end|>``.
        max_new_tokens: how long a generated answer may become.
        patch_dim: numbers in one patch: channels x patch size x patch size of the data's ``images``.
        merge_size: side of the block of patches that becomes one row of features, as in the data's ``images``.
        encoder_width: of the vision encoder.
        encoder_depth: its blocks.
        encoder_heads: its attention heads.
        feature_width: numbers in a row of features. So few that the encoder must learn which ones matter.
        backbone_width: of the language model.
        backbone_depth: its blocks.
        backbone_heads: its attention heads.
        learning_rate: at its highest, after the warm-up.
        weight_decay: of AdamW, on matrices only.
        warmup_steps: over which the learning rate rises; afterwards it falls along a cosine to a twentieth.
        freeze_encoder: leave the encoder as it was initialised, to see what its training is worth.
    """

    def __init__(
        self,
        *,
        vocabulary: int = 1024,
        end_token: int = 1,
        max_new_tokens: int = 16,
        patch_dim: int = 192,
        merge_size: int = 2,
        encoder_width: int = 128,
        encoder_depth: int = 4,
        encoder_heads: int = 4,
        feature_width: int = 8,
        backbone_width: int = 192,
        backbone_depth: int = 4,
        backbone_heads: int = 4,
        learning_rate: float = 2e-3,
        weight_decay: float = 0.05,
        warmup_steps: int = 30,
        freeze_encoder: bool = False,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.end_token = end_token
        self.max_new_tokens = max_new_tokens

    def configure_encoder(self) -> None:
        """Build the vision encoder."""
        sizes = self.hparams
        self.encoder = VisionEncoder(
            patch_dim=sizes["patch_dim"],
            width=sizes["encoder_width"],
            depth=sizes["encoder_depth"],
            heads=sizes["encoder_heads"],
            merge_size=sizes["merge_size"],
            feature_width=sizes["feature_width"],
        )
        self.encoder.requires_grad_(not sizes["freeze_encoder"])

    def configure_backbone(self) -> None:
        """Build the language model."""
        sizes = self.hparams
        self.backbone = LanguageModel(
            vocabulary=sizes["vocabulary"],
            feature_width=sizes["feature_width"],
            width=sizes["backbone_width"],
            depth=sizes["backbone_depth"],
            heads=sizes["backbone_heads"],
        )

    def prepare_media(self, media: PackedMedia) -> dict[str, Tensor]:
        """Row and column of every patch, ahead of time."""
        return {"positions": patch_positions(media.grid, self.hparams["merge_size"])}

    def encode(self, media: PackedMedia) -> Tensor:
        """Packed pictures -> ``[sum(media.rows), feature_width]`` features."""
        positions = (media.inputs or self.prepare_media(media))["positions"].to(media.patches.device)
        features: Tensor = self.encoder(media.patches, positions, media.cu_seqlens, media.max_seqlen)
        return features

    def merge(self, batch: PackedBatch, features: dict[str, Tensor | tuple[Tensor, ...]]) -> dict[str, Any]:
        """Embed the tokens and put the features where the pictures stand."""
        embeddings = self.backbone.embed(batch.tokens)
        for modality, rows in features.items():
            assert isinstance(rows, Tensor)
            projected = self.backbone.project(rows).to(embeddings.dtype)
            embeddings = embeddings.index_copy(0, batch.media_positions[modality], projected)
        return {
            "embeddings": embeddings,
            "position_ids": batch.position_ids,
            "cu_seqlens": batch.cu_seqlens,
            "max_seqlen": batch.max_seqlen,
        }

    def loss(self, outputs: Tensor, batch: PackedBatch) -> tuple[Tensor, int]:
        """Summed cross entropy over the assistant's tokens, and their number."""
        scores, labels = (tensor.index_select(0, batch.targets) for tensor in (outputs, batch.labels))
        return torch.nn.functional.cross_entropy(scores.float(), labels, reduction="sum"), len(batch.targets)

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """AdamW with warm-up and cosine, stepped after every step."""
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        groups = [
            {"params": [p for p in trained if p.ndim >= 2], "weight_decay": self.hparams["weight_decay"]},
            {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=self.hparams["learning_rate"], betas=(0.9, 0.98))
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, self._share_of_learning_rate)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def _share_of_learning_rate(self, step: int) -> float:
        warmup = min(1.0, (step + 1) / max(1, self.hparams["warmup_steps"]))
        done = min(1.0, step / self.trainer.estimated_stepping_batches)
        share: float = warmup * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done)))
        return share
