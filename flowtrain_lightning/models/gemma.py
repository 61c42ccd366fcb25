"""Gemma 3: the tokens of an image see each other; every image is one tile of a SigLIP tower."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from flowtrain_lightning.data import Features, PackedBatch, PackedMedia
from flowtrain_lightning.models.block_attention import SightMask, attend_in_blocks
from flowtrain_lightning.models.huggingface_vlm import HuggingFaceVLM


class GemmaFamilyVLM(HuggingFaceVLM):
    """The base of Gemma 3 and PaliGemma: a SigLIP tower for images of one size, and tokens that see those behind them.

    The data module must make all images of the tower's size: ``images=images_of(...)``.
    """

    halves: Mapping[str, tuple[str, ...]] = {
        "encoder": ("model.model.vision_tower", "model.model.multi_modal_projector"),
        "backbone": ("model.model.language_model", "model.lm_head"),
    }
    projector: ClassVar[tuple[str, ...]] = ("model.model.multi_modal_projector",)

    def pack_backbone(self) -> None:
        """Attention that takes a mask."""
        attend_in_blocks(self._text)

    def encode(self, media: PackedMedia) -> Tensor:
        """Images of one size -> ``[sum(media.rows), width]``: as many rows of features for each."""
        with self.projector_apart():
            features: Tensor = self.model.model.get_image_features(media.images(), return_dict=True).pooler_output
        return features.flatten(0, 1)


class GemmaVLM(GemmaFamilyVLM):
    """Gemma 3 on images, without pan and scan. See `HuggingFaceVLM` for the arguments."""

    families = ("gemma3",)

    def check_config(self, config: Any) -> None:
        """Refuses images that do not fit into the window of local layers, where their tokens would not all see.

        Raises:
            ValueError: an image has more tokens than the window, or see `HuggingFaceVLM.check_config`.
        """
        super().check_config(config)
        window, image = config.text_config.sliding_window, config.mm_tokens_per_image
        if image > window:
            raise ValueError(
                f"An image has {image} tokens (mm_tokens_per_image), but local layers see {window} (sliding_window): "
                "whether its tokens see each other there depends on the version of transformers. Raise sliding_window."
            )

    def hand_over(self, hidden: Tensor) -> Tensor:
        """Patches -> means over squares of them, ``[images, rows of each, width]``: the projector's first step."""
        config = self.model.config
        side = config.vision_config.image_size // config.vision_config.patch_size
        patches = hidden.transpose(1, 2).reshape(len(hidden), -1, side, side)
        means = functional.avg_pool2d(patches, side // math.isqrt(config.mm_tokens_per_image))
        return means.flatten(2).transpose(1, 2)

    def project(self, handed: Any) -> Tensor:
        """The projector's other steps, a norm and a product."""
        projector: Any = self.model.model.multi_modal_projector
        projected: Tensor = projector.mm_soft_emb_norm(handed) @ projector.mm_input_projection_weight
        return projected.type_as(handed)

    def merge(self, batch: PackedBatch, features: Features) -> dict[str, Any]:
        """The text model's arguments, with who sees whom."""
        positions = batch.media_positions.get("image")
        blocks = None if positions is None else image_blocks(positions, len(batch.tokens))
        return {**super().merge(batch, features), "sight": SightMask(batch, blocks)}


def image_blocks(positions: Tensor, tokens: int) -> Tensor:
    """Tokens of images in an unbroken row are one block, as ``transformers`` has it.

    Args:
        positions: ``[rows]`` where rows of features go.
        tokens: of the microbatch.

    Returns:
        ``[tokens]`` the number of the block, or -1 outside of images.
    """
    inside = torch.zeros(tokens, dtype=torch.bool, device=positions.device).index_fill(0, positions, True)
    begins = inside & ~functional.pad(inside[:-1], (1, 0))
    return torch.where(inside, begins.cumsum(0) - 1, -1)
