"""Special tokens count where a template writes them, and are plain text where a record spells them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]

_FIRST = 0xF0000
"""The first character of Unicode's supplementary private use area, which nobody's text holds."""

_PRIVATE = re.compile(f"[{chr(_FIRST)}-{chr(0xFFFFD)}]")


class ForgedTokenError(ValueError):
    """A text that spells special tokens cannot be told as plain text; says why, without naming the record."""


class Encoded(NamedTuple):
    """Text as tokens.

    Attributes:
        ids: ``[tokens]``.
        begin: ``[tokens]`` where in the text each token begins.
        end: ``[tokens]`` and ends.
    """

    ids: IntArray
    begin: IntArray
    end: IntArray


class SpecialTokens:
    """A tokenizer that tells special tokens by private characters, one for each, and so from text that spells them.

    Args:
        backend: a ``tokenizers.Tokenizer``.
        also: tokens that count as special though the tokenizer does not say so, and their ids.

    Attributes:
        ids: special token -> id.
    """

    def __init__(self, backend: Any, also: Mapping[str, int] | None = None) -> None:
        from tokenizers import AddedToken, Tokenizer

        definition = json.loads(backend.to_str())
        added, definition["added_tokens"] = definition["added_tokens"], []
        definition["post_processor"] = definition["truncation"] = definition["padding"] = None
        self._tokenizer = Tokenizer.from_str(json.dumps(definition))
        self.ids: dict[str, int] = {}
        self._private: dict[str, str] = {}
        real: dict[str, int] = {}
        also, plain = also or {}, {"special": True, "single_word": False, "lstrip": False, "rstrip": False}
        known = {token["content"] for token in added}
        added += [plain | {"content": name, "id": also[name], "normalized": False} for name in also.keys() - known]
        for token in sorted(added, key=lambda token: int(token["id"])):
            flags = {name: token[name] for name in ("single_word", "lstrip", "rstrip", "normalized")}
            name, special = token["content"], token["special"] or token["content"] in also
            if special:
                self.ids[name] = token["id"]
                self._private[name] = name = chr(_FIRST + len(self._private))
            self._tokenizer.add_tokens([AddedToken(name, special=special, **flags)])
            real[name] = token["id"]
        self._break = chr(_FIRST + len(self._private))
        self._tokenizer.add_special_tokens([AddedToken(self._break, normalized=False)])
        self._table = np.arange(self._tokenizer.get_vocab_size() + len(added) + 1, dtype=np.int64)
        for name, number in real.items():
            self._table[self._tokenizer.token_to_id(name)] = number
        self._table[self._tokenizer.token_to_id(self._break)] = -1
        told = {self._tokenizer.token_to_id(name) for name in real}
        self._forged = frozenset(self.ids.values()) - told - {unknown_id(backend)}
        longest_first = sorted(self.ids, key=len, reverse=True)
        spelled = "|".join(map(re.escape, longest_first)) or r"(?!)"
        self._pattern, self._anywhere = re.compile(spelled), re.compile(f"(?={spelled})")
        self._longest = len(longest_first[0]) if longest_first else 0
        self._of_one = frozenset(name for name in self.ids if len(name) == 1)
        self._heads = frozenset(name[:count] for name in self.ids for count in range(1, len(name)))
        self._tails = frozenset(name[count:] for name in self.ids for count in range(1, len(name)))

    def hidden(self, value: Any) -> Any:
        """A record's value in which nothing that its texts spell looks like a special token; `told` undoes it.

        Neither does it once the text stands beside another: a template may join any of them.

        Raises:
            ForgedTokenError: a text holds characters that are needed here.
        """
        if isinstance(value, str):
            self.check(value)
            if not self._of_one.isdisjoint(value):
                raise ForgedTokenError("its text holds a character that is a special token by itself; take it out")
            text, done = "", 0
            for cut in sorted(self._cuts(value)):
                text, done = f"{text}{value[done:cut]}{self._break}", cut
            return text + value[done:]
        if isinstance(value, Mapping):
            return {self.hidden(name): self.hidden(held) for name, held in value.items()}
        return [self.hidden(held) for held in value] if isinstance(value, list | tuple) else value

    def check(self, text: str) -> None:
        """Refuses a text with characters that are needed here.

        Raises:
            ForgedTokenError: it holds some.
        """
        if _PRIVATE.search(text):
            raise ForgedTokenError(
                "its text holds characters of Unicode's supplementary private use area; take them out"
            )

    def _cuts(self, text: str) -> set[int]:
        """Finds where a text is to be broken: within what spells a special token, or could be a part of one."""
        cuts = {found.start() + 1 for found in self._anywhere.finditer(text)}
        begin, end = len(text) - len(text.lstrip()), len(text.rstrip())  # templates take white space off
        for count in range(1, min(self._longest, end - begin + 1)):
            if text[end - count : end] in self._heads:
                cuts.add(end - count + 1)
            if text[begin : begin + count] in self._tails:
                cuts.add(begin + count - 1)
        within = text[begin:end]
        # Words alone are left as they are: templates compare with them ('object').
        if len(within) < self._longest and re.search(r"\W", within) and any(within in name for name in self.ids):
            cuts.add(begin + 1)
        return cuts

    def ends_with_one(self, text: str) -> bool:
        """Whether a text ends with a special token."""
        return any(text.endswith(name) for name in self.ids)

    def told(self, text: str) -> str:
        """Text for `encode`: a private character for each special token, and plain text where one was `hidden`."""
        return self._pattern.sub(lambda found: self._private[found[0]], text).replace(self._break, "")

    def encode(self, text: str) -> Encoded:
        """The tokens of what `told` gave, or of a record's text as it stands.

        Raises:
            ForgedTokenError: the tokenizer makes a special token of plain text.
        """
        found = self._tokenizer.encode(text, add_special_tokens=False)
        if self._forged.isdisjoint(found.ids):
            spans = np.asarray(found.offsets, dtype=np.int64).reshape(-1, 2)
            return Encoded(self._table[found.ids], spans[:, 0], spans[:, 1])
        return self._encode_broken(text)

    def _encode_broken(self, text: str) -> Encoded:
        """Of a tokenizer that knows special tokens as words too: those that the text spells are taken in two pieces."""
        cuts = np.asarray(sorted({found.start() + 1 for found in self._anywhere.finditer(text)}), dtype=np.int64)
        pieces = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        found = self._tokenizer.encode(self._break.join(pieces), add_special_tokens=False)
        forged = self._forged.intersection(found.ids)
        if forged:
            name = next(name for name, number in self.ids.items() if number in forged)
            raise ForgedTokenError(
                f"the tokenizer makes the special token {name!r} of plain text that spells it, so a record could "
                "forge it; take a tokenizer that spells it in pieces, or the text out"
            )
        ids = self._table[found.ids]
        spans = np.asarray(found.offsets, dtype=np.int64).reshape(-1, 2)[ids >= 0]
        spans -= np.searchsorted(cuts + np.arange(len(cuts)), spans)  # the breaks before each
        return Encoded(ids[ids >= 0], spans[:, 0], spans[:, 1])


def unknown_id(backend: Any) -> int | None:
    """The id that a ``tokenizers.Tokenizer`` makes of whatever its vocabulary lacks, which any text may so hold."""
    name = getattr(backend.model, "unk_token", None)
    if name is not None:
        found: int | None = backend.token_to_id(name)
        return found
    model = json.loads(backend.to_str())["model"]
    unknown: int | None = model.get("unk_id")
    return unknown


def around(plain: Callable[[str], Sequence[int]], whole: Callable[[str], Sequence[int]]) -> tuple[list[int], list[int]]:
    """The ids that a tokenizer puts before and behind every text; none of one that reads a text otherwise then.

    Args:
        plain: makes ids of a text alone.
        whole: makes ids of a text with what the tokenizer puts around it.
    """
    inner, outer = list(plain("a")), list(whole("a"))
    start = next((at for at in range(len(outer)) if outer[at : at + len(inner)] == inner), None)
    return ([], []) if start is None else (outer[:start], outer[start + len(inner) :])
