"""Modules described by the config dict of a Hugging Face model (the content of its ``config.json``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from flowtrain_lightning.allocator.description import Half, ModuleDescription
from flowtrain_lightning.allocator.dimensions import audio_encoder, backbone, generator, vision_encoder
from flowtrain_lightning.allocator.other_text_models import OTHER_TEXT_MODELS
from flowtrain_lightning.allocator.role_layout import PlanningError
from flowtrain_lightning.packing.role_graph import GENERATED

Config = Mapping[str, Any]

_PARTS: tuple[tuple[str, Any, str], ...] = (
    ("_config", Mapping, "a part with fields of its own"),
    ("_indexes", list | tuple, "a list of layers"),
)
"""How names of fields end that hold no number, what they hold, and how it is called."""

_SIDES = ("image_size", "patch_size")
"""Fields that may hold a number for each side."""

_SETTINGS = ("quantization_config", "generation_config", "compression_config", "task_specific_params")
"""Fields of a config that describe no part of the model though they are called so."""

_PLAIN_PERCEPTRONS = (
    *("opt", "gpt_neox", "phi", "starcoder2", "falcon", "bloom"),
    *("apertus", "arcee", "jais2", "nanochat", "persimmon"),
)
"""Types of decoders whose feed-forward network has two matrices."""

_OTHER_EXPERTS = ("n_routed_experts", "moe_num_experts")
"""Fields that count experts where not all layers have them, or where shared ones are beside them."""

_NORMS: dict[str, dict[str, Any]] = {
    "qwen3": {"heads": True},
    "gemma3": {"count": 4, "heads": True, "in_float32": True},
    "gemma2": {"count": 4, "in_float32": True},
    "gemma": {"in_float32": True},
}
"""How types of decoders begin -> fields of their `Norms`; the first that fits counts."""

_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "vocab_size": 32000,
    },
    "qwen2": {
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "vocab_size": 151936,
    },
    "gemma3_text": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262208,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "tie_word_embeddings": True,
    },
    "qwen2_vl_vision": {"in_channels": 3, "temporal_patch_size": 2, "spatial_merge_size": 2, "mlp_ratio": 4},
    "qwen2_5_vl_vision": {
        "depth": 32,
        "intermediate_size": 3420,
        "num_heads": 16,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
    },
    "clip_vision_model": {"image_size": 224, "patch_size": 32},
    "qwen2_5_omni_audio_encoder": {
        "encoder_layers": 32,
        "d_model": 1280,
        "encoder_ffn_dim": 5120,
        "encoder_attention_heads": 20,
        "num_mel_bins": 128,
        "n_window": 100,
    },
}
"""Entries that a published config may leave out: transformers' defaults of that ``model_type``."""


def describe_config(config: Config, name: str | None = None) -> ModuleDescription:
    """The module that a Hugging Face config describes.

    Args:
        config: what ``config.json`` holds, or ``config.to_dict()``.
        name: what to call it; None is the ``model_type``.

    Raises:
        PlanningError: the ``model_type`` is not known, or a field is missing or no number above 0.
    """
    config = config.get("thinker_config") or config  # of an omni model, what hears and sees; no voice
    kind = str(config.get("model_type"))
    if kind not in _FAMILIES and not _reads_text_alone(config):
        raise PlanningError(
            f"A config of model_type {kind!r} cannot be read; known are {', '.join(_FAMILIES)}, and decoders of text "
            "in Llama's form. Give the module's dimensions instead (see docs/planning.md)."
        )
    reader = _backbone(config)
    encoders = _FAMILIES[kind](config) if kind in _FAMILIES else {}
    return ModuleDescription(name or kind, encoders, reader, _generators(config))


def _generators(config: Config) -> dict[str, Half]:
    """What generates, in the words of a diffusion transformer's config in diffusers; nothing without one."""
    if (drawer := config.get("generator_config")) is None:
        return {}
    heads, size = _field(drawer, "num_attention_heads"), _field(drawer, "attention_head_dim")
    half = generator(
        layers=_field(drawer, "num_layers"),
        hidden=heads * size,
        feed_forward=round(heads * size * _field(drawer, "mlp_ratio")),
        heads=heads,
        numbers=_field(drawer, "in_channels") * _field(drawer, "patch_size") ** 2,
        condition=_field(_text(config), "hidden_size"),
        rows=_field(config, "num_queries"),
        gated=True,
        crosses="num_cross_attention_heads" in drawer,
    )
    return {GENERATED: half}


def _reads_text_alone(config: Config) -> bool:
    """Whether a config is of a decoder whose layers have the matrices of Llama's, and nothing else is beside it."""
    needed = {"num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size"}
    other = any(name.endswith("_config") and value for name, value in config.items() if name not in _SETTINGS)
    other = other or config.get("model_type") in OTHER_TEXT_MODELS or any(config.get(name) for name in _OTHER_EXPERTS)
    return needed <= {*config} and not other and config.get("kv_lora_rank") is None


def _field(config: Config, *names: str) -> Any:
    """The first of several fields that a config or its type's defaults have."""
    defaults = _DEFAULTS.get(str(config.get("model_type")), {})
    for source in (config, defaults):
        for name in names:
            if source.get(name) is not None:
                return _checked(source[name], name)
    raise PlanningError(
        f"The config of {config.get('model_type', 'a part without model_type')!r} has no field "
        f"{' or '.join(map(repr, names))}; use the whole config.json of the model."
    )


def _optional(config: Config, name: str) -> Any:
    value = config.get(name, _DEFAULTS.get(str(config.get("model_type")), {}).get(name))
    return value if value is None or isinstance(value, bool) else _checked(value, name)


def _checked(value: Any, name: str) -> Any:
    """A number that can be calculated with, or a part of the config."""
    for end, kind, what in _PARTS:
        if name.endswith(end):
            if not isinstance(value, kind):
                raise PlanningError(f"The config's {name} is {value!r}; it must be {what}.")
            return value
    for number in value if isinstance(value, list | tuple) and value and name in _SIDES else (value,):
        is_number = isinstance(number, int | float) and not isinstance(number, bool)
        if not is_number or number <= 0 or (number % 1 and not name.endswith("_ratio")):
            what = "a number" if name.endswith("_ratio") else "a whole number"
            raise PlanningError(f"The config's {name} is {value!r}; it must be {what} above 0.")
    return value


def _text(config: Config) -> Config:
    """The backbone's fields: a part of their own, or (in older files) at the top."""
    text: Config = _checked(config["text_config"], "text_config") if config.get("text_config") else config
    return text


def _backbone(config: Config) -> Half:
    text = _text(config)
    layers, hidden = _field(text, "num_hidden_layers"), _field(text, "hidden_size")
    windows = _windows(text, layers)
    tied = config.get("tie_word_embeddings", _optional(text, "tie_word_embeddings"))
    experts = None
    if (count := text.get("num_experts") or text.get("num_local_experts")) is not None:
        if text.get("mlp_only_layers") or (text.get("decoder_sparse_step") or 1) != 1:
            raise PlanningError(
                "The config has experts in some layers only (mlp_only_layers, decoder_sparse_step), and a mixture is "
                "planned with experts in all of them. Give the module's dimensions instead (see docs/planning.md)."
            )
        experts = {
            "count": count,
            "chosen": _field(text, "num_experts_per_tok"),
            "feed_forward": _field(text, "moe_intermediate_size", "intermediate_size"),
        }
    return backbone(
        layers=layers,
        hidden=hidden,
        feed_forward=_field(text, "intermediate_size", "moe_intermediate_size"),
        heads=_field(text, "num_attention_heads"),
        key_value_heads=_optional(text, "num_key_value_heads"),
        head_size=_optional(text, "head_dim"),
        vocabulary=_field(text, "vocab_size"),
        tied=bool(tied),
        gated=text.get("model_type") not in _PLAIN_PERCEPTRONS,
        experts=experts,
        queries=config.get("num_queries", 0),
        norms=next((norms for begin, norms in _NORMS.items() if str(text.get("model_type")).startswith(begin)), None),
        **windows,
    )


def _windows(text: Config, layers: int) -> dict[str, Any]:
    window = _optional(text, "sliding_window")
    if not window or text.get("use_sliding_window") is False:
        return {}
    if kinds := text.get("layer_types"):
        return {"window": window, "full_layers": sum(kind == "full_attention" for kind in kinds)}
    pattern = text.get("_sliding_window_pattern") or _optional(text, "sliding_window_pattern")
    return {"window": window, "full_layers": layers // pattern} if pattern else {}


def _qwen2_vl(config: Config) -> dict[str, Half]:
    vision = {"model_type": "qwen2_vl_vision", **_field(config, "vision_config")}
    width, merge = _field(vision, "embed_dim"), _field(vision, "spatial_merge_size")
    return {"image": _qwen(vision, width, width * _field(vision, "mlp_ratio"), _field(vision, "hidden_size"), merge)}


def _qwen2_5_vl(config: Config) -> dict[str, Half]:
    vision = {"model_type": "qwen2_5_vl_vision", **_field(config, "vision_config")}
    width, merge = _field(vision, "hidden_size"), _field(vision, "spatial_merge_size")
    side = _field(vision, "window_size") // _side(vision, "patch_size")
    windows = {"window": side * side, "full_layers": len(_field(vision, "fullatt_block_indexes"))}
    inner = _field(vision, "intermediate_size")
    return {"image": _qwen(vision, width, inner, _field(vision, "out_hidden_size"), merge, gated=True, **windows)}


def _qwen3_vl(config: Config) -> dict[str, Half]:
    vision = {"model_type": "qwen3_vl_vision", **_field(config, "vision_config")}
    width, merge = _field(vision, "hidden_size"), _field(vision, "spatial_merge_size")
    levels = 1 + len(_field(vision, "deepstack_visual_indexes"))
    positions = _field(vision, "num_position_embeddings")
    inner = _field(vision, "intermediate_size")
    output = _field(vision, "out_hidden_size")
    return {"image": _qwen(vision, width, inner, output, merge, levels=levels, positions=positions)}


def _qwen(vision: Config, width: int, feed_forward: int, output: int, merge: int, **more: Any) -> Half:
    return vision_encoder(
        layers=_field(vision, "depth"),
        hidden=width,
        feed_forward=feed_forward,
        heads=_field(vision, "num_heads"),
        patch=_side(vision, "patch_size"),
        frames=_field(vision, "temporal_patch_size"),
        merge=merge,
        projector_width=merge * merge * width,
        output=output,
        fused=True,
        **more,
    )


def _llava(config: Config) -> dict[str, Half]:
    output = _field(_text(config), "hidden_size")
    return {"image": _plain_vision(config, output, 1, projector_width=output, extra_tokens=1)}


def _internvl(config: Config) -> dict[str, Half]:
    output = _field(_text(config), "hidden_size")
    merge = round(1 / (_optional(config, "downsample_ratio") or 0.5))
    return {"image": _plain_vision(config, output, merge, projector_width=output, extra_tokens=1)}


def _llava_onevision(config: Config) -> dict[str, Half]:
    output = _field(_text(config), "hidden_size")
    return {"image": _plain_vision(config, output, 1, projector_width=output)}


def _smolvlm(config: Config) -> dict[str, Half]:
    return {"image": _plain_vision(config, _field(_text(config), "hidden_size"), _field(config, "scale_factor"))}


def _gemma3(config: Config) -> dict[str, Half]:
    vision = _field(config, "vision_config")
    patches = (_side(vision, "image_size") // _side(vision, "patch_size")) ** 2
    merge = round((patches / _field(config, "mm_tokens_per_image")) ** 0.5)
    return {"image": _plain_vision(config, _field(_text(config), "hidden_size"), merge, pooled=True)}


def _plain_vision(config: Config, output: int, merge: int, **more: Any) -> Half:
    """A tower of pictures of one size, as CLIP's and SigLIP's."""
    vision = _field(config, "vision_config")
    side, patch = _side(vision, "image_size"), _side(vision, "patch_size")
    return vision_encoder(
        layers=_field(vision, "num_hidden_layers"),
        hidden=_field(vision, "hidden_size"),
        feed_forward=_field(vision, "intermediate_size"),
        heads=_field(vision, "num_attention_heads"),
        patch=patch,
        merge=merge,
        output=output,
        positions=(side // patch) ** 2,
        unused_layers=_unused_layers(config),
        **more,
    )


def _unused_layers(config: Config) -> int:
    """Layers after the one whose output becomes features: LLaVA reads the last but one, yet computes the last."""
    layer = config.get("vision_feature_layer", -1)
    return -layer - 1 if isinstance(layer, int) and layer < 0 else 0


def _side(vision: Config, name: str) -> int:
    """Pixels along a side; some configs give height and width."""
    size = _field(vision, name)
    return int(size[0] if isinstance(size, (list, tuple)) else size)


def _qwen2_audio(config: Config) -> dict[str, Half]:
    audio, output = _field(config, "audio_config"), _field(_text(config), "hidden_size")
    return {"audio": _whisper(audio, output, positions=_field(audio, "max_source_positions"))}


def _qwen2_5_omni_thinker(config: Config) -> dict[str, Half]:
    audio = {"model_type": "qwen2_5_omni_audio_encoder", **_field(config, "audio_config")}
    heard = _whisper(audio, _field(_text(config), "hidden_size"), window=_field(audio, "n_window"))
    return {**_qwen2_5_vl(config), "audio": heard}


def _whisper(audio: Config, output: int, **more: Any) -> Half:
    return audio_encoder(
        layers=_field(audio, "encoder_layers"),
        hidden=_field(audio, "d_model"),
        feed_forward=_field(audio, "encoder_ffn_dim"),
        heads=_field(audio, "encoder_attention_heads"),
        bins=_field(audio, "num_mel_bins"),
        output=output,
        **more,
    )


_FAMILIES: dict[str, Callable[[Config], dict[str, Half]]] = {
    "qwen2_vl": _qwen2_vl,
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen3_vl": _qwen3_vl,
    "qwen3_vl_moe": _qwen3_vl,
    "llava": _llava,
    "llava_onevision": _llava_onevision,
    "internvl": _internvl,
    "smolvlm": _smolvlm,
    "idefics3": _smolvlm,
    "gemma3": _gemma3,
    "qwen2_audio": _qwen2_audio,
    "qwen2_5_omni_thinker": _qwen2_5_omni_thinker,
}

READ = frozenset(_FAMILIES)
"""``model_type`` of the models of images or audio whose configs are read here."""
