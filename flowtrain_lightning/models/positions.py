"""Positions of Qwen's M-RoPE: a token has a time, a row and a column."""

from __future__ import annotations

import torch
from torch import Tensor

from flowtrain_lightning.data import PackedBatch, PackedMedia


def picture_offsets(media: PackedMedia, merge_size: int) -> Tensor:
    """What the rows of features of pictures know about their positions, without knowing their sequence.

    In a sequence, the rows of a picture share the time at which it begins and count rows and columns from there; the
    text behind it goes on after the larger of both counts.

    Args:
        media: pictures.
        merge_size: side of the block of patches that becomes one row of features.

    Returns:
        ``[sum(media.rows), 4]`` int64: how far time, row and column lie from where plain counting is, and, at the last
        row of a picture, how far plain counting has run ahead behind it (else 0).
    """
    device, total = media.grid.device, sum(media.rows)
    blocks = media.grid // merge_size
    count = torch.tensor(media.rows, device=device)
    end = count.cumsum(0)
    picture = torch.repeat_interleave(torch.arange(len(count), device=device), count, output_size=total)
    place = torch.arange(total, device=device) - (end - count)[picture]
    columns = blocks[picture, 1]
    ahead = torch.zeros_like(place).index_copy(0, end - 1, count - blocks.max(dim=1).values)
    return torch.stack([-place, place // columns - place, place % columns - place, ahead], dim=1)


def mrope_positions(batch: PackedBatch, modality: str, offsets: Tensor | None) -> Tensor:
    """Time, row and column of every token, from 0 in every sequence.

    Args:
        batch: the microbatch.
        modality: of the media.
        offsets: ``[rows, 4]`` what `picture_offsets` says of the rows of features; None without media.

    Returns:
        ``[3, tokens]`` int64.
    """
    counted = batch.position_ids
    if offsets is None:
        return counted.expand(3, -1)
    places = batch.media_positions[modality]
    ahead = torch.zeros_like(counted).index_copy(0, places, offsets[:, 3])
    before = ahead.cumsum(0) - ahead  # what was counted too far before a token, in all sequences so far
    begin = torch.arange(len(counted), device=counted.device) - counted  # where the token's sequence begins
    counted = counted - (before - before[begin])
    return counted.repeat(3, 1).index_add(1, places, offsets[:, :3].T)
