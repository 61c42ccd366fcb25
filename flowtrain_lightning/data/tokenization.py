"""Tokenizers: the protocol that data need, and adapters for those that people have."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from flowtrain_lightning.data.fingerprint import fingerprint


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
    return _Fast(file.read_text(encoding="utf-8"))


class _Fast:
    """A tokenizer of the ``tokenizers`` package, from its JSON text."""

    def __init__(self, definition: str) -> None:
        try:
            import tokenizers
        except ImportError as error:
            raise ImportError(
                "Reading a tokenizer.json needs tokenizers; install it with: pip install 'flowtrain-lightning[data]'"
            ) from error
        self._tokenizer: Any = tokenizers.Tokenizer.from_str(definition)
        # A tokenizer.json may carry these from another use; both would change sequences silently.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.fingerprint = fingerprint(self._tokenizer.to_str())

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


class _HuggingFace:
    """A tokenizer of the ``transformers`` package."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
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
