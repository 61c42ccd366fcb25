"""Samples for a twin: several pictures, none, one; text longer than every window; of unlike lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowtrain_lightning.data import IGNORED_LABEL, PackedBatch
from flowtrain_lightning.data.loading.collate import pack_sequences
from flowtrain_lightning.data.records.conversation import TokenSequence
from flowtrain_lightning.models.encoder_inputs import Arguments, joined
from flowtrain_lightning.models.published_config import audio_ends, audio_token_id, image_ends, image_token_id
from flowtrain_lightning.models.twin import SPECIAL, VOCABULARY, WINDOW
from flowtrain_lightning.models.twin_pictures import Picture

_PICTURES = 3

_SHAPES: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = (
    ((0, 1), (3, 2, WINDOW + 9)),
    ((), (WINDOW + 13,)),
    ((2,), (5, 11)),
    ((1,), (2, WINDOW + 4)),
)
"""Of each sample: its pictures by number, and tokens of text before, between and behind them."""

_HEARD: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = (
    ((0, 3, 1), (3, 2, 4, WINDOW + 9)),
    ((), (WINDOW + 13,)),
    ((4,), (5, 11)),
    ((3, 4, 2), (2, 1, 3, WINDOW + 4)),
)
"""The same of a model that hears: numbers from 3 on are clips of audio."""


@dataclass(frozen=True)
class TwinSample:
    """One sample.

    Attributes:
        sequence: its tokens; all text behind the first two tokens is learned.
        pictures: in order.
    """

    sequence: TokenSequence
    pictures: tuple[Picture, ...]

    @property
    def batch(self) -> PackedBatch:
        """The sample alone."""
        return packed([self])

    @property
    def arguments(self) -> Arguments:
        """Returns all pictures and all clips as the encoders take them."""
        kinds = {picture.media.modality: None for picture in self.pictures}
        alike = ([each.arguments for each in self.pictures if each.media.modality == kind] for kind in kinds)
        return {name: value for arguments in alike for name, value in joined(arguments).items()}

    def changed(self) -> TwinSample:
        """The same with other words of as many tokens, and the negatives of its pictures."""
        text = self.sequence.tokens < VOCABULARY - SPECIAL
        tokens = np.where(text, (self.sequence.tokens + 7) % (VOCABULARY - SPECIAL), self.sequence.tokens)
        return TwinSample(_sequence(tokens, self.sequence), tuple(_negative(picture) for picture in self.pictures))


def twin_samples(config: Any, pictures: Sequence[Picture]) -> list[TwinSample]:
    """The samples that a twin is checked with.

    Args:
        config: the twin's.
        pictures: at least three; behind three pictures two clips of audio, of a model that hears.
    """
    shapes = _SHAPES if len(pictures) == _PICTURES else _HEARD
    return [
        _sample(config, number, [pictures[each] for each in own], text) for number, (own, text) in enumerate(shapes)
    ]


def packed(samples: Sequence[TwinSample], padding: int = 0) -> PackedBatch:
    """All samples as one microbatch."""
    tokens = sum(len(sample.sequence) for sample in samples)
    kinds = [np.array([each.media.modality for each in sample.pictures], dtype=np.str_) for sample in samples]
    sequences = [sample.sequence for sample in samples]
    return pack_sequences(sequences, range(len(samples)), pad_to=tokens + padding, modalities=kinds)


def _sample(config: Any, number: int, pictures: Sequence[Picture], text: Sequence[int]) -> TwinSample:
    draw = np.random.default_rng(number)
    written = {
        "image": (image_token_id(config), image_ends(config)),
        "audio": (audio_token_id(config), audio_ends(config)),
    }
    tokens = [*draw.integers(1, VOCABULARY - SPECIAL, text[0])]
    starts: list[int] = []
    for picture, words in zip(pictures, text[1:], strict=True):
        starts.append(len(tokens))
        token, ends = written[picture.media.modality]
        tokens += [*ends[:1], *[token] * picture.media.rows, *ends[1:]]
        tokens += [*draw.integers(1, VOCABULARY - SPECIAL, words)]
    ids = np.array(tokens, dtype=np.int64)
    rows = [token for token, _ in written.values() if token is not None]
    empty = TokenSequence(ids, ids, np.array(starts, np.int64), _rows(pictures), np.flatnonzero(np.isin(ids, rows)))
    return TwinSample(_sequence(ids, empty), tuple(pictures))


def _sequence(tokens: Any, like: TokenSequence) -> TokenSequence:
    labels = np.full_like(tokens, IGNORED_LABEL)
    labels[1:-1] = np.where(tokens[2:] < VOCABULARY - SPECIAL, tokens[2:], IGNORED_LABEL)
    return TokenSequence(tokens, labels, like.media_start, like.media_rows, like.media_positions)


def _rows(pictures: Sequence[Picture]) -> Any:
    return np.array([picture.media.rows for picture in pictures], dtype=np.int64)


def _negative(picture: Picture) -> Picture:
    arguments = {
        name: -value if isinstance(value, Tensor) and torch.is_floating_point(value) else value
        for name, value in picture.arguments.items()
    }
    return Picture(arguments, picture.media._replace(pixels=-picture.media.pixels))
