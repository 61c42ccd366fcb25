"""Tokenizers: the protocol that data need, and adapters for those that people have."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from flowtrain_lightning.data.fingerprint import fingerprint
from flowtrain_lightning.data.records.special_tokens import unknown_id


@runtime_checkable
class Tokenizer(Protocol):
    """Text to token ids and back.

    For prompts with completions of plain text one may also have ``encode_whole(text)``, with the tokens that it puts
    around a text by itself, such as ``<s>``, and ``end``, the token that ends an answer, such as ``"<|im_end|>"``.
    """

    @property
    def fingerprint(self) -> str:
        """Changes whenever the tokenizer would encode some text differently."""
        ...

    def encode(self, text: str) -> list[int]:
        """The ids of ``text``; special tokens in it are recognised, none is added."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids``, special tokens left out."""
        ...

    def token_to_id(self, token: str) -> int | None:
        """The id of one token, or None where the vocabulary does not have it."""
        ...


def open_tokenizer(given: object) -> Tokenizer:
    """A :class:`Tokenizer` from what a user has.

    Args:
        given: a path of a ``tokenizer.json`` or of the folder that holds it, a ``tokenizers.Tokenizer``, a Hugging
            Face tokenizer, or anything that already is a :class:`Tokenizer`.

    Raises:
        FileNotFoundError: the path holds no tokenizer.
        TypeError: it is none of these.
    """
    if isinstance(given, str | Path):
        return _from_file(Path(given))
    if isinstance(given, Tokenizer):
        return given
    if hasattr(given, "convert_tokens_to_ids"):
        return _HuggingFace(given)
    if hasattr(given, "to_str") and hasattr(given, "token_to_id"):
        return _Fast(given.to_str())
    raise TypeError(
        f"tokenizer is a {type(given).__name__}; give the path of a tokenizer.json, a tokenizers.Tokenizer, "
        "a Hugging Face tokenizer, or an object with encode, decode, token_to_id and fingerprint."
    )


def _from_file(path: Path) -> Tokenizer:
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(f"tokenizer: there is no file {file}; give the path of a tokenizer.json or its folder.")
    return _Fast(file.read_text(encoding="utf-8"), _end_token(file.with_name("tokenizer_config.json")))


def _end_token(config: Path) -> str | None:
    """The token that ends an answer, as the file beside a tokenizer says; None where it says nothing."""
    if not config.is_file():
        return None
    said = json.loads(config.read_text(encoding="utf-8")).get("eos_token")
    found: str | None = said.get("content") if isinstance(said, Mapping) else said
    return found


class AddedToken(NamedTuple):
    """A token that is looked for before all others: its id, and whether the tokenizer calls it special."""

    id: int
    special: bool


class AdaptedTokenizer:
    """A tokenizer of a package, of which more is known than `Tokenizer` says.

    Args:
        tokenizer: the package's.
        backend: the ``tokenizers.Tokenizer`` that does the work; None where none does.
        added: tokens that it looks for before all others, by their ids.
        unknown: the id of what the vocabulary lacks.

    Attributes:
        backend: the same.
        added_tokens: by their text.
        unknown: the same.
    """

    def __init__(self, tokenizer: Any, backend: Any, added: Mapping[int, Any], unknown: int | None) -> None:
        self._tokenizer = tokenizer
        self.backend = backend
        self.added_tokens = {str(token.content): AddedToken(number, token.special) for number, token in added.items()}
        self.unknown = unknown

    @cached_property
    def size(self) -> int:
        """One more than the highest id."""
        return 1 + max(self._tokenizer.get_vocab().values(), default=-1)


class _Fast(AdaptedTokenizer):
    """A tokenizer of the ``tokenizers`` package, from its JSON text, and the token that ends an answer."""

    def __init__(self, definition: str, end: str | None = None) -> None:
        try:
            import tokenizers
        except ImportError as error:
            raise ImportError(
                "Reading a tokenizer.json needs tokenizers; install it with: pip install 'flowtrain-lightning[data]'"
            ) from error
        tokenizer = tokenizers.Tokenizer.from_str(definition)
        # A tokenizer.json may carry these from another use; both would change sequences silently.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        super().__init__(tokenizer, tokenizer, tokenizer.get_added_tokens_decoder(), unknown_id(tokenizer))
        self.end = end
        definition = tokenizer.to_str()
        self.fingerprint = fingerprint(definition if end is None else [definition, end])

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def encode_whole(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def token_to_id(self, token: str) -> int | None:
        found: int | None = self._tokenizer.token_to_id(token)
        return found


class _HuggingFace(AdaptedTokenizer):
    """A tokenizer of the ``transformers`` package."""

    def __init__(self, tokenizer: Any) -> None:
        backend, added = getattr(tokenizer, "backend_tokenizer", None), getattr(tokenizer, "added_tokens_decoder", {})
        super().__init__(tokenizer, backend, added, tokenizer.unk_token_id)
        definition = backend.to_str() if backend is not None else sorted(tokenizer.get_vocab().items())
        self.end: str | None = getattr(tokenizer, "eos_token", None)
        self.fingerprint = fingerprint([type(tokenizer).__name__, definition, self.end])

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def encode_whole(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text))

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def token_to_id(self, token: str) -> int | None:
        found: int | None = self._tokenizer.convert_tokens_to_ids(token)
        unknown = found == self._tokenizer.unk_token_id and token != self._tokenizer.unk_token
        return None if unknown else found
