"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: towers for images of any size, and M-RoPE: positions in time, height and width."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from flowtrain_lightning.data import Features, PackedBatch, PackedMedia
from flowtrain_lightning.models.huggingface_vlm import HuggingFaceVLM
from flowtrain_lightning.models.packed_attention import pack_attention


class QwenVLM(HuggingFaceVLM):
    """Qwen2-VL, Qwen2.5-VL or Qwen3-VL on images. See `HuggingFaceVLM` for the arguments.

    Features are a tuple: the rows that stand for tokens, for Qwen3-VL those that its first layers add (deepstack), and
    the offsets from which the backbone computes the positions of M-RoPE.
    """

    families = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
    halves: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "encoder": ("model.model.visual",),
        "backbone": ("model.model.language_model", "model.lm_head"),
    }

    def configure_whole(self) -> None:
        """Builds the model; its tower attends within all images of an encoder batch at once."""
        super().configure_whole()
        pack_attention(self.model.model.visual)

    def encode(self, media: PackedMedia) -> tuple[Tensor, ...]:
        """Patches of images -> ``[sum(media.rows), width]``, more of these for Qwen3-VL, and the offsets."""
        tower = self.model.model.visual
        self._check_patches(media, tower.config)
        grid = functional.pad(media.grid, (1, 0), value=1)  # an image is a clip of one moment,
        frames = media.patches.view(len(media.patches), tower.config.in_channels, 1, -1)  # in as many equal frames
        frames = frames.expand(-1, -1, tower.config.temporal_patch_size, -1)  # as the tower takes together
        bounds = {"max_length_q": media.max_seqlen, "max_length_k": media.max_seqlen}
        output = tower(frames.flatten(1), grid_thw=grid, **bounds)
        offsets = image_offsets(media, tower.config.spatial_merge_size)
        return (output.pooler_output, *getattr(output, "deepstack_features", ()), offsets)

    def merge(self, batch: PackedBatch, features: Features) -> dict[str, Any]:
        """The text model's arguments, with the positions and the deepstack features of the images."""
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

    def slice_tokens(self, arguments: dict[str, Any], own: slice) -> dict[str, Any]:
        """Embeddings and positions of some tokens, and the deepstack features that stand for them."""
        cut = super().slice_tokens(arguments, own)
        if "visual_pos_masks" in arguments:
            mask = arguments["visual_pos_masks"]
            before, within = int(mask[:, : own.start].sum()), int(mask[:, own].sum())
            rows = slice(before, before + within)
            cut["visual_pos_masks"] = mask[:, own]
            cut["deepstack_visual_embeds"] = [level[rows] for level in arguments["deepstack_visual_embeds"]]
        return cut

    def _check_patches(self, media: PackedMedia, tower: Any) -> None:
        wanted, given = tower.in_channels * tower.patch_size**2, media.patches.shape[1]
        if given != wanted:
            raise ValueError(
                f"The patches of images have {given} numbers, but the tower takes patches of {tower.patch_size} x "
                f"{tower.patch_size} pixels, {wanted} numbers. Give FlowDataModule(images=images_of(MODEL))."
            )


def image_offsets(media: PackedMedia, merge_size: int) -> Tensor:
    """What is known of the M-RoPE positions of images' features without knowing their sequence.

    In a sequence, all features of an image have the time at which it begins and count height and width from there; the
    text behind it goes on after the largest of these counts.

    Args:
        media: images.
        merge_size: side of the block of patches that becomes one row of features.

    Returns:
        ``[sum(media.rows), 4]`` int64: how far time, height and width lie from where plain counting is, and, at the
        last row of features of an image, how far plain counting has run ahead behind it (else 0).
    """
    device, total = media.grid.device, sum(media.rows)
    blocks = media.grid // merge_size
    count = torch.tensor(media.rows, device=device)
    end = count.cumsum(0)
    image = torch.repeat_interleave(torch.arange(len(count), device=device), count, output_size=total)
    within = torch.arange(total, device=device) - (end - count)[image]
    wide = blocks[image, 1]
    ahead = torch.zeros_like(within).index_copy(0, end - 1, count - blocks.max(dim=1).values)
    return torch.stack([-within, within // wide - within, within % wide - within, ahead], dim=1)


def mrope_positions(batch: PackedBatch, modality: str, offsets: Tensor | None) -> Tensor:
    """Time, height and width of every token, from 0 in every sequence.

    Args:
        batch: the microbatch.
        modality: of the media items.
        offsets: ``[rows, 4]`` what `image_offsets` says of the rows of features; None without media items.

    Returns:
        ``[3, tokens]`` int64.
    """
    counted = batch.position_ids
    if offsets is None:
        return counted.expand(3, -1)
    positions = batch.media_positions[modality]
    ahead = torch.zeros_like(counted).index_copy(0, positions, offsets[:, 3])
    before = ahead.cumsum(0) - ahead  # what was counted too far before a token, in all sequences so far
    begin = torch.arange(len(counted), device=counted.device) - counted  # where the token's sequence begins
    counted = counted - (before - before[begin])
    return counted.repeat(3, 1).index_add(1, positions, offsets[:, :3].T)
