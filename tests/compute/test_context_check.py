"""Context ranks whose results are not those of one rank are refused by values, whatever sees a slice only."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from flowtrain_lightning.compute.context_piece import cut
from flowtrain_lightning.data import IGNORED_LABEL, PackedBatch
from flowtrain_lightning.data.loading.collate import pack_sequences
from flowtrain_lightning.data.records.conversation import TokenSequence
from tests.parallel.unlike_ranks import ranks_say

pytestmark = pytest.mark.checks_packing

CONTEXT = {"context": 2}


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What each rank says of a module."""
    return ranks_say(tmp_path_factory.mktemp("context"))


WRONG = ("no attention", "one of four", "shift", "counted positions", "mean", "positions", "loss", "coupled loss")
LONG = [(kind, precision) for precision in ("64-true", "bf16-mixed") for kind in WRONG]


@pytest.mark.parametrize(
    ("kind", "precision"),
    [
        ("one of four", "32-true"),
        *(pytest.param(*case, marks=pytest.mark.full) for case in LONG),
    ],
)
def test_what_looks_at_the_tokens_of_one_rank_only_is_refused(train, kind, precision):
    for rank in train(kind, "colocated 2", CONTEXT, precision):
        said = "ContextError: The backbone's 2 context ranks compute something else together"
        if kind == "loss":  # which weighs samples by each other, and is refused before ranks compare anything
            said = "PackingCheckError: "
        elif kind == "coupled loss":
            said = "ContextError: Each of the backbone's 2 context ranks takes the loss of its own tokens, but"
        assert said in rank["said"]
        assert ("No attention reached the exchange" in rank["said"]) == (kind == "no attention")
        assert not rank["steps"]


@pytest.mark.full
@pytest.mark.parametrize("precision", ["64-true", "32-true", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("kind", ["right", "unusual"])
@pytest.mark.parametrize("role", [CONTEXT, {**CONTEXT, "shard": "fsdp"}], ids=["whole copies", "fsdp"])
def test_rounding_and_unusual_modules_are_no_difference(train, kind, role, precision):
    for rank in train(kind, "1+4", role, precision):
        assert not rank["said"]
        assert len(rank["steps"]) == 4


def packed(*lengths: int, media: int = 4) -> PackedBatch:
    """Sequences that begin with a token, then rows of media, and end with five targets."""
    sequences = []
    for length in lengths:
        labels = np.full(length, IGNORED_LABEL)
        labels[-6:-1] = 7
        places = np.arange(1, 1 + media)
        sequences.append(TokenSequence(np.arange(length), labels, places[:1], np.array([media]), places))
    return pack_sequences(sequences, range(len(lengths)))


@pytest.mark.parametrize(
    ("lengths", "most", "tokens", "media", "samples"),
    [
        ((20, 20, 20), 64, 60, [1, 2, 3, 4, 21, 22, 23, 24, 41, 42, 43, 44], (0, 1, 2)),
        ((20, 20, 20), 45, 40, [1, 2, 3, 4, 21, 22, 23, 24], (0, 1)),
        ((40, 20), 10, 10, [], (0,)),
        ((40, 20), 37, 35, [], (0,)),
        ((40, 20), 39, 39, [0, 1, 2, 3], (0,)),
    ],
    ids=["all", "whole sequences", "the end of one", "behind a picture", "with a picture"],
)
def test_the_piece_that_is_compared_takes_a_rank_s_share_and_cuts_no_picture(lengths, most, tokens, media, samples):
    batch = packed(*lengths)
    rows = torch.arange(4 * len(lengths), dtype=torch.float64)[:, None]
    piece, features = cut(batch, {"image": (rows, rows + 0.5)}, most)
    assert len(piece.tokens) == tokens
    assert piece.samples == samples
    assert piece.media_positions["image"].tolist() == media
    assert [len(level) for level in features["image"]] == [len(media)] * 2
    assert len(piece.targets) == 5 * len(samples)
    assert piece.labels[piece.targets].tolist() == [7] * len(piece.targets)
    assert piece.max_seqlen == max(piece.cu_seqlens.diff())
    again = [place for length in piece.cu_seqlens.diff().tolist() for place in range(length)]
    assert piece.position_ids.tolist() == again
