"""Sizes of samples whose media items are listed modality by modality."""

from __future__ import annotations

import numpy as np

from flowtrain_lightning.packing.listed_media import ListedMedia, sizes_of_listed

TOKENS = np.array([10, 20, 30])
IMAGES = ListedMedia(np.array([0, 2, 2, 3]), np.array([4, 5, 6]), np.array([9, -1, 9]))
AUDIO = ListedMedia(np.array([0, 1, 2, 2]), np.array([7, 8]), np.array([9, 9]))


def test_each_sample_has_its_items_of_one_modality_after_those_of_another():
    sizes = sizes_of_listed(TOKENS, {"image": IMAGES, "audio": AUDIO})
    assert sizes.media_start.tolist() == [0, 3, 4, 5]
    assert sizes.media_patches.tolist() == sizes.media_rows.tolist() == [4, 5, 7, 8, 6]
    assert sizes.media_modality is not None
    assert sizes.media_modality.tolist() == ["image", "image", "audio", "audio", "image"]


def test_equal_numbers_tell_equal_items_of_one_modality_alone():
    content = sizes_of_listed(TOKENS, {"image": IMAGES, "audio": AUDIO}).media_content
    assert content is not None
    assert content[1] == -1
    assert content[0] == content[4] != content[2] == content[3]
    nothing_known = ListedMedia(AUDIO.start, AUDIO.patches)
    content = sizes_of_listed(TOKENS, {"image": IMAGES, "audio": nothing_known}).media_content
    assert content is not None
    assert [number < 0 for number in content.tolist()] == [False, True, True, True, False]


def test_of_one_modality_nothing_is_said_and_of_none_there_are_no_items():
    sizes = sizes_of_listed(TOKENS, {"image": IMAGES})
    assert (sizes.media_modality, sizes.media_patches.tolist()) == (None, [4, 5, 6])
    assert sizes_of_listed(TOKENS, {}).media_start.tolist() == [0, 0, 0, 0]
