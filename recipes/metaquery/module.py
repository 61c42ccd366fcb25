"""The FlowModule of the recipe: the quickstart's trained model, frozen, whose queries tell a diffusion transformer."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, SanaTransformer2DModel
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR

from flowtrain_lightning import PackedBatch
from flowtrain_lightning.checkpoint import read_checkpoint
from flowtrain_lightning.data import PackedTargets
from recipes.quickstart.module import QuickstartVLM

HEADS, HEAD_WIDTH, LAYERS = 3, 32, 3
WIDTH = HEADS * HEAD_WIDTH


class MetaQuery(QuickstartVLM):
    """Draws what a frozen language model has read: learned queries, a connector and a diffusion transformer train.

    Args:
        trained: the quickstart's checkpoint.
        lr: of AdamW, at most.
    """

    halves = {"encoder": ("encoder",), "backbone": ("backbone", "queries"), "generator": ("connector", "drawer")}  # noqa: RUF012
    condition_rows = 8

    def __init__(self, trained: str, lr: float = 2e-3) -> None:
        super().__init__()
        self.save_hyperparameters("trained", "lr")
        self.scheduler = FlowMatchEulerDiscreteScheduler()

    def configure_encoder(self) -> None:
        """Take the quickstart's encoder as it is; pictures in a prompt would go through it."""
        super().configure_encoder()
        self._take_trained(self.encoder, "encoder")

    def configure_backbone(self) -> None:
        """Take the quickstart's language model as it is, and make queries."""
        super().configure_backbone()
        self._take_trained(self.backbone, "backbone")
        self.queries = nn.Embedding(self.condition_rows, self.hparams["backbone_width"])
        nn.init.normal_(self.queries.weight, std=0.02)

    def configure_generator(self) -> None:
        """Build what leads from the queries' rows to a drawing."""
        read = self.hparams["backbone_width"]
        self.connector = nn.Sequential(nn.LayerNorm(read), nn.Linear(read, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        self.drawer = SanaTransformer2DModel(
            in_channels=3,
            out_channels=3,
            num_attention_heads=HEADS,
            attention_head_dim=HEAD_WIDTH,
            num_layers=LAYERS,
            num_cross_attention_heads=HEADS,
            cross_attention_head_dim=HEAD_WIDTH,
            cross_attention_dim=WIDTH,
            caption_channels=WIDTH,
            sample_size=32,
            patch_size=4,
        )

    def merge(self, batch: PackedBatch, features: dict[str, Tensor | tuple[Tensor, ...]]) -> dict[str, Any]:
        """Put the queries where a drawing will stand."""
        arguments = super().merge(batch, features)
        queries = self.queries.weight.repeat(batch.generated, 1)
        arguments["embeddings"] = arguments["embeddings"].index_copy(0, batch.condition_positions, queries)
        return arguments

    def backbone_step(self, batch: PackedBatch, features: dict[str, Tensor | tuple[Tensor, ...]], stage: str) -> Any:
        """Nothing is learned of words, so that the rows before the vocabulary are all that is computed."""
        rows = self.rows(batch, features)
        return rows.new_zeros(()), 0, rows

    def rows(self, batch: PackedBatch, features: dict[str, Tensor | tuple[Tensor, ...]]) -> Tensor:
        """``[drawings x condition_rows, width]`` what the language model makes of the queries."""
        found: list[Tensor] = []
        handle = self.backbone.norm.register_forward_hook(lambda module, given, rows: found.append(rows))
        try:
            self.backbone(**self.merge(batch, features))
        finally:
            handle.remove()
        return found[0].index_select(0, batch.condition_positions)

    def generator_loss(self, items: PackedTargets, condition: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, int]:
        """Flow matching: the summed squared error of the way from a drawing to noise, and how many numbers it has."""
        assert isinstance(condition, Tensor)
        pictures, noise = items.images(), items.with_values(items.normal_like("noise")).images()
        share = items.uniform("time")
        at = share[:, None, None, None]
        way = self._way((1 - at) * pictures + at * noise, share, condition)
        return ((way - (noise - pictures)) ** 2).sum(), pictures.numel()

    @torch.no_grad()
    def draw(self, condition: Tensor, steps: int = 20, seed: int = 0) -> Tensor:
        """``[drawings, 3, 32, 32]`` from -1 to 1, each from noise in so many steps.

        Args:
            condition: what `rows` gives.
            steps: of the scheduler.
            seed: of the noise.
        """
        count = len(condition) // self.condition_rows
        noise = torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(seed))
        pictures = noise.to(condition)
        self.scheduler.set_timesteps(steps)
        for step in self.scheduler.timesteps:
            share = (step / self.scheduler.config["num_train_timesteps"]).expand(count)
            way = self._way(pictures, share.to(condition), condition)
            (pictures,) = self.scheduler.step(way, step, pictures, return_dict=False)
        return pictures.clamp(-1, 1)

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """AdamW, whose rate rises and falls once."""
        trained = [weight for weight in self.parameters() if weight.requires_grad]
        optimizer, steps = torch.optim.AdamW(trained), int(self.trainer.estimated_stepping_batches)
        scheduler = OneCycleLR(optimizer, self.hparams["lr"], total_steps=steps, cycle_momentum=False)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def _way(self, pictures: Tensor, share: Tensor, condition: Tensor) -> Tensor:
        """What leads from drawings to noise, of pictures with so much noise in them."""
        told = self.connector(condition).unflatten(0, (len(pictures), self.condition_rows))
        times = share * self.scheduler.config["num_train_timesteps"]
        way: Tensor = self.drawer(pictures, told, times, return_dict=False)[0]
        return way

    def _take_trained(self, half: nn.Module, name: str) -> None:
        """Writes the quickstart's weights over those of a half, which then stay as they are."""
        weights = _weights(self.hparams["trained"])
        with torch.no_grad():
            for path, weight in half.named_parameters():
                weight.copy_(weights[f"{name}.{path}"])
        half.requires_grad_(False)


@cache
def _weights(checkpoint: str) -> dict[str, Tensor]:
    found: dict[str, Tensor] = read_checkpoint(Path(checkpoint), optimizers=False)["state_dict"]
    return found
