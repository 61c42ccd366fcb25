"""LLaVA: a tower for images of one size, a projector, and any decoder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from flowtrain_lightning.data import PackedMedia
from flowtrain_lightning.models.huggingface_vlm import HuggingFaceVLM


class LlavaVLM(HuggingFaceVLM):
    """LLaVA 1.5 and its like, with the tower of CLIP or SigLIP. See `HuggingFaceVLM` for the arguments.

    The data module must make all images of the tower's size: ``images=images_of(...)``.
    """

    families = ("llava",)
    halves: Mapping[str, tuple[str, ...]] = {
        "encoder": ("model.model.vision_tower", "model.model.multi_modal_projector"),
        "backbone": ("model.model.language_model", "model.lm_head"),
    }
    projector: ClassVar[tuple[str, ...]] = ("model.model.multi_modal_projector",)

    def check_config(self, config: Any) -> None:
        """Refuses towers that take images of any size.

        Raises:
            ValueError: the tower is neither of CLIP nor of SigLIP, or see `HuggingFaceVLM.check_config`.
        """
        super().check_config(config)
        tower = config.vision_config.model_type
        if tower not in ("clip_vision_model", "siglip_vision_model"):
            raise ValueError(
                f"This LLaVA has a tower of type {tower!r}; LlavaVLM trains those of CLIP (clip_vision_model) and "
                "SigLIP (siglip_vision_model). For others write a HuggingFaceVLM of your own, with its encode."
            )

    def encode(self, media: PackedMedia) -> Tensor:
        """Images of one size -> ``[sum(media.rows), width]``, a row of features per patch."""
        with self.projector_apart():
            features = self.model.model.get_image_features(media.images(), return_dict=True).pooler_output
        return torch.cat(list(features))
