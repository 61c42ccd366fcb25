"""LLaVA-OneVision: tiles for a SigLIP tower, joined to one picture again, with a learned row at each line's end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from flowtrain_lightning.data import PackedMedia
from flowtrain_lightning.models.huggingface_images import tile_images
from flowtrain_lightning.models.huggingface_vlm import HuggingFaceVLM

_NEWLINE = "image_newline"


class OnevisionVLM(HuggingFaceVLM):
    """LLaVA-OneVision on images. See `HuggingFaceVLM` for the arguments.

    The data module must cut images into the model's tiles: ``images=images_of(...)``. The projector stays with the
    tower, since tiles are joined to a picture after it: the tower works ahead where the projector is frozen too.
    """

    families = ("llava_onevision",)
    halves: Mapping[str, tuple[str, ...]] = {
        "encoder": (
            "model.model.vision_tower",
            "model.model.multi_modal_projector",
            f"model.model.parametrizations.{_NEWLINE}",
        ),
        "backbone": ("model.model.language_model", "model.lm_head"),
    }

    def check_config(self, config: Any) -> None:
        """Refuses towers whose first row of features is no patch.

        Raises:
            ValueError: the first row is left out, or see `HuggingFaceVLM.check_config`.
        """
        super().check_config(config)
        if config.vision_feature_select_strategy != "full":
            raise ValueError(
                "This LLaVA-OneVision leaves out the first row of its tower's features (vision_feature_select_strategy "
                f"= {config.vision_feature_select_strategy!r}); those that are published keep all: 'full'."
            )

    def configure_whole(self) -> None:
        """Builds the model; the row at a line's end, a parameter of the model itself, gets a module to lie in."""
        super().configure_whole()
        self._give_newline_a_module()

    def encode(self, media: PackedMedia) -> Tensor:
        """Tiles -> ``[sum(media.rows), width]``: the whole image, then its tiles as one picture, line by line."""
        config, model = self.model.config, self.model.model
        side = int(media.grid[0, 1])  # tiles are square, and each of their patches is one row
        tiles = tile_images(replace(media, rows=tuple(media.grid.prod(dim=1).tolist())), side)
        hidden = model.vision_tower(tiles, output_hidden_states=True, return_dict=True).hidden_states
        layers = config.vision_feature_layer
        chosen = [hidden[layer] for layer in ([layers] if isinstance(layers, int) else layers)]
        rows = model.multi_modal_projector(torch.cat(chosen, dim=-1)).split((media.grid[:, 0] // side).tolist())
        aspect = config.vision_aspect_ratio
        packed, _ = model.pack_image_features(rows, media.sizes, model.image_newline, vision_aspect_ratio=aspect)
        return torch.cat(packed)

    def save_pretrained(self, folder: str | Path) -> None:
        """See `HuggingFaceVLM`; the row at a line's end is saved by the name that ``transformers`` knows."""
        parametrize.remove_parametrizations(self.model.model, _NEWLINE, leave_parametrized=False)
        try:
            super().save_pretrained(folder)
        finally:
            self._give_newline_a_module()

    def _give_newline_a_module(self) -> None:
        parametrize.register_parametrization(self.model.model, _NEWLINE, nn.Identity(), unsafe=True)
