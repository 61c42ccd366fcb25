"""From any kind of record to its token sequence: conversations by the template, the others as they stand."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flowtrain_lightning.data.data_error import DataError
from flowtrain_lightning.data.media.video_processor import VideoProcessor
from flowtrain_lightning.data.records.completion import Completion
from flowtrain_lightning.data.records.conversation import Template, TokenSequence, shifted_labels
from flowtrain_lightning.data.records.formats import Record
from flowtrain_lightning.data.records.given_tokens import GivenTokens
from flowtrain_lightning.data.records.special_tokens import ForgedTokenError
from flowtrain_lightning.data.records.tokenization import AdaptedTokenizer, Tokenizer
from flowtrain_lightning.packing import IntArray


def token_sequence(
    record: Record,
    template: Template,
    tokenizer: Tokenizer,
    rows: IntArray,
    *,
    prompt: bool = False,
    videos: VideoProcessor | None = None,
) -> TokenSequence:
    """The tokens and labels of a record.

    Args:
        record: the record.
        template: writes conversations.
        tokenizer: makes ids of text.
        rows: ``[media items]`` rows of features of the record's media items, in order. Where it names fewer of them
            than the record has, the sequence ends before the first that is missing.
        prompt: end with the header of the last assistant turn, or before the completion; what is neither is a prompt as
            it stands.
        videos: which frames of a video are taken.

    Raises:
        DataError: the record has what the template cannot write, other tokens than images, or ids beyond the
            vocabulary.
    """
    written = record.written
    if written is None:
        return template.sequence(record, tokenizer, rows, prompt=prompt, videos=videos)
    if isinstance(written, Completion):
        media: dict[str, int] = getattr(template, "media_tokens", lambda _: {})(tokenizer)
        try:
            ids, learned = written.tokens(tokenizer, media, prompt=prompt)
        except ForgedTokenError as error:
            raise DataError(f"{record.where}: {error}.") from None
        return _sequence(ids, learned, rows[:0], rows[:0])
    if isinstance(written, str):
        ids = np.asarray(tokenizer.encode(written), dtype=np.int64)
        _refuse_media(ids, "'text' spells", record, template, tokenizer)
        return _sequence(ids, np.ones(len(ids), dtype=bool), rows[:0], rows[:0])
    _refuse_beyond(written.ids, record, tokenizer)
    if not record.media:
        _refuse_media(written.ids, "'input_ids' hold", record, template, tokenizer)
        return _sequence(written.ids, written.learned, rows[:0], rows[:0])
    return _with_media(written, record, written.media_ids or (template.image_id(tokenizer),), rows)


def _refuse_media(ids: IntArray, hold: str, record: Record, template: Template, tokenizer: Tokenizer) -> None:
    """Refuses tokens that stand for features where a record has no media that would give some."""
    if hasattr(template, "media_tokens"):
        of_media = list(template.media_tokens(tokenizer).values())
    else:
        try:
            of_media = [template.image_id(tokenizer)]
        except ValueError:  # a model of text alone
            return
    found = ids[np.isin(ids, of_media)]
    if len(found):
        raise DataError(
            f"{record.where}: its {hold} {len(found)} tokens that stand for a media item ({found[0]}), but it "
            "has none. Name its images ('images'), write text with images as 'messages', or take the tokens out."
        )


def _refuse_beyond(ids: IntArray, record: Record, tokenizer: Tokenizer) -> None:
    """Refuses ids that no token has; of a tokenizer of one's own nothing tells them."""
    if isinstance(tokenizer, AdaptedTokenizer) and int(ids.max()) >= tokenizer.size:
        raise DataError(
            f"{record.where}: its 'input_ids' hold {int(ids.max())}, but the ids of the tokenizer end with "
            f"{tokenizer.size - 1}. Give the tokenizer that made them: FlowDataModule(tokenizer=...)."
        )


def _with_media(given: GivenTokens, record: Record, media_ids: tuple[int, ...], rows: IntArray) -> TokenSequence:
    """Every media item with as many tokens as it has rows of features; cut before the first one without rows."""
    positions = np.flatnonzero(np.isin(given.ids, media_ids))
    images = len(record.media)
    if len(positions) == images:  # one token an image: repeated for every row
        ids, learned = given.ids, given.learned
        if len(rows) < images:
            ids, learned = ids[: positions[len(rows)]], learned[: positions[len(rows)]]
            positions = positions[: len(rows)]
        counts = np.ones(len(ids), dtype=np.int64)
        counts[positions] = rows
        starts = (np.cumsum(counts) - counts)[positions]
        return _sequence(np.repeat(ids, counts), np.repeat(learned, counts), starts, rows)
    if len(rows) == images and len(positions) == rows.sum():
        starts = positions[np.cumsum(rows) - rows]
        if (positions == np.repeat(starts - np.cumsum(rows) + rows, rows) + np.arange(len(positions))).all():
            return _sequence(given.ids, given.learned, starts, rows)
    called = ", ".join(map(str, media_ids))
    raise DataError(
        f"{record.where}: its 'input_ids' have {len(positions)} image tokens ({called}), but its {images} images need "
        f"{images} (one for each) or {int(rows.sum())} (one for each row of features, those of an image together)."
    )


def _sequence(ids: IntArray, learned: NDArray[np.bool_], starts: IntArray, rows: IntArray) -> TokenSequence:
    positions = np.repeat(starts - np.cumsum(rows) + rows, rows) + np.arange(int(rows.sum()))
    return TokenSequence(ids, shifted_labels(ids, learned), starts, rows, positions)
