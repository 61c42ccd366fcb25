"""Sizes of samples whose media items are listed modality by modality, as tables of lengths list them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from flowtrain_lightning.packing.step_plan import IntArray, SampleSizes


@dataclass(frozen=True)
class ListedMedia:
    """The media items of one modality in some samples, sample by sample.

    Attributes:
        start: ``[samples + 1]`` the items of sample ``i`` are ``start[i]:start[i + 1]``.
        patches: ``[items]`` encoder patches of each.
        content: ``[items]`` equal numbers for equal items, -1 where it is not known; None where it is of none.
    """

    start: IntArray
    patches: IntArray
    content: IntArray | None = None


def sizes_of_listed(tokens: IntArray, media: Mapping[str, ListedMedia]) -> SampleSizes:
    """The sizes of samples, each with its items of the first modality, then those of the second, and so on.

    Nothing is said of target tokens and rows of features: all tokens, and a row for every patch, stand for them. Nor is
    it said of one modality alone, which stands for whatever a lone encoder takes.

    Args:
        tokens: ``[samples]`` of each.
        media: modality -> its items.
    """
    counts = [np.diff(listed.start) for listed in media.values()]
    owner = [np.repeat(np.arange(len(tokens)), count) for count in counts]
    order = np.argsort(np.concatenate([np.empty(0, np.int64), *owner]), kind="stable")
    start = np.concatenate([[0], np.cumsum(sum(counts, np.zeros(len(tokens), np.int64)))]).astype(np.int64)
    patches = _joined([listed.patches for listed in media.values()])[order]
    named = np.repeat([*media], [len(listed.patches) for listed in media.values()])[order] if len(media) > 1 else None
    return SampleSizes(tokens, tokens, start, patches, patches, named, _content(media, order))


def _content(media: Mapping[str, ListedMedia], order: IntArray) -> IntArray | None:
    """``[items]`` equal numbers for equal items of one modality; None where it is known of none."""
    known = [listed.content for listed in media.values()]
    if all(each is None for each in known):
        return None
    found, first = [], 0
    for listed in media.values():
        own = np.full(len(listed.patches), -1, np.int64) if listed.content is None else listed.content
        numbers = np.unique(own, return_inverse=True)[1].reshape(-1)  # small, whatever numbers a file has
        found.append(np.where(own < 0, -1, numbers + first))
        first += len(own)
    return _joined(found)[order]


def _joined(arrays: list[IntArray]) -> IntArray:
    return np.concatenate([np.empty(0, np.int64), *arrays]).astype(np.int64)
