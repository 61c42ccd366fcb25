"""Reads what a name or folder of Hugging Face says of its model."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def image_token_id(config: Any) -> int:
    """The token that stands for a row of features of an image, by either name that configs have for it."""
    found: int | None = getattr(config, "image_token_id", None)
    return int(config.image_token_index) if found is None else found


def read_config(model: str | Path | Mapping[str, Any] | Any) -> Any:
    """The ``transformers`` config of what a user gave.

    Raises:
        ImportError: transformers is not installed.
    """
    try:
        from transformers import AutoConfig
    except ModuleNotFoundError as error:
        raise ImportError(
            "Models of Hugging Face need transformers; install it with: pip install 'flowtrain-lightning[transformers]'"
        ) from error
    if isinstance(model, str | Path):
        return AutoConfig.from_pretrained(model)
    return AutoConfig.for_model(**model) if isinstance(model, Mapping) else model


def read_generation(source: str | Path) -> dict[str, Any] | None:
    """What a name or folder says of ``generate``, if it does."""
    from transformers import GenerationConfig

    try:
        said: dict[str, Any] = GenerationConfig.from_pretrained(source).to_diff_dict()
    except OSError:
        return None
    return said


def end_token(config: Any, generation: Mapping[str, Any] | None) -> int | None:
    """The token with which a model ends, the first where it has several."""
    ends: int | list[int] | None = (generation or {}).get("eos_token_id", config.get_text_config().eos_token_id)
    return ends[0] if isinstance(ends, list) else ends


@contextmanager
def read_in_this_thread() -> Iterator[None]:
    """Inside, ``transformers`` reads weights in the calling thread, where a rank that needs parts can put it off."""
    name = "HF_DEACTIVATE_ASYNC_LOAD"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
