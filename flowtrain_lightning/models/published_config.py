"""Reads what a name or folder of Hugging Face says of its model. No code that comes with a model runs."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flowtrain_lightning.models.untrainable import told_as

_QUANTIZED = ("quantization_config", "compression_config")


_IMAGE_TOKENS = ("image_token_id", "image_token_index", "media_placeholder_token_id", "image_patch_id", "im_patch_id")


_PUBLISHED_TOKENS = {
    "qwen2_5_omni_thinker": {"vision_start_token_id": 151_652, "vision_end_token_id": 151_653},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 151_652, "vision_end_token_id": 151_653},
}
"""Tokens that published configs of a family name and its usual one does not, though its code asks for them."""


def image_token_id(config: Any) -> int:
    """The token that stands for a row of features of an image, by whichever name a config has for it.

    Raises:
        ValueError: it has none.
    """
    for name in _IMAGE_TOKENS:
        if isinstance(found := getattr(config, name, None), int):
            return found
    raise ValueError(
        f"The config of type {config.model_type!r} names no token that stands for rows of features of an image "
        f"({', '.join(_IMAGE_TOKENS)})."
    )


def image_ends(config: Any) -> tuple[int, ...]:
    """The tokens that begin and end an image, of a config that names both."""
    for begin, end in (
        ("vision_start_token_id", "vision_end_token_id"),
        ("image_start_token_id", "image_end_token_id"),
    ):
        tokens = getattr(config, begin, None), getattr(config, end, None)
        if all(isinstance(token, int) for token in tokens):
            return tuple(int(token) for token in tokens if token is not None)
    return ()


def audio_token_id(config: Any) -> int | None:
    """The token that stands for a row of features of audio; None of a config that names none."""
    found = getattr(config, "audio_token_id", None)
    return found if isinstance(found, int) else None


def audio_ends(config: Any) -> tuple[int, ...]:
    """The tokens that begin and end a clip of audio, of a config that names both."""
    tokens = (getattr(config, f"audio_{end}_token_id", None) for end in ("start", "end"))
    found = tuple(token for token in tokens if isinstance(token, int))
    return found if len(found) == 2 else ()


def usual_config(family: str) -> Any:
    """The config that ``transformers`` makes of a family by itself, with a tower and a token for images.

    Args:
        family: the ``model_type``.

    Raises:
        UntrainableError: it makes none.
    """
    from transformers import CONFIG_MAPPING

    kind = CONFIG_MAPPING[family]
    with told_as(f"transformers makes no usual config of {family}, so that a published model's folder is needed"):
        config = kind()
        if getattr(config, "vision_config", config) is None:  # of a class whose models may have none
            config = kind(vision_config={})
    for name, token in _PUBLISHED_TOKENS.get(family, {}).items():
        setattr(config, name, token)
    tokens = {name: getattr(config, name) for name in _IMAGE_TOKENS if hasattr(config, name)}
    if tokens and all(token is None for token in tokens.values()):
        setattr(config, next(iter(tokens)), config.get_text_config().vocab_size - 1)
    return config


def read_settings(model: str | Path) -> dict[str, Any]:
    """The config.json of a name or folder, as plain data.

    Raises:
        ImportError: transformers is not installed.
        ValueError: there is no such model, or its config.json cannot be read or names no ``model_type``.
    """
    refuse_missing_library()
    from transformers import PretrainedConfig

    refuse_missing_folder(model)
    try:
        settings: dict[str, Any] = PretrainedConfig.get_config_dict(model)[0]
    except OSError as error:
        if Path(model).is_dir():
            raise ValueError(f"The folder {model} has no config.json that can be read: {error}") from error
        raise ValueError(
            f"No model {str(model)!r} was found: {Path.cwd()} has no such folder, and the Hugging Face Hub gave none "
            f"({str(error).splitlines()[0]}) Check the spelling, the connection and the token of a private model."
        ) from error
    if Path(model).is_dir() and not (Path(model) / "config.json").is_file():
        raise ValueError(f"The folder {model} has no config.json; give the folder of a model of Hugging Face.")
    if not settings.get("model_type"):
        raise ValueError(f"The config.json of {model} names no model_type, so it is unknown which family it is of.")
    return settings


def read_config(model: str | Path | Mapping[str, Any] | Any) -> Any:
    """The ``transformers`` config of what a user gave.

    Raises:
        ImportError: transformers is not installed.
        TypeError: it is a model, or something else of which no config is known.
        ValueError: there is no such model, ``transformers`` does not know its family, or its weights are quantized.
    """
    refuse_missing_library()
    from transformers import AutoConfig, PretrainedConfig

    if isinstance(model, str | Path):
        settings = read_settings(model)
        _refuse_quantized(settings, str(model))
        with without_foreign_code(model):
            return AutoConfig.from_pretrained(model, trust_remote_code=False)
    if isinstance(model, Mapping):
        if "model_type" not in model:
            raise ValueError("The config that was given as a dictionary has no 'model_type', such as 'qwen2_5_vl'.")
        _refuse_quantized(model, "The config")
        return AutoConfig.for_model(**model)
    if not isinstance(model, PretrainedConfig):
        raise TypeError(
            f"The model is given as a {type(model).__name__}, but every rank builds its own part of it. Give the name "
            "or folder that it was loaded from (model.save_pretrained(folder) writes one), or, to begin from random "
            "weights, its config (model.config)."
        )
    _refuse_quantized(model.to_dict(), "The config")
    return model


@contextmanager
def without_foreign_code(model: str | Path) -> Iterator[None]:
    """Inside, ``transformers`` opens something of a model; what only code of the model's own could open is refused.

    Raises:
        ValueError: the model brings code, or ``transformers`` does not know its family.
    """
    try:
        yield
    except ValueError as error:
        if "trust_remote_code" in str(error) or "custom code" in str(error):
            raise ValueError(
                f"{model} can only be opened by Python code that comes with it (auto_map), which flowtrain never runs. "
                "Take a model of which transformers itself has the code; parts that data need can be given one by one: "
                "FlowDataModule(tokenizer=..., template=..., images=...)."
            ) from error
        raise


def refuse_missing_library() -> None:
    """Raises where ``transformers`` is not installed.

    Raises:
        ImportError: says how to install it.
    """
    try:
        import transformers  # noqa: F401
    except ModuleNotFoundError as error:
        raise ImportError(
            "Models of Hugging Face need transformers; install it with: pip install 'flowtrain-lightning[transformers]'"
        ) from error


def refuse_missing_folder(model: str | Path) -> None:
    """Refuses what can only be a folder and is not there, of which transformers says that it is no name on the Hub.

    Raises:
        ValueError: names the folder.
    """
    if (isinstance(model, Path) or model.startswith(("/", ".", "~"))) and not Path(model).is_dir():
        raise ValueError(
            f"There is no folder {model}; give the folder of a model, or its name on the Hugging Face Hub."
        )


def _refuse_quantized(settings: Mapping[str, Any], name: str) -> None:
    """Refuses weights of a few bits, whichever part of the model has them: they would train wrongly, or not at all."""
    for part, value in settings.items():
        if part in _QUANTIZED and value:
            method = (value.get("quant_method") if isinstance(value, Mapping) else None) or "unknown"
            raise ValueError(
                f"{name} has quantized weights ({part} with quant_method {method!r}), which are not trained here. Give "
                "the model that it was made from, in bfloat16 or float32; to save memory freeze it and train adapters: "
                "adapters=LoraConfig(...), frozen_in_bf16=True."
            )
        if isinstance(value, Mapping):
            _refuse_quantized(value, name)


def read_generation(source: str | Path) -> dict[str, Any] | None:
    """Reads the settings of ``generate`` in a name or folder, if there are any."""
    from transformers import GenerationConfig

    try:
        said: dict[str, Any] = GenerationConfig.from_pretrained(source).to_diff_dict()
    except OSError:
        return None
    return said


def end_token(config: Any, generation: Mapping[str, Any] | None) -> int | tuple[int, ...] | None:
    """The token with which a model ends, or all of them: Gemma 3 ends a text by one and a turn by another."""
    ends: int | list[int] | None = (generation or {}).get(
        "eos_token_id", getattr(config.get_text_config(), "eos_token_id", None)
    )
    return tuple(ends) if isinstance(ends, list) else ends


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
