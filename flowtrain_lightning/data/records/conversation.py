"""Conversations as tokens: role markers, a media token for every row of features, and labels on what is learned."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from flowtrain_lightning.data.batch import IGNORED_LABEL
from flowtrain_lightning.data.data_error import DataError
from flowtrain_lightning.data.fingerprint import fingerprint
from flowtrain_lightning.data.media.video_processor import VideoProcessor
from flowtrain_lightning.data.records.formats import Record
from flowtrain_lightning.data.records.record_turns import ASSISTANT, Turn
from flowtrain_lightning.data.records.special_tokens import ForgedTokenError
from flowtrain_lightning.data.records.tokenization import Tokenizer
from flowtrain_lightning.data.records.written_parts import Part, parts_encoder
from flowtrain_lightning.packing import IntArray


@dataclass(frozen=True)
class TokenSequence:
    """One sample as the backbone reads it.

    Attributes:
        tokens: ``[tokens]`` ids; where features go, the id is the media token's.
        labels: ``[tokens]`` already shifted: the id that this token must predict, or ``IGNORED_LABEL``.
        media_start: ``[media items]`` where that which is written for each media item begins.
        media_rows: ``[media items]`` how many rows of features each media item has.
        media_positions: ``[rows]`` the position of every row of features, in order.
    """

    tokens: IntArray
    labels: IntArray
    media_start: IntArray
    media_rows: IntArray
    media_positions: IntArray

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def targets(self) -> int:
        """Tokens that carry loss."""
        return int(np.count_nonzero(self.labels != IGNORED_LABEL))

    def cut(self, limit: int) -> TokenSequence:
        """The first ``limit`` tokens at most; a media item that does not fit whole is left out with what follows."""
        if len(self) <= limit:
            return self
        rows_until = np.cumsum(self.media_rows)
        fits = self.media_positions[rows_until - 1] < limit
        kept = len(fits) if fits.all() else int(np.argmin(fits))
        if kept < len(fits):
            limit = min(limit, int(self.media_start[kept]))
        labels = self.labels[:limit].copy()
        labels[-1:] = IGNORED_LABEL
        rows = self.media_rows[:kept]
        return TokenSequence(
            self.tokens[:limit], labels, self.media_start[:kept], rows, self.media_positions[: rows.sum()]
        )


class Template(Protocol):
    """Writes a conversation for the backbone.

    One may also have ``media_tokens(tokenizer)``: the tokens that stand for rows of features, and their ids. Records of
    token ids or of text alone may hold none of them without media; else they may hold no ``image_id``.
    """

    @property
    def fingerprint(self) -> str:
        """Changes whenever some conversation would be written differently."""
        ...

    def sequence(
        self,
        record: Record,
        tokenizer: Tokenizer,
        rows: IntArray,
        *,
        prompt: bool = False,
        videos: VideoProcessor | None = None,
    ) -> TokenSequence:
        """The tokens and labels of a record.

        Args:
            record: the conversation.
            tokenizer: makes ids of text.
            rows: ``[media items]`` rows of features of the record's media items, in order. Where it names fewer of them
                than the record has, the sequence ends before the first that is missing.
            prompt: end with the header of the last assistant turn, to be continued by the backbone.
            videos: which frames of a video are taken, of which some models are told the times.

        Raises:
            DataError: the record holds what the template cannot write.
            ValueError: the tokenizer does not have the template's tokens.
        """
        ...

    def image_id(self, tokenizer: Tokenizer) -> int:
        """The id of the token that stands for one row of features of an image.

        Raises:
            ValueError: the tokenizer does not have it.
        """
        ...


def shifted_labels(tokens: IntArray, learned: NDArray[np.bool_]) -> IntArray:
    """``[tokens]`` what each token must predict: the next one where that is learned, else ``IGNORED_LABEL``."""
    labels = np.full(len(tokens), IGNORED_LABEL, dtype=np.int64)
    labels[:-1] = np.where(learned[1:], tokens[1:], IGNORED_LABEL)
    return labels


def turns_to_write(turns: tuple[Turn, ...], prompt: bool) -> tuple[Turn, ...]:
    """All turns or, of a prompt, those before the answer that ends them, if one does."""
    return turns[:-1] if prompt and turns and turns[-1].role == ASSISTANT else turns


class _Piece(NamedTuple):
    """Some text of a rendered conversation, or one media item (``text`` is None).

    Attributes:
        text: the text.
        learned: it is learned.
        own: it is the template's, not the record's.
        kind: of a media item.
    """

    text: str | None
    learned: bool
    own: bool = True
    kind: str = ""


class _Joined(NamedTuple):
    """Neighbouring texts, or one media item (``parts`` is None), and whether it is learned."""

    parts: list[Part] | None
    learned: bool
    kind: str = ""


_TOLD = {"image": "images", "video": "videos", "audio": "audio"}


@dataclass(frozen=True)
class ChatTemplate:
    """The format in which a conversation is written for the backbone. The defaults are Qwen's.

    A turn is its role's header, its text and ``end``; in assistant turns text and ``end`` carry loss, nothing else
    does. ``between`` follows every turn. Special tokens that a record's texts spell are plain text.

    Attributes:
        headers: what begins a turn, by role.
        end: closes a turn; the backbone learns to stop by it.
        between: follows the end of every turn.
        begin: begins every sequence.
        image_token: stands for one row of features of an image; must be one token of the vocabulary.
        video_token: stands for one row of features of a video; must be one token of the vocabulary, if there are any.
        before_image: precedes the tokens of an image or a video.
        after_image: follows the tokens of an image or a video.
        audio_token: stands for one row of features of audio; must be one token of the vocabulary, if there is audio.
        before_audio: precedes a clip's tokens.
        after_audio: follows a clip's tokens.
    """

    headers: dict[str, str] = field(
        default_factory=lambda: {role: f"<|im_start|>{role}\n" for role in ("system", "user", ASSISTANT)}
    )
    end: str = "<|im_end|>"
    between: str = "\n"
    begin: str = ""
    image_token: str = "<|image_pad|>"
    video_token: str = "<|video_pad|>"
    before_image: str = "<|vision_start|>"
    after_image: str = "<|vision_end|>"
    audio_token: str = "<|audio_pad|>"
    before_audio: str = "<|audio_start|>"
    after_audio: str = "<|audio_end|>"

    @property
    def fingerprint(self) -> str:
        """Changes whenever some conversation would be written differently."""
        return fingerprint(asdict(self))

    def sequence(
        self,
        record: Record,
        tokenizer: Tokenizer,
        rows: IntArray,
        *,
        prompt: bool = False,
        videos: VideoProcessor | None = None,
    ) -> TokenSequence:
        """The tokens and labels of a record, see `Template`.

        Raises:
            DataError: the record has a role without header, or what only a model's own template could write, or a
                text that the tokenizer cannot be kept from reading special tokens out of.
            ValueError: the vocabulary has no image token.
        """
        self._refuse_unwritten(record)
        ids: list[int] = []
        learned: list[bool] = []
        starts: list[int] = []
        encoder = parts_encoder(tokenizer, self._words, self.media_tokens(tokenizer))
        for piece in _joined(self._pieces(record, prompt)):
            if piece.parts is not None:
                try:
                    added = encoder.encode(piece.parts)
                except ForgedTokenError as error:
                    raise DataError(f"{record.where}: {error}.") from None
            elif len(starts) == len(rows):
                break
            else:
                added = [self._media_id(piece.kind, tokenizer)] * int(rows[len(starts)])
                starts.append(len(ids))
            ids += added
            learned += [piece.learned] * len(added)
        tokens = np.asarray(ids, dtype=np.int64)
        labels = shifted_labels(tokens, np.asarray(learned, dtype=bool))
        start, rows = np.asarray(starts, dtype=np.int64), rows[: len(starts)]
        before = np.cumsum(rows) - rows
        positions = np.repeat(start - before, rows) + np.arange(rows.sum())
        return TokenSequence(tokens, labels, start, rows, positions)

    def _pieces(self, record: Record, prompt: bool) -> Iterator[_Piece]:
        yield _Piece(self.begin, False)
        for turn in turns_to_write(record.turns, prompt):
            yield _Piece(self._header(turn.role, record), False)
            yield from self._content(turn)
            yield _Piece(self.between, False)
        if prompt:
            yield _Piece(self._header(ASSISTANT, record), False)

    def _content(self, turn: Turn) -> Iterator[_Piece]:
        learned = turn.role == ASSISTANT and turn.learned
        for kind, text in zip(("", *turn.kinds), turn.texts, strict=True):
            if kind:
                before, after = self._around(kind)
                yield _Piece(before, False)
                yield _Piece(None, False, kind=kind)
                yield _Piece(after, False)
            yield _Piece(text, learned, own=False)
        yield _Piece(self.end, learned)

    def _around(self, kind: str) -> tuple[str, str]:
        return (self.before_audio, self.after_audio) if kind == "audio" else (self.before_image, self.after_image)

    def _header(self, role: str, record: Record) -> str:
        if role not in self.headers:
            raise DataError(
                f"{record.where}: role {role!r} has no header in the chat template, which knows "
                f"{', '.join(self.headers)}; correct the record or add the role to ChatTemplate(headers=...)."
            )
        return self.headers[role]

    def _refuse_unwritten(self, record: Record) -> None:
        unwritten = sorted({name for turn in record.turns for name in turn.others} | record.others.keys())
        if unwritten:
            raise DataError(
                f"{record.where}: it holds {', '.join(map(repr, unwritten))}, which ChatTemplate cannot write; take it "
                "out, or give the template of a model that can: FlowDataModule(template=...)."
            )

    @property
    def _words(self) -> tuple[str, ...]:
        media = (*self._around("image"), *self._around("audio"))
        return (*self.headers.values(), self.end, self.between, self.begin, *media)

    def media_tokens(self, tokenizer: Tokenizer) -> dict[str, int]:
        """The tokens that stand for rows of features, and their ids; empty where the vocabulary has none."""
        found = {
            token: tokenizer.token_to_id(token) for token in (self.image_token, self.video_token, self.audio_token)
        }
        return {token: number for token, number in found.items() if number is not None}

    def image_id(self, tokenizer: Tokenizer) -> int:
        """The id of ``image_token``.

        Raises:
            ValueError: the vocabulary does not have it.
        """
        return self._media_id("image", tokenizer)

    def _media_id(self, kind: str, tokenizer: Tokenizer) -> int:
        token = {"image": self.image_token, "video": self.video_token, "audio": self.audio_token}[kind]
        found = tokenizer.token_to_id(token)
        if found is None:
            raise ValueError(
                f"The tokenizer's vocabulary has no token {token!r}, which stands for features of {_TOLD[kind]}; add "
                f"it as a special token, or name another in ChatTemplate({kind}_token=...)."
            )
        return found


def _joined(pieces: Iterator[_Piece]) -> Iterator[_Joined]:
    """Neighbouring texts together, where both or neither are learned: they are then encoded as they will be read."""
    held: list[Part] = []
    learned = False
    for piece in pieces:
        if piece.text is None or (piece.text and piece.learned != learned):
            yield _Joined(held, learned)
            held, learned = [], piece.learned
        if piece.text is None:
            yield _Joined(None, False, piece.kind)
        elif piece.text:
            held.append(Part(piece.text, piece.own))
    yield _Joined(held, learned)
