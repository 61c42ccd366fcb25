"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: towers for images of any size, and M-RoPE: positions in time, height and width."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from flowtrain_lightning.data import Features, PackedBatch, PackedMedia
from flowtrain_lightning.models.huggingface_vlm import HuggingFaceVLM
from flowtrain_lightning.models.packed_attention import pack_attention
from flowtrain_lightning.parallel.sequence_parallel import add_at_tokens


class QwenVLM(HuggingFaceVLM):
    """Qwen2-VL, Qwen2.5-VL or Qwen3-VL on images. See `HuggingFaceVLM` for the arguments.

    Features are a tuple: the rows that stand for tokens, for Qwen3-VL those that its first layers add (deepstack), and
    the offsets from which the backbone computes the positions of M-RoPE.
    """

    families = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
    halves: Mapping[str, tuple[str, ...]] = {
        "encoder": ("model.model.visual",),
        "backbone": ("model.model.language_model", "model.lm_head"),
    }
    projector: ClassVar[tuple[str, ...]] = ("model.model.visual.merger", "model.model.visual.deepstack_merger_list")

    def configure_whole(self) -> None:
        """Builds the model; its tower attends within all images of an encoder batch at once."""
        super().configure_whole()
        pack_attention(self.model.model.visual)
        depths = getattr(self.model.config.vision_config, "deepstack_visual_indexes", ())
        for layer, number in zip(self._text.layers, range(len(depths)), strict=False):
            layer.register_forward_hook(partial(_add_deepstack, number), with_kwargs=True)

    def prepare_media(self, media: PackedMedia) -> dict[str, Tensor]:
        """Positions and windows of patches, by ``transformers``' own functions, and the offsets of `image_offsets`."""
        from transformers import vision_utils

        tower = self.model.model.visual
        grid, merge = _clips(media.grid), tower.config.spatial_merge_size
        found = {
            "position_ids": vision_utils.get_vision_position_ids(grid, merge),
            _OFFSETS: image_offsets(media, merge),
        }
        if self.model.config.model_type == "qwen2_5_vl":
            sides = tower.config.window_size, tower.config.patch_size
            found["window_index"], found["cu_window_seqlens"] = vision_utils.get_vision_window_index(
                grid, merge, *sides
            )
        if self.model.config.model_type == "qwen3_vl":
            found["interp_indices"], found["interp_weights"] = (
                vision_utils.get_vision_interpolation_indices_and_weights(
                    grid,
                    num_grid_per_side=tower.num_grid_per_side,
                    mode=tower.interpolation_mode,
                    align_corners=tower.interpolation_align_corners,
                    spatial_merge_size=merge,
                )
            )
        return found

    def encode(self, media: PackedMedia) -> tuple[Tensor, ...]:
        """Patches of images -> ``[sum(media.rows), width]``, more of these for Qwen3-VL, and the offsets."""
        tower = self.model.model.visual
        self._check_patches(media, tower.config)
        frames = media.patches.view(len(media.patches), tower.config.in_channels, 1, -1)  # in as many equal frames
        frames = frames.expand(-1, -1, tower.config.temporal_patch_size, -1)  # as the tower takes together
        inputs = dict(media.inputs or _moved(self.prepare_media(media), media.patches.device))
        offsets = inputs.pop(_OFFSETS)
        bounds = {"max_length_q": media.max_seqlen, "max_length_k": media.max_seqlen}
        grid = _clips(media.grid)  # on the host, where the tower no more needs it
        with self.projector_apart():
            output = tower(frames.flatten(1), grid_thw=grid, cu_seqlens=media.cu_seqlens, **inputs, **bounds)
        return (output.pooler_output, *getattr(output, "deepstack_features", ()), offsets)

    def hand_over(self, hidden: Tensor) -> Tensor:
        """Patches -> ``[rows, patches of a row, width]``: blocks of patches that lie together become one row."""
        return hidden.view(-1, self.model.config.vision_config.spatial_merge_size**2, hidden.shape[-1])

    def project(self, handed: Any) -> tuple[Tensor, ...]:
        """Rows and deepstack rows, each by the merger that the tower has for it."""
        tower = self.model.model.visual
        rows, *deepstack, offsets = handed
        mergers = (tower.merger, *getattr(tower, "deepstack_merger_list", ()))
        projected = (merge(given.flatten(0, 1)) for merge, given in zip(mergers, (rows, *deepstack), strict=False))
        return (*projected, offsets)

    def merge(self, batch: PackedBatch, features: Features) -> dict[str, Any]:
        """The text model's arguments, with the positions and the deepstack features of the images."""
        if "image" not in features:
            return {**self.place_features(batch, {}), "position_ids": mrope_positions(batch, "image", None)[:, None]}
        rows, *deepstack, offsets = self.projected(features)["image"]
        arguments = self.place_features(batch, {"image": rows})
        arguments["position_ids"] = mrope_positions(batch, "image", offsets)[:, None]
        if deepstack:
            arguments |= {"deepstack": deepstack, "deepstack_positions": batch.media_positions["image"]}
        return arguments

    def slice_tokens(self, arguments: dict[str, Any], own: slice) -> dict[str, Any]:
        """Embeddings and positions of some tokens, and the deepstack features that stand for them."""
        cut = super().slice_tokens(arguments, own)
        if "deepstack" in arguments:
            positions = arguments["deepstack_positions"] - own.start
            last = max(own.stop - own.start - 1, 0)
            # Rows of other tokens are added as zeros: to take them out, the host would have to wait for their number.
            kept = ((positions >= 0) & (positions <= last))[:, None]
            cut["deepstack_positions"] = positions.clamp(0, last)
            cut["deepstack"] = [torch.where(kept, rows, 0) for rows in arguments["deepstack"]]
        return cut

    def _check_patches(self, media: PackedMedia, tower: Any) -> None:
        wanted, given = tower.in_channels * tower.patch_size**2, media.patches.shape[1]
        if given != wanted:
            raise ValueError(
                f"The patches of images have {given} numbers, but the tower takes patches of {tower.patch_size} x "
                f"{tower.patch_size} pixels, {wanted} numbers. Give FlowDataModule(images=images_of(MODEL))."
            )


_OFFSETS = "offsets"


def _clips(grid: Tensor) -> Tensor:
    """``[images, 3]``: an image is a clip of one moment."""
    return functional.pad(grid, (1, 0), value=1)


def _moved(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    return {name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()}


def _add_deepstack(number: int, layer: nn.Module, args: Any, kwargs: Mapping[str, Any], hidden: Tensor) -> Tensor:
    """A forward hook of a text layer of Qwen3-VL: adds what the tower has for it at the tokens of images.

    The model itself would do it by a mask, of which it must know how many tokens it picks: that is a wait.
    """
    deepstack = kwargs.get("deepstack")
    if deepstack is None:
        return hidden
    return add_at_tokens(layer, hidden, kwargs["deepstack_positions"], deepstack[number].to(hidden.dtype)[None])


def image_offsets(media: PackedMedia, merge_size: int) -> Tensor:
    """What is known of the M-RoPE positions of images' features without knowing their sequence.

    In a sequence, all features of an image have the time at which it begins and count height and width from there; the
    text behind it goes on after the largest of these counts.

    Args:
        media: images.
        merge_size: side of the block of patches that becomes one row of features.

    Returns:
        ``[sum(media.rows), 4]`` int64 on the host: how far time, height and width lie from where plain counting is,
        and, at the last row of features of an image, how far plain counting has run ahead behind it (else 0).
    """
    blocks = media.grid // merge_size
    count = torch.tensor(media.rows)
    end = count.cumsum(0)
    image = torch.repeat_interleave(torch.arange(len(count)), count)
    within = torch.arange(sum(media.rows)) - (end - count)[image]
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
