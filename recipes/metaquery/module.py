"""The FlowModule of the recipe: queries read the quickstart's frozen model, and a diffusion transformer draws."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel
from torch import Tensor, nn

from flowtrain_lightning import PackedBatch
from flowtrain_lightning.data import ImageProcessor, PackedTargets
from recipes.metaquery.reading import reading_of
from recipes.metaquery.scenes import COLOURS, HELD_OUT, SIDE, colour_of, wishes
from recipes.quickstart.model import LanguageModel
from recipes.quickstart.module import QuickstartVLM

IMAGES = ImageProcessor(
    patch_size=8, merge_size=2, min_pixels=SIDE**2, max_pixels=4 * SIDE**2, mean=(0.5,) * 3, std=(0.5,) * 3
)
"""As the quickstart's, for smaller pictures: values from -1 to 1."""

QUERIES = 8
HEADS, HEAD_DIM, BLOCKS, PATCH = 4, 24, 3, 4
UNTOLD = 0.1
"""Share of the pictures in training that are drawn from nothing, so that drawing can lead away from that."""
DRAWING_STEPS, GUIDANCE = 16, 3.0
_TIMES = 1000.0
"""The diffusion transformer counts time from 0 to this."""


class Reader(LanguageModel):
    """The quickstart's language model, of which the last states are wanted and not the scores."""

    def forward(self, embeddings: Tensor, position_ids: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
        """``[tokens, width]``."""
        return self.states(embeddings, position_ids, cu_seqlens, max_seqlen)


class Connector(nn.Module):
    """What the queries have read -> what the diffusion transformer reads.

    Prompts change little of what queries read. So each number first loses its mean and is divided by its spread, which
    are measured before training: else what prompts share drowns what they differ in, and colours are not learned.

    Args:
        read: numbers of what a query has read.
        width: numbers that the diffusion transformer reads of each.
    """

    mean: Tensor
    spread: Tensor

    def __init__(self, read: int, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(QUERIES, read))
        self.register_buffer("spread", torch.ones(QUERIES, read))
        self.layers = nn.Sequential(nn.Linear(read, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, read: Tensor, told: Tensor) -> Tensor:
        """``[pictures, QUERIES, read]``, and ``[pictures]`` 1 or 0 for nothing -> ``[pictures, QUERIES, width]``."""
        known: Tensor = self.layers((read - self.mean) / self.spread * told[:, None, None])
        return known


class Draws(QuickstartVLM):
    """Draws what words and a sketch ask for; only queries, connector and diffusion transformer train.

    Args:
        taught: a checkpoint of the quickstart; None leaves its model as it is, to be read from a checkpoint of this
            module.
        sizes: as `QuickstartVLM` has them.
    """

    condition_rows = QUERIES

    def __init__(self, taught: str | None = None, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.halves = {
            "encoder": ("encoder",),
            "backbone": ("backbone", "queries"),
            "generator": ("connector", "painter"),
        }
        self.drawn: dict[int, Tensor] = {}

    def configure_encoder(self) -> None:
        """Build the quickstart's encoder, frozen."""
        super().configure_encoder()
        self._teach("encoder")

    def configure_backbone(self) -> None:
        """Build the quickstart's language model, frozen, and the queries."""
        width = self.hparams["backbone_width"]
        self.backbone = Reader(
            self.hparams["vocabulary"],
            self.hparams["feature_width"],
            width,
            self.hparams["backbone_depth"],
            self.hparams["backbone_heads"],
        )
        self._teach("backbone")
        self.queries = nn.Embedding(QUERIES, width)
        with torch.no_grad():
            self.queries.weight.copy_(self.backbone.embed.weight[:QUERIES])

    def configure_generator(self) -> None:
        """Build what draws."""
        read, width = self.hparams["backbone_width"], HEADS * HEAD_DIM
        self.connector = Connector(read, width)
        if (taught := self._taught()) is not None:
            mean, spread = reading_of(taught, taught.backbone.embed.weight[:QUERIES], wishes(HELD_OUT)[0])
            self.connector.mean.copy_(mean)
            self.connector.spread.copy_(spread + 1e-3)
        self.painter = SD3Transformer2DModel(
            sample_size=SIDE,
            patch_size=PATCH,
            in_channels=3,
            out_channels=3,
            num_layers=BLOCKS,
            num_attention_heads=HEADS,
            attention_head_dim=HEAD_DIM,
            joint_attention_dim=width,
            caption_projection_dim=width,
            pooled_projection_dim=width,
            pos_embed_max_size=SIDE // PATCH,
        )

    def merge(self, batch: PackedBatch, features: dict[str, Tensor | tuple[Tensor, ...]]) -> dict[str, Any]:
        """Put the queries where a picture is to be drawn."""
        arguments = super().merge(batch, features)
        queries = self.queries.weight.repeat(batch.generated, 1).to(arguments["embeddings"].dtype)
        arguments["embeddings"] = arguments["embeddings"].index_copy(0, batch.condition_positions, queries)
        return arguments

    def loss(self, outputs: Tensor, batch: PackedBatch) -> tuple[Tensor, int]:
        """It learns no words."""
        return outputs.new_zeros(()), 0

    def condition(self, outputs: Tensor, batch: PackedBatch) -> Tensor:
        """What the queries have read."""
        return outputs.index_select(0, batch.condition_positions)

    def generator_loss(self, items: PackedTargets, condition: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, int]:
        """Flow matching: the squared error of the direction from pictures to noise; validation draws, too."""
        assert isinstance(condition, Tensor)
        read = condition.view(len(items), QUERIES, -1)
        pictures, noise = items.images(), items.with_values(items.normal_like("noise")).images()
        if not self.training:
            self._draw_and_judge(items, read, pictures)
        time = items.uniform("time")[:, None, None, None]
        told = (items.uniform("told") >= UNTOLD).to(read)
        found = self._direction((1 - time) * pictures + time * noise, self.connector(read, told), time.flatten())
        return ((found - (noise - pictures)) ** 2).sum(), pictures.numel()

    @torch.no_grad()
    def draw(self, read: Tensor, noise: Tensor) -> Tensor:
        """Pictures from noise, led away from what would be drawn from nothing.

        Args:
            read: ``[pictures, QUERIES, width]`` what the queries have read.
            noise: ``[pictures, 3, SIDE, SIDE]`` to begin with.

        Returns:
            ``[pictures, 3, SIDE, SIDE]`` from -1 to 1.
        """
        scheduler = FlowMatchEulerDiscreteScheduler(num_train_timesteps=int(_TIMES))
        scheduler.set_timesteps(DRAWING_STEPS)
        told = torch.cat([noise.new_ones(len(noise)), noise.new_zeros(len(noise))])
        known, pictures = self.connector(torch.cat([read, read]), told), noise
        for moment in scheduler.timesteps:
            time = (moment / _TIMES).to(noise).expand(2 * len(noise))
            led, unled = self._direction(torch.cat([pictures, pictures]), known, time).chunk(2)
            pictures = scheduler.step(unled + GUIDANCE * (led - unled), moment, pictures).prev_sample
        return pictures.clamp(-1, 1)

    def _direction(self, pictures: Tensor, known: Tensor, time: Tensor) -> Tensor:
        found: Tensor = self.painter(pictures, known, known.mean(1), _TIMES * time).sample
        return found

    def _draw_and_judge(self, items: PackedTargets, read: Tensor, wanted: Tensor) -> None:
        """Keeps what is drawn, and logs how often the colour is the one of the picture that was wanted."""
        drawn = self.draw(read, items.with_values(items.normal_like("drawing")).images())
        for item, picture in zip(items.media.items, drawn, strict=True):
            self.drawn[item.sample] = picture
        found, named = ([colour_of(one) for one in as_pixels(pictures)] for pictures in (drawn, wanted))
        assert set(named) <= set(COLOURS)
        right = [one == other for one, other in zip(found, named, strict=True)]
        self.log("val_colour", sum(right) / len(right))

    def _teach(self, half: str) -> None:
        module = self.get_submodule(half).requires_grad_(False)
        if (taught := self._taught()) is not None:
            module.load_state_dict(taught.get_submodule(half).state_dict())

    def _taught(self) -> QuickstartVLM | None:
        path = self.hparams["taught"]
        return None if path is None else QuickstartVLM.load_from_checkpoint(path, map_location="cpu")


def as_pixels(pictures: Tensor) -> Any:
    """``[pictures, 3, height, width]`` from -1 to 1 -> uint8 ``[pictures, height, width, 3]``."""
    levels = ((pictures.detach().float().cpu() + 1) * 127.5).round().clamp(0, 255)
    return levels.to(torch.uint8).permute(0, 2, 3, 1).numpy()
