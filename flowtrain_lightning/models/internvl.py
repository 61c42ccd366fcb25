"""InternVL: an image becomes up to twelve tiles and one of the whole, each for a tower that takes one size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from flowtrain_lightning.data import PackedMedia
from flowtrain_lightning.models.huggingface_images import tile_images
from flowtrain_lightning.models.huggingface_vlm import HuggingFaceVLM


class InternVLM(HuggingFaceVLM):
    """InternVL3 in the form that ``transformers`` has. See `HuggingFaceVLM` for the arguments.

    The data module must cut images into the model's tiles: ``images=images_of(...)``.
    """

    families = ("internvl",)
    halves: Mapping[str, tuple[str, ...]] = {
        "encoder": ("model.model.vision_tower", "model.model.multi_modal_projector"),
        "backbone": ("model.model.language_model", "model.lm_head"),
    }
    projector: ClassVar[tuple[str, ...]] = ("model.model.multi_modal_projector",)
    encodes_parts_apart = True

    def encode(self, media: PackedMedia) -> Tensor:
        """Tiles -> ``[sum(media.rows), width]``: a row of features per token, tile after tile."""
        tower: Any = self.model.config.vision_config
        tiles = tile_images(media, tower.image_size[0] // tower.patch_size[0])
        with self.projector_apart():
            features: Tensor = self.model.model.get_image_features(tiles, return_dict=True).pooler_output
        return features.flatten(0, 1)
