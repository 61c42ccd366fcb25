"""Clips and pictures as several media items: pieces of whole parts, for encoders that treat each part by itself."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from flowtrain_lightning.packing.step_plan import IntArray, SampleSizes


def in_pieces(sizes: SampleSizes, most_patches: int) -> SampleSizes:
    """The same samples, in which a media item of more patches is several, which follow each other.

    Pieces are of like lengths, in whole parts; one part of more patches is a piece by itself.

    Args:
        sizes: of the samples, whose media items are whole.
        most_patches: of a piece.
    """
    if sizes.media_parts is None or not len(sizes.media_parts):
        return sizes
    parts, rows, patches = sizes.media_parts, sizes.media_rows, sizes.media_patches
    may_be_cut = (parts > 1) & (rows % parts == 0) & (patches % parts == 0)
    within = np.maximum(most_patches // np.maximum(patches // parts, 1), 1)  # parts that a piece may have
    counts = np.where(may_be_cut, -(-parts // within), 1)
    if counts.max() == 1:
        return sizes
    item = np.repeat(np.arange(len(parts)), counts)
    place = np.arange(len(item)) - (np.cumsum(counts) - counts)[item]
    begins, ends = ((place + last) * parts[item] // counts[item] for last in (0, 1))
    taken = ends - begins
    number = item - sizes.media_start[sizes.media_sample[item]]
    return replace(
        sizes,
        media_start=np.concatenate([[0], np.cumsum(counts)])[sizes.media_start],
        media_rows=rows[item] * taken // parts[item],
        media_patches=patches[item] * taken // parts[item],
        media_modality=None if sizes.media_modality is None else sizes.media_modality[item],
        media_content=None if sizes.media_content is None else _content(sizes.media_content[item], begins, ends),
        media_parts=taken,
        media_pieces=np.stack([number, begins, ends], axis=1),
    )


def whole_items(sizes: SampleSizes) -> SampleSizes:
    """The same samples with whole media items, whatever pieces they are in; their content is left out."""
    if sizes.media_pieces is None:
        return sizes
    first = np.flatnonzero(sizes.media_pieces[:, 1] == 0)
    return replace(
        sizes,
        media_start=np.searchsorted(first, sizes.media_start),
        media_rows=np.add.reduceat(sizes.media_rows, first) if len(first) else sizes.media_rows,
        media_patches=np.add.reduceat(sizes.media_patches, first) if len(first) else sizes.media_patches,
        media_modality=None if sizes.media_modality is None else sizes.media_modality[first],
        media_content=None,
        media_parts=None,
        media_pieces=None,
    )


def _content(content: IntArray, begins: IntArray, ends: IntArray) -> IntArray:
    """``[pieces]`` equal numbers for equal pieces of equal media items; -1 where the content is not known."""
    told = np.unique(np.stack([content, begins, ends]), axis=1, return_inverse=True)[1].reshape(-1)
    return np.where(content < 0, -1, told).astype(np.int64)
