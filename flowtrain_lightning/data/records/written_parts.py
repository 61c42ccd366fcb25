"""A template's own words and a record's texts as one sequence of ids: special tokens count in the former alone."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from flowtrain_lightning.data.records.special_tokens import ForgedTokenError, SpecialTokens, around
from flowtrain_lightning.data.records.tokenization import AdaptedTokenizer, Tokenizer

_KEPT = 8
"""Encoders that are kept, of as many tokenizers and templates."""


class Part(NamedTuple):
    """Some text of a sequence; ``own`` is the template's, the rest is a record's."""

    text: str
    own: bool = False


class PartsEncoder:
    """Makes ids of a template's words and a record's texts together.

    As a rule they are encoded as one text. Only where that gives other special tokens than the template's own words
    have, the record's texts spell some; then these are kept from being read as such.

    Args:
        tokenizer: makes ids of text.
        words: the template's.
        media: the tokens that stand for media items, and their ids.
    """

    def __init__(self, tokenizer: Tokenizer, words: Iterable[str], media: Mapping[str, int]) -> None:
        self._tokenizer = tokenizer
        self._words = tuple(words)
        self._media = dict(media)
        self._adapted = tokenizer if isinstance(tokenizer, AdaptedTokenizer) else None
        self._specials_of: dict[str, list[int]] = {}
        self._left_out: dict[int, bool] = {}

    def encode(self, parts: Sequence[Part], *, whole: bool = False) -> list[int]:
        """The ids of parts that follow each other.

        Args:
            parts: the texts.
            whole: with what the tokenizer puts before a text by itself; `behind` is left out.

        Raises:
            ForgedTokenError: the tokenizer reads special tokens out of a record's text in whatever way it is given.
        """
        text = "".join(part.text for part in parts)
        ids = self._plain(text, whole)
        if self._adapted is None and not any(_has_marks(part.text) for part in parts if not part.own):
            return ids
        found = self._found(ids)
        if not found:
            return ids
        before = self._around[0] if whole else []
        expected = self._found(before)
        for part in parts:
            expected += self._found_in_words(part.text) if part.own else []
        if found == expected:
            return ids
        told = [*before, *self._apart(parts)]
        if len(self._found(told)) > len(expected):
            raise ForgedTokenError(
                "the tokenizer makes special tokens of text that spells them, and cannot be kept from it; take the "
                "text out"
            )
        return told

    @property
    def behind(self) -> list[int]:
        """The ids that the tokenizer puts behind a text by itself: they end it, so that nothing can go on from it."""
        return self._around[1]

    def _plain(self, text: str, whole: bool) -> list[int]:
        if not whole:
            return list(self._tokenizer.encode(text)) if text else []
        ids = list(getattr(self._tokenizer, "encode_whole", self._tokenizer.encode)(text))
        return ids[: len(ids) - len(self.behind)]

    def _apart(self, parts: Sequence[Part]) -> list[int]:
        """The ids of parts of which a record's spell special tokens, alone or with their neighbours."""
        if self._backend is None:
            return [number for part in parts for number in self._alone(part)]
        for part in parts:
            if not part.own:
                self._backend.check(part.text)
        told = (self._backend.told(part.text) if part.own else part.text for part in parts)
        ids: list[int] = self._backend.encode("".join(told)).ids.tolist()
        return ids

    def _alone(self, part: Part) -> list[int]:
        """The ids of one part, a record's without special tokens: it is cut before the end of whatever spells one."""
        ids: list[int] = []
        rest = part.text
        while not part.own and self._found(self._plain(rest, False)):
            spelled = bisect_left(range(len(rest)), True, lo=1, key=lambda end: self._spells(rest[:end]))
            if spelled == 1:
                break  # a single character, which cannot be cut
            ids += self._plain(rest[: spelled - 1], False)
            rest = rest[spelled - 1 :]
        return ids + self._plain(rest, False)

    def _spells(self, text: str) -> bool:
        return bool(self._found(self._plain(text, False)))

    def _found(self, ids: Iterable[int]) -> list[int]:
        """The special ones of some ids."""
        if self._adapted is None:
            return [number for number in ids if number in self._media_ids or self._is_left_out(number)]
        special = self._special_ids
        return [number for number in ids if number in special]

    def _found_in_words(self, text: str) -> list[int]:
        if text not in self._specials_of:
            self._specials_of[text] = self._found(self._plain(text, False))
        return self._specials_of[text]

    def _is_left_out(self, number: int) -> bool:
        """Whether a tokenizer of one's own leaves an id out where it decodes, as it does special tokens."""
        if number not in self._left_out:
            beside = self._plain("a", False)
            there, without = (self._tokenizer.decode(ids) for ids in ([*beside, number, *beside], [*beside, *beside]))
            self._left_out[number] = there == without
        return self._left_out[number]

    @cached_property
    def _media_ids(self) -> frozenset[int]:
        return frozenset(self._media.values())

    @cached_property
    def _special(self) -> dict[str, int]:
        """The special tokens: the tokenizer's, and whatever further token of it the template writes."""
        added = {} if self._adapted is None else self._adapted.added_tokens
        written = {name for name in added if any(name in word for word in self._words) and not name.isspace()}
        return self._media | {name: token.id for name, token in added.items() if token.special or name in written}

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        unknown = None if self._adapted is None else self._adapted.unknown
        return frozenset(self._special.values()) - {unknown}

    @cached_property
    def _backend(self) -> SpecialTokens | None:
        backend = None if self._adapted is None else self._adapted.backend
        return None if backend is None else SpecialTokens(backend, self._special)

    @cached_property
    def _around(self) -> tuple[list[int], list[int]]:
        return around(self._tokenizer.encode, getattr(self._tokenizer, "encode_whole", self._tokenizer.encode))


def _has_marks(text: str) -> bool:
    """Whether more than words stands in a text: no special token is one word among others."""
    return not text.replace(" ", "").isalnum() and bool(text.strip())


_encoders: OrderedDict[tuple[int, tuple[str, ...]], tuple[Tokenizer, PartsEncoder]] = OrderedDict()


def parts_encoder(tokenizer: Tokenizer, words: Iterable[str], media: Mapping[str, int]) -> PartsEncoder:
    """The `PartsEncoder` of a tokenizer and a template's words, made once."""
    key = id(tokenizer), (*words, *media)
    if key not in _encoders:  # which hold the tokenizer, so that no other one gets its number
        _encoders[key] = tokenizer, PartsEncoder(tokenizer, words, media)
        while len(_encoders) > _KEPT:
            _encoders.popitem(last=False)
    return _encoders[key][1]
