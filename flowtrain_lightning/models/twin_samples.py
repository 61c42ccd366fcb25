"""Samples for a twin: several pictures, none, one; text longer than every window; of unlike lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowtrain_lightning.data import IGNORED_LABEL, PackedBatch
from flowtrain_lightning.data.collate import pack_sequences
from flowtrain_lightning.data.conversation import TokenSequence
from flowtrain_lightning.models.encoder_inputs import Arguments, joined
from flowtrain_lightning.models.published_config import image_ends, image_token_id
from flowtrain_lightning.models.twin import SPECIAL, VOCABULARY, WINDOW
from flowtrain_lightning.models.twin_pictures import Picture

_SHAPES: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = (
    ((0, 1), (3, 2, WINDOW + 9)),
    ((), (WINDOW + 13,)),
    ((2,), (5, 11)),
    ((1,), (2, WINDOW + 4)),
)
"""Of each sample: its pictures by number, and tokens of text before, between and behind them."""


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
        return pack_sequences([self.sequence], [0])

    @property
    def arguments(self) -> Arguments:
        """Returns all pictures as the encoder takes them."""
        return joined([picture.arguments for picture in self.pictures]) if self.pictures else {}

    def changed(self) -> TwinSample:
        """The same with other words of as many tokens, and the negatives of its pictures."""
        text = self.sequence.tokens < VOCABULARY - SPECIAL
        tokens = np.where(text, (self.sequence.tokens + 7) % (VOCABULARY - SPECIAL), self.sequence.tokens)
        return TwinSample(_sequence(tokens, self.sequence), tuple(_negative(picture) for picture in self.pictures))


def twin_samples(config: Any, pictures: Sequence[Picture]) -> list[TwinSample]:
    """The samples that a twin is checked with.

    Args:
        config: the twin's.
        pictures: at least three.
    """
    return [
        _sample(config, number, [pictures[each] for each in own], text) for number, (own, text) in enumerate(_SHAPES)
    ]


def packed(samples: Sequence[TwinSample], padding: int = 0) -> PackedBatch:
    """All samples as one microbatch."""
    tokens = sum(len(sample.sequence) for sample in samples)
    return pack_sequences([sample.sequence for sample in samples], range(len(samples)), pad_to=tokens + padding)


def _sample(config: Any, number: int, pictures: Sequence[Picture], text: Sequence[int]) -> TwinSample:
    draw, ends, token = np.random.default_rng(number), image_ends(config), image_token_id(config)
    tokens = [*draw.integers(1, VOCABULARY - SPECIAL, text[0])]
    starts: list[int] = []
    for picture, words in zip(pictures, text[1:], strict=True):
        starts.append(len(tokens))
        tokens += [*ends[:1], *[token] * picture.media.rows, *ends[1:]]
        tokens += [*draw.integers(1, VOCABULARY - SPECIAL, words)]
    ids = np.array(tokens, dtype=np.int64)
    empty = TokenSequence(ids, ids, np.array(starts, np.int64), _rows(pictures), np.flatnonzero(ids == token))
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
