"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: towers for pictures of any size, and positions in rows and columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from flowtrain_lightning.data import Features, PackedBatch, PackedMedia
from flowtrain_lightning.models.attention import pack_attention
from flowtrain_lightning.models.huggingface import HuggingFaceVLM
from flowtrain_lightning.models.positions import mrope_positions, picture_offsets


class QwenVLM(HuggingFaceVLM):
    """Qwen2-VL, Qwen2.5-VL or Qwen3-VL on pictures. See `HuggingFaceVLM` for the arguments.

    Features are a tuple: the rows that stand for tokens, for Qwen3-VL those that its first layers add (deepstack), and
    the offsets from which the backbone makes the positions of M-RoPE.
    """

    families = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
    halves: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "encoder": ("model.model.visual",),
        "backbone": ("model.model.language_model", "model.lm_head"),
    }

    def configure_whole(self) -> None:
        """Builds the model; its tower attends within all pictures of an encoder batch at once."""
        super().configure_whole()
        pack_attention(self.model.model.visual)

    def encode(self, media: PackedMedia) -> tuple[Tensor, ...]:
        """Patches of pictures -> ``[sum(media.rows), width]``, more of these for Qwen3-VL, and the offsets."""
        tower = self.model.model.visual
        self._check_patches(media, tower.config)
        grid = functional.pad(media.grid, (1, 0), value=1)  # a picture is a clip of one moment,
        frames = media.patches.view(len(media.patches), tower.config.in_channels, 1, -1)  # in as many equal frames
        frames = frames.expand(-1, -1, tower.config.temporal_patch_size, -1)  # as the tower takes together
        bounds = {"max_length_q": media.max_seqlen, "max_length_k": media.max_seqlen}
        output = tower(frames.flatten(1), grid_thw=grid, **bounds)
        offsets = picture_offsets(media, tower.config.spatial_merge_size)
        return (output.pooler_output, *getattr(output, "deepstack_features", ()), offsets)

    def merge(self, batch: PackedBatch, features: Features) -> dict[str, Any]:
        """The text model's arguments, with the positions and the deepstack features of the pictures."""
        if "image" not in features:
            return {**super().merge(batch, {}), "position_ids": mrope_positions(batch, "image", None)[:, None]}
        rows, *deepstack, offsets = features["image"]
        arguments = super().merge(batch, {"image": rows})
        arguments["position_ids"] = mrope_positions(batch, "image", offsets)[:, None]
        if deepstack:
            mask = torch.zeros_like(batch.tokens, dtype=torch.bool)
            mask[batch.media_positions["image"]] = True
            arguments |= {"visual_pos_masks": mask[None], "deepstack_visual_embeds": deepstack}
        return arguments

    def _check_patches(self, media: PackedMedia, tower: Any) -> None:
        wanted, given = tower.in_channels * tower.patch_size**2, media.patches.shape[1]
        if given != wanted:
            raise ValueError(
                f"The patches of pictures have {given} numbers, but the tower takes patches of {tower.patch_size} x "
                f"{tower.patch_size} pixels, {wanted} numbers. Give FlowDataModule(images=images_of(MODEL))."
            )
