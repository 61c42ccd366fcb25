"""A model's config made small: the same classes, every kind of layer, windows shorter than what is packed."""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping, Sequence
from typing import Any

WINDOW = 24
"""Tokens that local layers of a twin see, and of its chunks: fewer than the samples have that it is checked with."""

VOCABULARY = 160
"""Tokens of a twin, the last `SPECIAL` of which are its special ones."""

SPECIAL = 48

_LAYERS = ("num_hidden_layers", "depth", "num_layers", "n_layers", "n_layer", "encoder_layers")
_FEWEST = 2
_MOST = 6
"""Layers of a half: as many as it has kinds of, within these bounds."""

_HEADS = ("num_attention_heads", "num_heads", "attention_heads", "encoder_attention_heads", "n_heads", "n_head")

_SIZES: Mapping[str, int] = {
    **dict.fromkeys(("projection_dim", "d_model", "n_embd", "mlp_dim", "model_dim", "hidden_dim"), 64),
    **dict.fromkeys(("intermediate_size_mlp", "adapter_hidden_dim", "encoder_ffn_dim", "output_dim"), 64),
    "downsample_hidden_size": 16,
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_intermediate_size"), 32),
    **dict.fromkeys(_HEADS, 4),
    **dict.fromkeys(("num_key_value_heads", "num_global_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "global_head_dim", "hidden_size_per_layer_input"), 16),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "top_k_experts"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts"), 1),
    **dict.fromkeys(("linear_num_key_heads",), 2),
    **dict.fromkeys(("linear_num_value_heads",), 4),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 16),
    "q_lora_rank": 32,
    **dict.fromkeys(("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 16),
    "qk_head_dim": 32,
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    "max_position_embeddings": 512,
    **dict.fromkeys(("sliding_window", "attention_chunk_size"), WINDOW),
}
"""Sizes of a twin by the names that configs have for them; whatever is smaller already stays."""

_WIDTH = 64
"""Of a twin, by any name that ends in one of `_WIDE`."""

_WIDE = ("hidden_size", "intermediate_size", "embed_dim")

_ALIKE = ("hidden_size", "projection_dim", "vocab_size")
"""Ends of names of sizes that parts of a model have in common, so that they are not kept where they are smaller."""

_TOKENS = ("_token_id", "_token_index", "_patch_id")
_LEAST_STATES = 3
"""Hidden states of a tower of the fewest layers, that before its first layer among them."""

_LISTS_OF_INDICES = ("deepstack_visual_indexes", "fullatt_block_indexes")
_PATCHES = 4
"""Patches on a side of a small image, where blocks of them that are merged fill it."""

_MERGED = ("scale_factor", "spatial_merge_size", "downsample_factor")
"""Names of patches on a side of a block that becomes one row of features."""


def twin_config(config: Any, *, small_images: bool = True) -> Any:
    """The config of a model of the same classes and kinds of layers, of some 100,000 weights.

    Geometry stays as it is: sides of patches, how many are merged, and what follows from that. Special tokens get ids
    within the small vocabulary.

    Args:
        config: of ``transformers``.
        small_images: a tower that takes images of one size takes smaller ones.

    Raises:
        Exception: whatever the config's class raises of numbers that do not fit each other.
    """
    given = copy.deepcopy(config.to_dict())
    small = _Shrinking(patches_on_a_side(given) if small_images else 0, _factors(given)).shrunk(given, "")
    for name in ("transformers_version", "architectures", "torch_dtype", "dtype", "_name_or_path"):
        small.pop(name, None)
    small.pop("model_type", None)
    _scale_pinpoints(small, given)
    made = type(config)(**small)
    _give_sections(made)
    # A module is given the config as a dictionary, of which some classes make other sizes.
    made = type(made)(**{name: value for name, value in made.to_dict().items() if name != "model_type"})
    made._experts_implementation = "eager"  # the others know no float64
    return made


def patches_on_a_side(config: Mapping[str, Any]) -> int:
    """Patches on a side of a twin's images, which whole blocks of merged patches fill.

    Args:
        config: of the model or of its twin, as a dictionary.
    """
    parts = (config, config.get("vision_config") or {})
    merged = next((part[name] for part in parts for name in _MERGED if isinstance(part.get(name), int)), 1)
    return _PATCHES if merged < 1 or _PATCHES % merged == 0 else 2 * merged


def _give_sections(config: Any) -> None:
    """Writes down the sections of M-RoPE, which some classes else take for those of a larger head."""
    from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    model = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(config), None)
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None)
    module = sys.modules.get(getattr(model, "__module__", ""))
    counts_in_three = any(hasattr(part, "get_rope_index") for part in vars(module).values()) if module else False
    if counts_in_three and isinstance(rope, dict) and rope:
        text.rope_parameters = _rotary(_with_sections(rope), text.to_dict())


def _with_sections(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of rotary positions, of one kind or of several kinds of layers, with sections of any size."""
    if "rope_type" in rope or not any(isinstance(value, Mapping) for value in rope.values()):
        return {"mrope_section": [1, 1, 0], **rope}
    return {kind: _with_sections(own) if isinstance(own, Mapping) else own for kind, own in rope.items()}


class _Shrinking:
    """One config on its way to a twin's; remembers which special token has become which."""

    def __init__(self, patches: int, factors: Mapping[int, int]) -> None:
        self._tokens: dict[int, int] = {}
        self._patches = patches  # on a side of an image of one size; 0: as it is
        self._factors = factors

    def shrunk(self, part: Mapping[str, Any], path: str) -> dict[str, Any]:
        """A config, or a part of it, at the path of its name."""
        found: dict[str, Any] = {}
        for name, value in part.items():
            found[name] = self._value(name, value, f"{path}.{name}") if isinstance(name, str) else value
        _cut_layers(found)
        _fit(found)
        if self._patches:
            _shrink_images(found, self._patches)
        return found

    def _value(self, name: str, value: Any, path: str) -> Any:
        if name.endswith(_TOKENS) and isinstance(value, int | list) and not isinstance(value, bool):
            return self._token(value)
        if name in ("rope_parameters", "rope_scaling") or not isinstance(value, Mapping):
            return self._small(name, value)
        return self.shrunk(value, path)

    def _small(self, name: str, value: Any) -> Any:
        if ("dropout" in name or "drop_path" in name) and isinstance(value, float):
            return 0.0
        limit = _SIZES.get(name, _WIDTH if name.endswith(_WIDE) else None)
        if limit is None or isinstance(value, bool):
            return value
        if isinstance(value, int | float):
            if name.endswith(_ALIKE):
                return limit * self._factors.get(int(value), 1)
            return min(int(value), limit) if value > 0 else value
        if isinstance(value, list) and value and all(isinstance(each, int) for each in value):
            return [min(each, limit) for each in value]
        return value

    def _token(self, token: Any) -> Any:
        if isinstance(token, list):
            return [self._token(each) for each in token]
        if token < 0:
            return token
        first = VOCABULARY - SPECIAL
        return self._tokens.setdefault(token, first + len(self._tokens) % SPECIAL)


def _factors(config: Mapping[str, Any]) -> dict[int, int]:
    """Widths of merged patches, and how many rows of the tower's width they are."""
    text, vision = (config.get(name) or {} for name in ("text_config", "vision_config"))
    width, merge = vision.get("hidden_size"), vision.get("merge_size") or vision.get("spatial_merge_size")
    if not isinstance(width, int) or not isinstance(merge, int) or width * merge**2 == text.get("hidden_size"):
        return {}
    return {width * merge**2: merge**2}


def _cut_layers(part: dict[str, Any]) -> None:
    """Keeps one layer of each kind, in place; lists with an entry for every layer keep those of the same layers."""
    name = next((each for each in _LAYERS if isinstance(part.get(each), int)), None)
    if name is None or part[name] <= _FEWEST:
        return
    layers = part[name]
    lists = {
        key: value
        for key, value in part.items()
        if isinstance(value, list) and len(value) == layers and key not in _LISTS_OF_INDICES
    }
    shared = part.get("num_kv_shared_layers") or 0  # the last ones, which have keys and values of layers before
    kinds: list[Sequence[object]] = [*lists.values()]
    if shared:
        kinds.append([number < layers - shared for number in range(layers)])
    kept = _kept_layers(layers, list(zip(*(map(str, value) for value in kinds), strict=True)))
    for key, value in lists.items():
        part[key] = [value[number] for number in kept]
    part[name] = len(kept)
    if shared:
        part["num_kv_shared_layers"] = sum(number >= layers - shared for number in kept)
    for key in ("first_k_dense_replace", "full_attention_interval"):
        if isinstance(part.get(key), int):
            part[key] = min(part[key], 1 if key == "first_k_dense_replace" else len(kept))
    if isinstance(part.get("per_layer_config"), Mapping):
        own = {str(number): value for number, value in part["per_layer_config"].items()}
        part["per_layer_config"] = {
            at: own[str(number)] for at, number in enumerate(kept) if str(number) in own
        } or None
    for key in _LISTS_OF_INDICES:
        if isinstance(part.get(key), list):
            part[key] = list(range(min(len(part[key]), len(kept)))) if "deepstack" in key else [len(kept) - 1]


def _kept_layers(layers: int, kinds: Sequence[object]) -> list[int]:
    """Numbers of layers of every kind, in order; more of them where there are too few kinds."""
    first: dict[object, int] = {}
    for number, kind in enumerate(kinds):
        first.setdefault(kind, number)
    kept = set(list(first.values())[:_MOST])
    wanted = max(_FEWEST, min(4, layers)) if not kinds else max(_FEWEST, len(kept))
    for number in range(layers):
        if len(kept) >= wanted:
            break
        kept.add(number)
    return sorted(kept)


def _fit(part: dict[str, Any]) -> None:
    """Fits numbers to others of the same part, in place."""
    if "kv_lora_rank" in part and "num_attention_heads" in part:
        part["num_key_value_heads"] = part["num_attention_heads"]
    for name in _HEADS:
        if part.get(name) == 3:  # which divide no width of a twin
            part[name] = 2
    for name in ("vision_feature_layer", "vision_feature_layers"):
        layers = part.get(name)
        if isinstance(layers, list | tuple):
            part[name] = [-1 - number % 4 for number in range(len(layers))]
        elif isinstance(layers, int) and not -_LEAST_STATES <= layers < _LEAST_STATES:
            part[name] = -2
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(part.get(name), dict):
            part[name] = _rotary(part[name], part)


def _shrink_images(part: dict[str, Any], patches: int) -> None:
    patch = part.get("patch_size")
    side = patch[0] if isinstance(patch, list | tuple) and patch else patch
    if isinstance(side, int) and "image_size" in part:
        size, small = part["image_size"], patches * side
        part["image_size"] = [small] * len(size) if isinstance(size, list | tuple) else small
    for name in ("image_seq_length", "mm_tokens_per_image"):
        if isinstance(part.get(name), int):
            part[name] = 4
    if "global_attn_indexes" in part and isinstance(part.get("window_size"), int):  # in patches
        part["window_size"] = min(part["window_size"], patches // 2)
    if isinstance(part.get("projector_patch_to_query_dict"), Mapping):
        part["projector_patch_to_query_dict"] = {patches**2: 4}


def _scale_pinpoints(small: dict[str, Any], given: Mapping[str, Any]) -> None:
    """Sizes of pictures that are cut into tiles, in place: as many tiles of the tower's smaller size."""
    before, after = (_image_size(config) for config in (given, small))
    if before and after and isinstance(given.get("image_grid_pinpoints"), list):
        points = given["image_grid_pinpoints"]
        small["image_grid_pinpoints"] = [[side * after // before for side in point] for point in points]


def _image_size(config: Mapping[str, Any]) -> int:
    size = (config.get("vision_config") or {}).get("image_size")
    return size if isinstance(size, int) else 0


def _rotary(rope: Mapping[str, Any], part: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of rotary positions, whose sections and factors fill half of a smaller head."""
    found: dict[str, Any] = {}
    share = rope.get("partial_rotary_factor", part.get("partial_rotary_factor")) or 1.0
    half = int(_head(part) * share) // 2
    for name, value in rope.items():
        if name == "mrope_section" and isinstance(value, list) and len(value) == 3:
            found[name] = _sections(value, half)
        elif name in ("short_factor", "long_factor") and isinstance(value, list) and value:  # one for each frequency
            found[name] = [value[number % len(value)] for number in range(half)]
        elif isinstance(value, Mapping):
            found[name] = _rotary(value, part)
        else:
            found[name] = value
    return found


def _sections(given: Sequence[int], half: int) -> list[int]:
    """Sections of half a head for time, height and width, in the order given; those that are equal stay equal."""
    odd = next((number for number in (0, 2, 1) if len({*given[:number], *given[number + 1 :]}) == 1), 0)
    equal = (half - max(1, half // 4)) // 2
    return [half - 2 * equal if number == odd else equal for number in range(3)]


def _head(part: Mapping[str, Any]) -> int:
    return int(part.get("head_dim") or part.get("hidden_size", 64) // part.get("num_attention_heads", 4))
