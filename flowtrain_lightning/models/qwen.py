"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: images and videos of any size, and M-RoPE: positions in time, height and width."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from flowtrain_lightning.data import Features, PackedBatch, PackedMedia
from flowtrain_lightning.models.huggingface_vlm import HuggingFaceVLM
from flowtrain_lightning.models.packed_attention import pack_attention
from flowtrain_lightning.models.packed_experts import pack_experts
from flowtrain_lightning.parallel.sequence_parallel import add_at_tokens

_MIXTURE = "qwen3_vl_moe"
_QWEN3 = ("qwen3_vl", _MIXTURE)


class QwenVLM(HuggingFaceVLM):
    """Qwen2-VL, Qwen2.5-VL or Qwen3-VL (a mixture of experts, too) on images and videos.

    See `HuggingFaceVLM` for the arguments.

    Features are a tuple: the rows that stand for tokens, for Qwen3-VL those that its first layers add (deepstack), and
    the offsets from which the backbone computes the positions of M-RoPE.
    """

    families = ("qwen2_vl", "qwen2_5_vl", *_QWEN3)
    halves: Mapping[str, tuple[str, ...]] = {
        "encoder": ("model.model.visual",),
        "backbone": ("model.model.language_model", "model.lm_head"),
    }
    projector: ClassVar[tuple[str, ...]] = ("model.model.visual.merger", "model.model.visual.deepstack_merger_list")
    encodes_parts_apart = True

    def configure_whole(self) -> None:
        """Builds the model; its tower attends within all images of an encoder batch at once."""
        super().configure_whole()
        tower = self.model.model.visual
        pack_attention(tower)
        if self.model.config.model_type == "qwen2_5_vl":
            bound = partial(_bound_by_window, _longest_window(tower.config))
            for number, block in enumerate(tower.blocks):
                if number not in tower.fullatt_block_indexes:
                    block.register_forward_pre_hook(bound, with_kwargs=True)
        depths = getattr(self.model.config.vision_config, "deepstack_visual_indexes", ())
        for layer, number in zip(self._text.layers, range(len(depths)), strict=False):
            layer.register_forward_hook(partial(_add_deepstack, number), with_kwargs=True)

    def pack_backbone(self) -> None:
        """Lets the text model attend within packed sequences, and its experts compute together."""
        super().pack_backbone()
        if self.model.config.model_type == _MIXTURE:
            pack_experts(self._text)

    def prepare_media(self, media: PackedMedia) -> dict[str, Tensor]:
        """Positions and windows of patches, by ``transformers``' own functions, and the offsets of `media_offsets`."""
        from transformers import vision_utils

        tower = self.model.model.visual
        grid, merge = media_grid(media), tower.config.spatial_merge_size
        found = {
            "position_ids": vision_utils.get_vision_position_ids(grid, merge),
            _OFFSETS: self._offsets(media, merge),
        }
        if media.clips:
            found[_FRAMES] = _frames_of_patches(media, tower.config.temporal_patch_size)
        if self.model.config.model_type == "qwen2_5_vl":
            sides = tower.config.window_size, tower.config.patch_size
            found["window_index"], found["cu_window_seqlens"] = vision_utils.get_vision_window_index(
                grid, merge, *sides
            )
        if self.model.config.model_type in _QWEN3:
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
        """Patches of images and videos -> ``[sum(media.rows), width]``, more of these for Qwen3-VL, and the offsets."""
        tower = self.model.model.visual
        self._check_patches(media, tower.config)
        inputs = dict(media.inputs or _moved(self.prepare_media(media), media.patches.device))
        offsets, numbers = inputs.pop(_OFFSETS), inputs.pop(_FRAMES, None)
        channels, together = tower.config.in_channels, tower.config.temporal_patch_size
        if numbers is None:  # an image is a video of as many equal frames as the tower takes together
            frames = media.patches.view(len(media.patches), channels, 1, -1).expand(-1, -1, together, -1)
        else:
            frames = media.patches[numbers].view(*numbers.shape, channels, -1).transpose(1, 2)
        bounds = {"max_length_q": media.max_seqlen, "max_length_k": media.max_seqlen}
        grid = media_grid(media)  # on the host, where the tower no more needs it
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
        """The text model's arguments, with the positions and the deepstack features of the media items."""
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

    def _offsets(self, media: PackedMedia, merge: int) -> Tensor:
        """See `media_offsets`: Qwen3-VL writes the moments of a video apart, Qwen2.5-VL counts time in seconds."""
        family = self.model.config.model_type
        a_second = self.model.config.vision_config.tokens_per_second if family == "qwen2_5_vl" else None
        return media_offsets(media, merge, apart=family in _QWEN3, tokens_per_second=a_second)

    def _check_patches(self, media: PackedMedia, tower: Any) -> None:
        wanted, given = tower.in_channels * tower.patch_size**2, media.patches.shape[1]
        if given != wanted:
            raise ValueError(
                f"The patches of images have {given} numbers, but the tower takes patches of {tower.patch_size} x "
                f"{tower.patch_size} pixels, {wanted} numbers. Give FlowDataModule(images=images_of(MODEL))."
            )


_OFFSETS = "offsets"
_FRAMES = "frames"


def media_grid(media: PackedMedia) -> Tensor:
    """``[media items, 3]`` moments, and patches along height and width: an image is a video of one moment."""
    moments = [1 if clip is None else clip.moments for clip in media.clips] or [1] * len(media.grid)
    return torch.cat([torch.tensor(moments)[:, None], media.grid], dim=1)


def _frames_of_patches(media: PackedMedia, together: int) -> Tensor:
    """``[patches, together]`` which rows of the pixels are the frames of each patch; an image has one row for all.

    Raises:
        ValueError: the moments of a video have another number of frames.
    """
    found, begin = [], 0
    for clip, patches in zip(media.clips, media_grid(media).prod(dim=1).tolist(), strict=True):
        if clip is not None and clip.frames != together:
            raise ValueError(
                f"The moments of videos have {clip.frames} frames, but the tower takes {together} together. Give "
                "FlowDataModule(videos=videos_of(MODEL))."
            )
        rows = patches if clip is None else patches * together
        numbers = torch.arange(begin, begin + rows)
        found.append(numbers[:, None].expand(-1, together) if clip is None else numbers.view(-1, together))
        begin += rows
    return torch.cat(found)


def _longest_window(tower: Any) -> int:
    """Patches of a whole window, which is made of whole blocks of merged patches."""
    side: int = tower.window_size // tower.spatial_merge_size // tower.patch_size * tower.spatial_merge_size
    return side**2


def _bound_by_window(longest: int, _: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A forward pre-hook of a layer that attends within windows, which is told the longest image of the batch.

    Attention kernels begin as many blocks for every sequence as the longest one needs.
    """
    told = kwargs.keys() & {"max_length_q", "max_length_k"}
    return args, {**kwargs, **dict.fromkeys(told, longest)}


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


def media_offsets(
    media: PackedMedia, merge_size: int, *, apart: bool = False, tokens_per_second: float | None = None
) -> Tensor:
    """Computes the part of features' M-RoPE positions that does not depend on their sequence.

    In a sequence, all features of a media item count time, height and width from where it begins; the text behind it
    goes on after the largest height or width.

    Args:
        media: images and videos, or pieces of videos.
        merge_size: side of the block of patches that becomes one row of features.
        apart: the moments of a video stand apart in the sequence, each like an image.
        tokens_per_second: how far time runs on in a second; None: by one from moment to moment.

    Returns:
        ``[sum(media.rows), 4]`` int64 on the host: how far time, height and width lie from where plain counting is,
        and, at the last row of features of a whole media item, how far plain counting has run ahead behind it (else 0).
    """
    grid = media_grid(media)
    moments = grid[:, 0]
    around = [(0, 0) if clip is None else (clip.before, clip.behind) for clip in media.clips] or [(0, 0)] * len(grid)
    before, behind = torch.tensor(around).T
    # Rounded down in float32, as ``transformers`` does.
    seconds = torch.tensor([1 if clip is None else clip.seconds for clip in media.clips] or [1] * len(grid))
    pace = torch.ones(len(grid)) if tokens_per_second is None else tokens_per_second * seconds.to(torch.float32)
    if apart:
        grid, pace = (given.repeat_interleave(moments, dim=0) for given in (grid, pace))
        moments = torch.ones(len(grid), dtype=torch.int64)
        before = behind = torch.zeros_like(moments)
    blocks = grid[:, 1:] // merge_size
    area = blocks.prod(dim=1)
    count = moments * area
    end = count.cumsum(0)
    item = torch.repeat_interleave(torch.arange(len(count)), count)
    within = torch.arange(int(end[-1])) - (end - count)[item] + (before * area)[item]
    time = ((within // area[item]) * pace[item]).long()
    position, wide = within % area[item], blocks[item, 1]
    run_ahead = torch.where(behind == 0, (before + moments) * area - blocks.max(dim=1).values, 0)
    ahead = torch.zeros_like(within).index_copy(0, end - 1, run_ahead)
    return torch.stack([time - within, position // wide - within, position % wide - within, ahead], dim=1)


def mrope_positions(batch: PackedBatch, modality: str, offsets: Tensor | None) -> Tensor:
    """Time, height and width of every token, from 0 in every sequence.

    Args:
        batch: the microbatch.
        modality: of the media items.
        offsets: ``[rows, 4]`` what `media_offsets` says of the rows of features; None without media items.

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
