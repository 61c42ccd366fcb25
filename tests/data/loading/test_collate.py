"""Token sequences become a microbatch, and images an encoder batch, exactly."""

import numpy as np
import torch

from flowtrain_lightning.data import IGNORED_LABEL, Record, Turn
from flowtrain_lightning.data.loading.collate import pack_media, pack_sequences
from flowtrain_lightning.data.media.loaded_media import LoadedMedia
from tests.data.support import TEMPLATE, Letters

_ = IGNORED_LABEL


def sequence(text, answer, *rows):
    turns = (Turn("user", "<image>" * len(rows) + text), Turn("assistant", answer))
    return TEMPLATE.sequence(Record("", "", turns, (), {}), Letters(), np.array(rows, dtype=np.int64))


def test_two_hand_made_records_are_packed_exactly():
    batch = pack_sequences([sequence("a", "b"), sequence("", "c", 2, 1)], [7, 3])
    a, b, c, left, right = map(ord, "abc[]")
    first, second = [1, 3, a, 5, 4, b, 5], [1, 3, left, 6, 6, right, left, 6, right, 5, 4, c, 5]
    assert batch.tokens.tolist() == first + second
    assert batch.labels.tolist() == [_, _, _, _, b, 5, _] + [_] * 10 + [c, 5, _]
    assert batch.position_ids.tolist() == [*range(7), *range(13)]
    assert batch.cu_seqlens.tolist() == [0, 7, 20]
    assert batch.cu_seqlens.dtype == torch.int32
    assert batch.max_seqlen == 13
    assert batch.media_positions["image"].tolist() == [10, 11, 14]
    assert batch.samples == (7, 3)
    assert {tensor.dtype for tensor in (batch.tokens, batch.labels, batch.position_ids)} == {torch.int64}


def test_padding_is_one_more_sequence_without_labels():
    batch = pack_sequences([sequence("a", "b")], [7], pad_to=16)
    assert batch.tokens.shape == batch.labels.shape == batch.position_ids.shape == (16,)
    assert batch.tokens[7:].tolist() == [0] * 9
    assert batch.labels[7:].tolist() == [_] * 9
    assert batch.position_ids[7:].tolist() == list(range(9))
    assert batch.cu_seqlens.tolist() == [0, 7, 16]
    assert batch.max_seqlen == 9
    assert batch.samples == (7,)
    assert pack_sequences([sequence("a", "b")], [7], pad_to=7).cu_seqlens.tolist() == [0, 7]


def test_a_microbatch_without_media_names_no_modality():
    assert pack_sequences([sequence("a", "b")], [0]).media_positions == {}


def test_images_lie_one_after_another():
    images = [
        LoadedMedia(np.full((8, 3), 1, np.float32), (2, 4), 2),
        LoadedMedia(np.full((4, 3), 2, np.float32), (2, 2), 1),
    ]
    media = pack_media(images)
    assert media.modality == "image"
    assert media.patches[:, 0].tolist() == [1.0] * 8 + [2.0] * 4
    assert media.cu_seqlens.tolist() == [0, 8, 12]
    assert media.grid.tolist() == [[2, 4], [2, 2]]
    assert (media.max_seqlen, media.rows) == (8, (2, 1))
    assert (media.patches.dtype, media.cu_seqlens.dtype, media.grid.dtype) == (
        torch.float32,
        torch.int32,
        torch.int64,
    )
