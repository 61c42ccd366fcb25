"""The FlowModule of the recipe: an eye, an ear and a language model that reads what both say."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR

from flowtrain_lightning import FlowModule, PackedBatch, PackedMedia
from flowtrain_lightning.data import AudioProcessor, ImageProcessor, LogMelProcessor
from recipes.quickstart.model import LanguageModel, VisionEncoder, patch_positions

IMAGES = ImageProcessor(patch_size=8, merge_size=2, min_pixels=256, max_pixels=1024)
AUDIO: AudioProcessor = LogMelProcessor(mel_bins=40, frames_per_row=8, max_seconds=1.0)
FEATURE_WIDTH, WIDTH, HEADS = 32, 64, 4


class Ear(nn.Module):
    """Log-mel frames -> a row of features for each eight of them."""

    def __init__(self) -> None:
        super().__init__()
        frames = AUDIO.frames_per_row * 40
        self.layers = nn.Sequential(nn.Linear(frames, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, FEATURE_WIDTH))

    def forward(self, frames: Tensor) -> Tensor:
        """``[frames, 40]`` -> ``[frames / 8, FEATURE_WIDTH]``."""
        rows: Tensor = self.layers(frames.reshape(-1, AUDIO.frames_per_row * frames.shape[1]))
        return rows


class SeesAndHears(FlowModule):
    """Names the colour that it sees and the pitch that it hears.

    Args:
        vocabulary: tokens of the tokenizer.
        spoken: ids of the words for pitches; how often they are right is logged as ``val_heard``.
        lr: of AdamW, at most.
    """

    def __init__(self, vocabulary: int, spoken: list[int], lr: float = 3e-3) -> None:
        super().__init__()
        self.halves = {"encoder_image": ("eye",), "encoder_audio": ("ear",), "backbone": ("backbone",)}
        self.save_hyperparameters()

    def configure_encoder_image(self) -> None:
        """Build the eye."""
        self.eye = VisionEncoder(192, WIDTH, 1, HEADS, IMAGES.merge_size, FEATURE_WIDTH)

    def configure_encoder_audio(self) -> None:
        """Build the ear."""
        self.ear = Ear()

    def configure_backbone(self) -> None:
        """Build the language model."""
        self.backbone = LanguageModel(self.hparams["vocabulary"], FEATURE_WIDTH, WIDTH, 2, HEADS)

    def encode(self, media: PackedMedia) -> Tensor:
        """Drawings or tones -> ``[sum(media.rows), FEATURE_WIDTH]``."""
        if media.modality == "audio":
            heard: Tensor = self.ear(media.patches)
            return heard
        positions = patch_positions(media.grid, IMAGES.merge_size).to(media.patches.device)
        seen: Tensor = self.eye(media.patches, positions, media.cu_seqlens, media.max_seqlen)
        return seen

    def merge(self, batch: PackedBatch, features: dict[str, Tensor | tuple[Tensor, ...]]) -> dict[str, Any]:
        """Embed the tokens and put the features where drawings and tones stand."""
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
        """Summed cross entropy over the assistant's tokens, and their number; how often pitches are right is logged."""
        scores, labels = (tensor.index_select(0, batch.targets) for tensor in (outputs, batch.labels))
        if not self.training:
            said = torch.isin(labels, torch.tensor(self.hparams["spoken"], device=labels.device))
            right = (scores.argmax(1) == labels) & said
            # Means over the tokens of a microbatch, of which a third are pitches.
            self.log("val_heard", 3 * right.float().mean())
        return nn.functional.cross_entropy(scores.float(), labels, reduction="sum"), len(batch.targets)

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """AdamW, whose rate rises and falls once: at a constant one the last steps may forget what was learned."""
        optimizer, steps = torch.optim.AdamW(self.parameters()), int(self.trainer.estimated_stepping_batches)
        scheduler = OneCycleLR(optimizer, self.hparams["lr"], total_steps=steps, cycle_momentum=False)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
