"""Conversations as tokens: role markers, a media token for every row of features, and labels on what is learned."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from flowtrain_lightning.data.batch import IGNORED_LABEL
from flowtrain_lightning.data.formats import MEDIA_MARKER, DataError, Record, Turn
from flowtrain_lightning.data.tokenization import Tokenizer
from flowtrain_lightning.packing import IntArray

ASSISTANT = "assistant"
"""The role whose turns carry loss."""


@dataclass(frozen=True)
class TokenSequence:
    """One sample as the backbone reads it.

    Attributes:
        tokens: ``[tokens]`` ids; where features go, the id is the media token's.
        labels: ``[tokens]`` already shifted: the id that this token must predict, or ``IGNORED_LABEL``.
        media_start: ``[media items]`` the position of each media item's first row of features.
        media_rows: ``[media items]`` how many rows of features each media item has.
    """

    tokens: IntArray
    labels: IntArray
    media_start: IntArray
    media_rows: IntArray

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def targets(self) -> int:
        """Tokens that carry loss."""
        return int(np.count_nonzero(self.labels != IGNORED_LABEL))

    @property
    def media_positions(self) -> IntArray:
        """``[rows]`` the position of every row of features, in order."""
        ends = np.cumsum(self.media_rows)
        return np.repeat(self.media_start - ends + self.media_rows, self.media_rows) + np.arange(self.media_rows.sum())

    def cut(self, limit: int) -> TokenSequence:
        """The first ``limit`` tokens at most; a media item that does not fit whole is left out with what follows."""
        if len(self) <= limit:
            return self
        fits = self.media_start + self.media_rows <= limit
        kept = len(fits) if fits.all() else int(np.argmin(fits))
        if kept < len(fits):
            limit = min(limit, int(self.media_start[kept]))
        labels = self.labels[:limit].copy()
        labels[-1:] = IGNORED_LABEL
        return TokenSequence(self.tokens[:limit], labels, self.media_start[:kept], self.media_rows[:kept])


class _Piece(NamedTuple):
    """Some text of a rendered conversation, or one media item (``text`` is None), and whether it is learned."""

    text: str | None
    learned: bool


@dataclass(frozen=True)
class ChatTemplate:
    """How a conversation is written for the backbone. The defaults are Qwen's.

    A turn is its role's header, its text and ``end``; in assistant turns text and ``end`` carry loss, nothing else
    does. ``between`` follows every turn.

    Attributes:
        headers: what begins a turn, by role.
        end: closes a turn; the backbone learns to stop by it.
        between: follows the end of every turn.
        begin: begins every sequence.
        image_token: stands for one row of features of an image; must be one token of the vocabulary.
        before_image: precedes an image's tokens.
        after_image: follows an image's tokens.
    """

    headers: dict[str, str] = field(
        default_factory=lambda: {role: f"<|im_start|>{role}\n" for role in ("system", "user", ASSISTANT)}
    )
    end: str = "<|im_end|>"
    between: str = "\n"
    begin: str = ""
    image_token: str = "<|image_pad|>"
    before_image: str = "<|vision_start|>"
    after_image: str = "<|vision_end|>"

    def sequence(self, record: Record, tokenizer: Tokenizer, rows: IntArray, *, prompt: bool = False) -> TokenSequence:
        """The tokens and labels of a record.

        Args:
            record: the conversation.
            tokenizer: makes ids of text.
            rows: ``[media items]`` rows of features of the record's media items, in order. Where it names fewer of them
                than the record has, the sequence ends before the first that is missing.
            prompt: end with the header of the last assistant turn, to be continued by the backbone.

        Raises:
            DataError: the record has a role without header.
            ValueError: the vocabulary has no image token.
        """
        ids: list[int] = []
        learned: list[bool] = []
        starts: list[int] = []
        for piece in _joined(self._pieces(record, prompt)):
            if piece.text is not None:
                added = tokenizer.encode(piece.text) if piece.text else []
            elif len(starts) == len(rows):
                break
            else:
                added = [self.image_id(tokenizer)] * int(rows[len(starts)])
                starts.append(len(ids))
            ids += added
            learned += [piece.learned] * len(added)
        tokens = np.asarray(ids, dtype=np.int64)
        labels = np.full(len(ids), IGNORED_LABEL, dtype=np.int64)
        labels[:-1] = np.where(np.asarray(learned[1:], dtype=bool), tokens[1:], IGNORED_LABEL)
        return TokenSequence(tokens, labels, np.asarray(starts, dtype=np.int64), rows[: len(starts)])

    def _pieces(self, record: Record, prompt: bool) -> Iterator[_Piece]:
        turns = record.turns
        if prompt:
            answers = [number for number, turn in enumerate(turns) if turn.role == ASSISTANT]
            turns = turns[: answers[-1]] if answers else turns
        yield _Piece(self.begin, False)
        for turn in turns:
            yield _Piece(self._header(turn.role, record), False)
            yield from self._content(turn)
            yield _Piece(self.between, False)
        if prompt:
            yield _Piece(self._header(ASSISTANT, record), False)

    def _content(self, turn: Turn) -> Iterator[_Piece]:
        learned = turn.role == ASSISTANT
        for number, text in enumerate(turn.text.split(MEDIA_MARKER)):
            if number > 0:
                yield _Piece(self.before_image, False)
                yield _Piece(None, False)
                yield _Piece(self.after_image, False)
            yield _Piece(text, learned)
        yield _Piece(self.end, learned)

    def _header(self, role: str, record: Record) -> str:
        if role not in self.headers:
            raise DataError(
                f"{record.where}: role {role!r} has no header in the chat template, which knows "
                f"{', '.join(self.headers)}; correct the record or add the role to ChatTemplate(headers=...)."
            )
        return self.headers[role]

    def image_id(self, tokenizer: Tokenizer) -> int:
        """The id of ``image_token``.

        Raises:
            ValueError: the vocabulary does not have it.
        """
        found = tokenizer.token_to_id(self.image_token)
        if found is None:
            raise ValueError(
                f"The tokenizer's vocabulary has no token {self.image_token!r}, which stands for features of images; "
                "add it as a special token, or name another in ChatTemplate(image_token=...)."
            )
        return found


def _joined(pieces: Iterator[_Piece]) -> Iterator[_Piece]:
    """Neighbouring texts as one, where both or neither are learned: they are then encoded as they will be read."""
    held = _Piece("", False)
    for piece in pieces:
        if piece.text is not None and held.text is not None and (piece.learned == held.learned or not piece.text):
            held = _Piece(held.text + piece.text, held.learned)
            continue
        yield held
        held = piece
    yield held
