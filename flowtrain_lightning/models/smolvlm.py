"""SmolVLM2: tiles for a SigLIP tower, and a connector that joins their rows of features."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from flowtrain_lightning.data import PackedMedia
from flowtrain_lightning.models.huggingface_images import tile_images
from flowtrain_lightning.models.huggingface_vlm import HuggingFaceVLM


class SmolVLM(HuggingFaceVLM):
    """SmolVLM and SmolVLM2 on images. See `HuggingFaceVLM` for the arguments.

    The data module must cut images into the model's tiles: ``images=images_of(...)``. Its words name rows and columns
    of tiles, so that backbone ranks read the headers of images too.
    """

    families = ("smolvlm",)
    reads_as = "smolvlm"
    halves: Mapping[str, tuple[str, ...]] = {
        "encoder": ("model.model.vision_model", "model.model.connector"),
        "backbone": ("model.model.text_model", "model.lm_head"),
    }
    projector: ClassVar[tuple[str, ...]] = ("model.model.connector.modality_projection",)
    encodes_parts_apart = True

    def encode(self, media: PackedMedia) -> Tensor:
        """Tiles -> ``[sum(media.rows), width]``: a row of features per token, tile after tile."""
        tower = self.model.config.vision_config
        tiles = tile_images(media, int(media.grid[0, 1]))  # tiles are square
        side = tiles.shape[-1] // tower.patch_size
        # Not by get_image_features, which takes a tile whose values are all 0 for padding and drops it.
        whole = torch.ones(len(tiles), side, side, dtype=torch.bool, device=tiles.device)
        hidden = self.model.model.vision_model(pixel_values=tiles, patch_attention_mask=whole, return_dict=True)
        with self.projector_apart():
            features: Tensor = self.model.model.connector(hidden.last_hidden_state)
        return features.flatten(0, 1)
