"""Clips as several media items: nothing of them is lost, and pieces are as small as they should be."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from flowtrain_lightning.packing import SampleSizes
from flowtrain_lightning.packing.media_pieces import in_pieces, whole_items
from tests.packing.sizes import PATCHES_PER_ROW, make_sizes

CLIPS = st.lists(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 5)), max_size=3), max_size=12)
"""Of each sample, moments and rows of a moment of each media item."""


def sizes_of(samples: list[list[tuple[int, int]]]) -> SampleSizes:
    sizes = make_sizes(*((5, [moments * rows for moments, rows in clips]) for clips in samples))
    moments = np.array([moments for clips in samples for moments, _ in clips], dtype=np.int64)
    return replace(sizes, media_parts=moments, media_content=np.arange(len(moments)) % 3 - 1)


@given(CLIPS, st.integers(1, 60))
def test_pieces_of_a_clip_follow_each_other_and_are_together_the_clip(samples, most):
    sizes = sizes_of(samples)
    cut = in_pieces(sizes, most)
    again = whole_items(cut)
    for name in ("tokens", "media_start", "media_rows", "media_patches"):
        np.testing.assert_array_equal(getattr(again, name), getattr(sizes, name))
    assert cut.media_items == len(sizes.media_rows)
    if cut.media_pieces is None:
        assert cut is sizes
        return
    of_moment = cut.media_patches // cut.media_parts
    assert (cut.media_patches <= np.maximum(most, of_moment)).all(), "no piece is larger, save one moment by itself"
    sample = cut.media_sample
    for number in range(len(cut.media_rows)):
        item, begin, end = cut.media_pieces[number].tolist()
        whole = int(sizes.media_start[sample[number]]) + item
        assert end - begin == cut.media_parts[number] > 0
        assert cut.media_rows[number] * PATCHES_PER_ROW == cut.media_patches[number]
        follows = number > 0 and sample[number - 1] == sample[number] and cut.media_pieces[number - 1][0] == item
        assert begin == (cut.media_pieces[number - 1][2] if follows else 0)
        if number + 1 == len(sample) or tuple(cut.media_pieces[number + 1][:1]) != (item,):
            assert end == sizes.media_parts[whole] or sample[number + 1] != sample[number]


def test_pieces_are_alike_where_clip_and_moments_are():
    sizes = replace(sizes_of([[(4, 2)], [(4, 2)], [(4, 2)]]), media_content=np.array([7, 7, -1]))
    cut = in_pieces(sizes, 4 * PATCHES_PER_ROW)
    first, second, third, fourth, *unknown = cut.media_content.tolist()
    assert (first, second) == (third, fourth)
    assert first != second
    assert unknown == [-1, -1]
    assert cut.select(np.array([1])).media_pieces.tolist() == [[0, 0, 2], [0, 2, 4]]


def test_images_and_short_clips_stay_whole():
    sizes = sizes_of([[(1, 30)], [(3, 1)]])
    assert in_pieces(sizes, 4 * 3) is sizes
    assert in_pieces(replace(sizes, media_parts=None), 1).media_pieces is None
