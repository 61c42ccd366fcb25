"""Special tokens count where a chat template writes them, and are plain text where a record spells them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]

_FIRST = 0xF0000
"""The first character of Unicode's supplementary private use area, which nobody's text holds."""

_PRIVATE = re.compile(f"[{chr(_FIRST)}-{chr(0xFFFFD)}]")


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
        tokenizer: a fast tokenizer of Hugging Face.

    Attributes:
        ids: special token -> id.
        before: ids that the tokenizer puts before every text, such as that of ``<s>``.
        after: ids that it puts behind.

    Raises:
        ValueError: the tokenizer is not a fast one, or makes a special token of plain text.
    """

    def __init__(self, tokenizer: Any) -> None:
        from tokenizers import AddedToken, Tokenizer

        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ValueError(
                f"{type(tokenizer).__name__} is not a fast tokenizer, which tells where in a text each token lies. "
                "Take the model's fast tokenizer (AutoTokenizer gives it)."
            )
        definition = json.loads(backend.to_str())
        added, definition["added_tokens"] = definition["added_tokens"], []
        definition["post_processor"] = definition["truncation"] = definition["padding"] = None
        self._tokenizer = Tokenizer.from_str(json.dumps(definition))
        self.ids: dict[str, int] = {}
        self._private: dict[str, str] = {}
        real: dict[str, int] = {}
        for token in sorted(added, key=lambda token: int(token["id"])):
            flags = {name: token[name] for name in ("single_word", "lstrip", "rstrip", "normalized")}
            name = token["content"]
            if token["special"]:
                self.ids[name] = token["id"]
                self._private[name] = name = chr(_FIRST + len(self._private))
            self._tokenizer.add_tokens([AddedToken(name, special=token["special"], **flags)])
            real[name] = token["id"]
        self._break = chr(_FIRST + len(self._private))
        self._table = np.arange(self._tokenizer.get_vocab_size() + len(added), dtype=np.int64)
        for name, number in real.items():
            self._table[self._tokenizer.token_to_id(name)] = number
        longest_first = sorted(self.ids, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self.before, self.after = _around(tokenizer)
        self._refuse_unguarded()

    def hidden(self, value: Any) -> Any:
        """A record's value in which special tokens that its texts spell no longer look like any; `encode` undoes it.

        Raises:
            ValueError: a text holds characters that are needed here.
        """
        if isinstance(value, str):
            if _PRIVATE.search(value):
                raise ValueError("its text holds characters of Unicode's supplementary private use area; take them out")
            return self._pattern.sub(lambda found: f"{found[0][0]}{self._break}{found[0][1:]}", value)
        if isinstance(value, Mapping):
            return {self.hidden(name): self.hidden(held) for name, held in value.items()}
        return [self.hidden(held) for held in value] if isinstance(value, list | tuple) else value

    def spells(self, text: str) -> bool:
        """Whether a text spells a special token."""
        return self._pattern.search(text) is not None

    def ends_with_one(self, text: str) -> bool:
        """Whether a text ends with a special token."""
        return any(text.endswith(name) for name in self.ids)

    def told(self, text: str) -> str:
        """Text for `encode`: a private character for each special token, and plain text where one was `hidden`."""
        return self._pattern.sub(lambda found: self._private[found[0]], text).replace(self._break, "")

    def encode(self, text: str) -> Encoded:
        """The tokens of what `told` gave."""
        found = self._tokenizer.encode(text, add_special_tokens=False)
        spans = np.asarray(found.offsets, dtype=np.int64).reshape(-1, 2)
        return Encoded(self._table[found.ids], spans[:, 0], spans[:, 1])

    def _refuse_unguarded(self) -> None:
        for name, number in self.ids.items():
            if number in self._table[self._tokenizer.encode(name, add_special_tokens=False).ids]:
                raise ValueError(
                    f"The tokenizer makes the special token {name!r} of plain text that spells it, so a record could "
                    "forge it. Take a tokenizer that spells it in pieces."
                )


def _around(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The ids that a tokenizer puts before and behind every text."""
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole = tokenizer("a")["input_ids"]
    start = next(at for at in range(len(whole)) if whole[at : at + len(plain)] == plain)
    return whole[:start], whole[start + len(plain) :]
