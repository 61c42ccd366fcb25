"""Conversations as the model's own chat template and processor write them, token for token."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from flowtrain_lightning.data import DataError, Record, Tokenizer, TokenSequence, Turn, VideoProcessor, open_tokenizer
from flowtrain_lightning.data.fingerprint import fingerprint
from flowtrain_lightning.data.media.media_files import AudioFile, MediaFile, NamedMedia, VideoFile
from flowtrain_lightning.data.media.video_files import read_video_header
from flowtrain_lightning.data.records.conversation import shifted_labels, turns_to_write
from flowtrain_lightning.data.records.record_turns import ASSISTANT
from flowtrain_lightning.data.records.special_tokens import ForgedTokenError, IntArray, SpecialTokens, around
from flowtrain_lightning.models.image_words import ImageWords

_GENERATION = re.compile(r"{%-?\s*generation\s*-?%}")

_ROLES = ("system", "user", ASSISTANT)
"""Which every template knows; others it has to name."""

_LISTED = "{'type': 'text'"
"""The beginning of a list of parts that a template takes for text."""

Tiles = Callable[[MediaFile], tuple[int, int]]
"""An image's file -> rows and columns of the tiles that it is cut into."""


class _Written(NamedTuple):
    """A rendered conversation, and the spans of it that are learned."""

    text: str
    learned: list[tuple[int, int]]


class ProcessorTemplate:
    """The chat template of a Hugging Face model, with its processor's words for images and videos.

    Special tokens that a record's texts spell are plain text. Learned is what the template marks by
    ``{% generation %}``, as in ``apply_chat_template(return_assistant_tokens_mask=True)``. Where it marks nothing: from
    the end of an assistant turn's header to its last special token, found by comparing the conversation with its
    beginnings.

    Args:
        tokenizer: the model's, of Hugging Face.
        template: the chat template, in Jinja.
        words: how images and videos stand in the text.
        tiles: tells how an image is cut; needed where ``words.tiled``.

    Raises:
        ValueError: the tokenizer does not have the tokens that stand for media, or ``tiles`` are missing.
    """

    def __init__(self, tokenizer: Any, template: str, words: ImageWords, tiles: Tiles | None = None) -> None:
        self._given = tokenizer
        self._template = template
        self._tiles = tiles
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ValueError(
                f"{type(tokenizer).__name__} is not a fast tokenizer, which tells where in a text each token lies. "
                "Take the model's fast tokenizer (AutoTokenizer gives it)."
            )
        self._special = SpecialTokens(backend)
        self._around = around(lambda text: tokenizer.encode(text, add_special_tokens=False), tokenizer.encode)
        if words.videos is not None and words.videos.token not in self._special.ids:
            words = replace(words, videos=None)  # a model that was trained for images alone
        if words.audio not in self._special.ids:
            words = replace(words, audio=None)
        self._words = words
        self._marked = _GENERATION.search(template) is not None
        self._names = dict(tokenizer.special_tokens_map)
        if words.tiled and tiles is None:
            raise ValueError("What is written for an image depends on its tiles; give ProcessorTemplate(tiles=...).")
        others = {} if words.videos is None else {words.videos.token: "video"}
        others |= {} if words.audio is None else {words.audio: "audio"}
        self._placeholders = {words.placeholder: "image", **others}
        self._placeholder = re.compile("|".join(map(re.escape, self._placeholders)))
        missing = [name for name in (words.placeholder, words.token) if name not in self._special.ids]
        if missing:
            raise ValueError(
                f"The tokenizer has no special token {missing[0]!r}, which stands for an image; take the tokenizer "
                "that belongs to the model."
            )

    def __repr__(self) -> str:
        return f"ProcessorTemplate({self.fingerprint})"

    def media_tokens(self, tokenizer: Tokenizer) -> dict[str, int]:
        """The tokens that stand for rows of features, and their ids."""
        self._check(tokenizer)
        return {name: self._special.ids[name] for name in self._row_tokens}

    @cached_property
    def _row_tokens(self) -> list[str]:
        videos, audio = self._words.videos, self._words.audio
        others = [None if videos is None else videos.token, audio]
        return [self._words.token, *(token for token in others if token is not None)]

    @cached_property
    def fingerprint(self) -> str:
        """Changes whenever some conversation would be written differently."""
        words = [self._words.placeholder, *self._words.write(4, (1, 1))]
        if self._words.videos is not None:
            words += self._words.videos.write(4, (0.5, 1.5))
        words += [] if self._words.audio is None else [self._words.audio]
        return fingerprint([self._template, words, open_tokenizer(self._given).fingerprint])

    def image_id(self, tokenizer: Tokenizer) -> int:
        """The id of the token that stands for one row of features of an image."""
        self._check(tokenizer)
        return self._special.ids[self._words.token]

    def sequence(
        self,
        record: Record,
        tokenizer: Tokenizer,
        rows: IntArray,
        *,
        prompt: bool = False,
        videos: VideoProcessor | None = None,
    ) -> TokenSequence:
        """The tokens and labels of a record, see `flowtrain_lightning.data.records.conversation.Template`.

        Raises:
            DataError: the template does not write all that the record holds.
            ValueError: the tokenizer is not that of the template.
        """
        self._check(tokenizer)
        if record.videos and self._words.videos is None:
            raise DataError(
                f"{record.where}: it has a video, but this model takes images only; take a model that takes videos "
                "(Qwen2-VL, Qwen2.5-VL or Qwen3-VL), or take the record out."
            )
        if record.audios and self._words.audio is None:
            raise DataError(
                f"{record.where}: it has audio, but this model does not hear; take a model that does "
                "(Qwen2.5-Omni or Qwen3-Omni), or take the record out."
            )
        turns = turns_to_write(record.turns, prompt)
        try:
            written = self._written(turns, record, prompt)
        except ValueError as error:
            raise DataError(f"{record.where}: {error}.") from None
        try:
            return self._tokens(written, record, rows, videos, prompt)
        except ForgedTokenError as error:
            raise DataError(f"{record.where}: {error}.") from None

    def _check(self, tokenizer: Tokenizer) -> None:
        if tokenizer.token_to_id(self._words.token) != self._special.ids[self._words.token]:
            raise ValueError(
                f"The tokenizer given has not the id {self._special.ids[self._words.token]} for {self._words.token!r}, "
                "as that of the chat template has. Give both of one model."
            )

    # ---- from turns to text ---------------------------------------------------------------------------------------

    def _written(self, turns: tuple[Turn, ...], record: Record, prompt: bool) -> _Written:
        """The text of a conversation, with its own special tokens hidden.

        Raises:
            ValueError: the template cannot write it, or leaves something out.
        """
        self._refuse_unknown_roles(turns)
        others = self._known(record.others)
        messages = [self._message(turn) for turn in turns]

        @cache
        def render(count: int, header: bool) -> _Written:
            return self._render(messages[:count], others, header)

        whole = render(len(messages), bool(prompt))
        self._refuse_left_out(messages, whole.text)
        if prompt:
            return _Written(whole.text, [])
        answers = [number for number, turn in enumerate(turns) if turn.role == ASSISTANT]
        if not self._marked:
            spans = [self._answer(number, whole.text, render) for number in answers if turns[number].learned]
        elif all(turns[number].learned for number in answers):
            spans = whole.learned
        else:
            until = {number: len(render(number, False).learned) for number in {*answers, *(n + 1 for n in answers)}}
            of_turns = [whole.learned[until[n] : until[n + 1]] for n in answers if turns[n].learned]
            spans = [span for of_turn in of_turns for span in of_turn]
        return _Written(whole.text, spans)

    def _answer(self, number: int, whole: str, render: Callable[..., _Written]) -> tuple[int, int]:
        """Finds where an assistant turn's words begin and end in the whole text."""
        until = render(number + 1, False).text
        if number > 0:
            begin = len(opened := render(number, True).text)
            same = until.startswith(opened)
        else:  # a conversation of no turns may be more than a template can write: its header alone is looked for
            header = render(1, True).text.removeprefix(until)
            begin = until.find(header) + len(header)
            same = header in until
        if not same or not whole.startswith(until):
            raise ValueError(
                f"the chat template writes turn {number + 1} otherwise once more turns follow, or than it announces "
                "it, so that what to learn cannot be told; mark it in the template by {% generation %}"
            )
        said = until.rstrip()
        return begin, max(begin, len(said)) if self._special.ends_with_one(said) else len(until)

    def _render(self, messages: list[dict[str, Any]], others: Mapping[str, Any], header: bool) -> _Written:
        # transformers' own function, since apply_chat_template tells what is learned only of tokens.
        from jinja2.exceptions import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            texts, spans = render_jinja_template(
                conversations=[messages],
                chat_template=self._template,
                return_assistant_tokens_mask=self._marked,
                add_generation_prompt=header,
                **self._names,
                **others,
            )
        except (TemplateError, TypeError) as error:
            raise ValueError(f"the chat template cannot write it ({error})") from None
        return _Written(texts[0], [(int(begin), int(end)) for begin, end in spans[0]] if self._marked else [])

    def _message(self, turn: Turn) -> dict[str, Any]:
        content: list[dict[str, str]] = []
        for kind, text in zip(("", *turn.kinds), turn.texts, strict=True):
            content += [{"type": kind}] if kind else []
            content += [{"type": "text", "text": self._special.hidden(text)}] if text else []
        if not content and not turn.others:  # templates ask what a turn without tool calls begins with
            content = [{"type": "text", "text": ""}]
        return {"role": self._special.hidden(turn.role), "content": content, **self._known(turn.others)}

    def _known(self, others: Mapping[str, Any]) -> dict[str, Any]:
        """What stands beside roles and texts, where the template writes it."""
        for name in others:
            if not re.search(rf"\b{re.escape(name)}\b", self._template):
                raise ValueError(f"it holds {name!r}, which the model's chat template does not write; take it out")
        return {name: self._special.hidden(value) for name, value in others.items()}

    def _refuse_unknown_roles(self, turns: tuple[Turn, ...]) -> None:
        """Many templates write any role as it stands, and of one misspelled nothing would be learned."""
        for role in (turn.role for turn in turns if turn.role not in _ROLES):
            if not re.search(rf"['\"]{re.escape(role)}['\"]", self._template):
                raise ValueError(
                    f"it has a turn of {role!r:.60}, a role that the model's chat template does not name; call it "
                    f"one of {', '.join(map(repr, _ROLES))}"
                )

    def _refuse_left_out(self, messages: list[dict[str, Any]], text: str) -> None:
        parts = [part for message in messages for part in message["content"]]
        at = 0
        for said in (part["text"] for part in parts if part["type"] == "text"):
            at = text.find(said.strip(), at)  # many templates take white space off
            if at < 0:
                raise ValueError(f"the chat template leaves out or changes the text {said[:60]!r}")
            at += len(said.strip())
        if _LISTED in text:
            raise ValueError("the chat template does not take the text of one of its roles as a list of parts")
        for placeholder, kind in self._placeholders.items():
            items = sum(part["type"] == kind for part in parts)
            count = text.count(placeholder)
            if count != items:
                raise ValueError(
                    f"the chat template writes {placeholder!r} {count} times, but the record has {items} {kind}s"
                )

    # ---- from text to tokens --------------------------------------------------------------------------------------

    def _tokens(
        self, written: _Written, record: Record, rows: IntArray, videos: VideoProcessor | None, prompt: bool
    ) -> TokenSequence:
        """The text with its media written out; tokens that overlap a learned span are learned."""
        pieces = _split(written, self._placeholder)
        text, spans, starts, counts = "", [], [], []
        for number, (piece, learned) in enumerate(pieces):
            told, moved = self._told(piece, learned)
            spans += [(begin + len(text), end + len(text)) for begin, end in moved]
            text += told
            if number < len(pieces) - 1:
                known = int(rows[number]) if number < len(rows) else 0
                words, often = self._words_for(record.files[number], known, videos)
                starts.append(len(text))
                text += self._special.told(words)
                counts += often
        before, behind = ([], []) if self._begins_itself(written.text) else self._around
        # A prompt is gone on with, so nothing may end it.
        return self._expanded(text, spans, starts, counts, rows, (before, [] if prompt else behind))

    def _words_for(self, item: NamedMedia, rows: int, videos: VideoProcessor | None) -> tuple[str, list[int]]:
        """What is written for a media item, and how often each token in it that stands for features counts."""
        words = self._words.videos
        if isinstance(item, AudioFile):
            assert self._words.audio is not None, "a record with audio was refused"
            return self._words.audio, [rows]
        if not isinstance(item, VideoFile):
            return self._words.write(rows, self._tiles(item) if self._words.tiled and self._tiles else (0, 0))
        assert words is not None, "a record with videos was refused"
        if not words.timed:
            return words.write(rows, ())
        if videos is None:
            raise ValueError("The times of a video's frames are written; say which are taken: sequence(videos=...).")
        return words.write(rows, videos.sample(read_video_header(item)).times)

    def _begins_itself(self, text: str) -> bool:
        """Whether a template writes the token that begins a text, which the tokenizer then does not add.

        PaliGemma's writes it behind the images.
        """
        begin = self._names.get("bos_token")
        return begin is not None and begin in text

    def _told(self, text: str, learned: list[tuple[int, int]]) -> tuple[str, list[tuple[int, int]]]:
        """A piece of text for the tokenizer, and where its learned spans are then."""
        borders = sorted({0, len(text), *(border for span in learned for border in span)})
        told, moved = "", {0: 0}
        for begin, end in pairwise(borders):
            told += self._special.told(text[begin:end])
            moved[end] = len(told)
        return told, [(moved[begin], moved[end]) for begin, end in learned]

    def _expanded(
        self,
        text: str,
        spans: list[tuple[int, int]],
        starts: list[int],
        counts: list[int],
        rows: IntArray,
        outside: tuple[list[int], list[int]],
    ) -> TokenSequence:
        """Tokens of a text in which a media item's token stands once for several, each written as often as it counts.

        The first media item of which no rows are known ends the sequence.
        """
        (before, behind), (ids, begin, end) = outside, self._special.encode(text)
        learned = np.zeros(len(ids), dtype=bool)
        for first, last in spans:
            learned |= (begin < last) & (end > first)
        media = np.isin(ids, [self._special.ids[name] for name in self._row_tokens])
        often = np.ones(len(ids), dtype=np.int64)
        often[media] = counts
        first_tokens = (np.cumsum(often) - often)[np.searchsorted(begin, starts)] + len(before)
        limit = int(first_tokens[len(rows)]) if len(rows) < len(starts) else None
        tokens = np.concatenate([before, np.repeat(ids, often), behind]).astype(np.int64)[:limit]
        is_learned = np.zeros(len(tokens), dtype=bool)
        repeated = np.repeat(learned & ~media, often)[: len(tokens) - len(before)]
        is_learned[len(before) : len(before) + len(repeated)] = repeated
        positions = np.flatnonzero(np.repeat(media, often))[: rows.sum()] + len(before)
        return TokenSequence(tokens, shifted_labels(tokens, is_learned), first_tokens[: len(rows)], rows, positions)


def _split(written: _Written, placeholder: re.Pattern[str]) -> list[tuple[str, list[tuple[int, int]]]]:
    """The text between the placeholders of media, each piece with the parts of the learned spans that lie in it."""
    pieces, text = [], written.text
    spans = [(0, 0), *(found.span() for found in placeholder.finditer(text)), (len(text), len(text))]
    for (_, start), (end, _) in pairwise(spans):
        within = [(max(first, start) - start, min(last, end) - start) for first, last in written.learned]
        pieces.append((text[start:end], [(first, last) for first, last in within if first < last]))
    return pieces
