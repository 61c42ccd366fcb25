"""One sample as transformers computes it by itself: its own forward, its own masks, features that are given."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from flowtrain_lightning.data import Features, PackedBatch
from flowtrain_lightning.models.packed_attention import own_attention


def takes_features(model: Any) -> bool:
    """Whether the model's forward takes what an encoder gave: then it can be run beside the packed one."""
    return "mm_encoder_outputs" in inspect.signature(_whole(model).forward).parameters


def refuse_seeing_ahead(model: Any) -> None:
    """Refuses decoders in which tokens see those behind them, as Gemma 3's and PaliGemma's images: they need a mask.

    Such models are told by ``token_type_ids`` which tokens these are. One whose forward takes given features is run
    beside the packed one by the packing check, which sees what is lost.

    Raises:
        ValueError: the model is one.
    """
    if "token_type_ids" in inspect.signature(model.forward).parameters and not takes_features(model):
        raise ValueError(
            f"In {type(model).__name__} the tokens of an image see each other, whichever comes first. Packed attention "
            "has no mask for that, and training without it would be wrong without a word. Say which tokens see which: "
            "define pack_backbone and merge, as GemmaVLM does."
        )


def own_outputs(model: Any, text: Any, batch: PackedBatch, features: Features, positions: Tensor) -> Any:
    """The outputs of the whole model for one sequence; None where it takes no features, or these are several tensors.

    Args:
        model: of ``transformers``, for images and text.
        text: its text model, whose attention is packed.
        batch: one sequence.
        features: modality -> ``[rows, width]`` as they take the places of tokens.
        positions: what the packed text model gets as ``position_ids``.

    Raises:
        TypeError: the model's forward takes other features than these; says what it raises.
    """
    whole = _whole(model)
    known = inspect.signature(whole.forward).parameters
    if any(not isinstance(rows, Tensor) for rows in features.values()) or not takes_features(model):
        return None
    given: dict[str, Any] = {"input_ids": batch.tokens[None], "use_cache": False}
    inside = torch.zeros_like(batch.tokens)
    for places in batch.media_positions.values():
        inside[places] = 1
    given |= {name: inside[None] for name in ("token_type_ids", "mm_token_type_ids") if name in known}
    if positions.ndim > 2:  # of a rule of the model's own, which asks for sizes of images
        given["position_ids"] = positions
    elif features and "image_grid_thw" in known:  # else it counts images as text, where it has a rule for them
        given["image_grid_thw"] = _narrow_grids(inside, getattr(model.config.vision_config, "spatial_merge_size", 1))
    why: Exception | None = None
    with own_attention(text), _kept_activations(whole):
        for outputs in _forms(features):
            try:
                return whole(**given, **({"mm_encoder_outputs": outputs} if outputs else {}))
            except (TypeError, ValueError, RuntimeError, IndexError, AttributeError) as error:
                why = error  # families keep features in unlike forms
    assert why is not None
    if not features:
        raise why
    raise TypeError(
        f"{type(whole).__name__} does not take what encode gives as all features of an image: its own forward ends "
        f"with {type(why).__name__}: {why}. Return all that it hands to its decoder, as QwenVLM does with deepstack "
        "features, and place it in merge; where merge does that in a way of its own, define step_alone, which may "
        "return None."
    ) from why


def _narrow_grids(inside: Tensor, merge: int) -> Tensor:
    """``[images, 3]`` moments, height and width in patches of images that have as many rows, in one line.

    Args:
        inside: ``[tokens]`` 1 where a row of features is, else 0.
        merge: patches along each side of a row.
    """
    starts = (inside.diff(prepend=inside.new_zeros(1)) == 1).nonzero().flatten()
    ends = (inside.diff(append=inside.new_zeros(1)) == -1).nonzero().flatten() + 1
    rows = ends - starts
    return torch.stack([torch.ones_like(rows), torch.full_like(rows, merge), merge * rows], dim=1)


@contextmanager
def _kept_activations(model: Any) -> Iterator[None]:
    """Inside, nothing is left to be computed again in the backward, which would attend as the packed model does."""
    layers = [layer for layer in model.modules() if getattr(layer, "gradient_checkpointing", False)]
    for layer in layers:
        layer.gradient_checkpointing = False
    try:
        yield
    finally:
        for layer in layers:
            layer.gradient_checkpointing = True


def _whole(model: Any) -> Any:
    return getattr(model, "model", model)


def _forms(features: Features) -> Iterator[dict[str, Any]]:
    """Features in the forms in which families hand them on: rows, a tuple of rows, rows of one image."""
    from transformers.modeling_outputs import BaseModelOutputWithPooling

    if not features:
        yield {}
        return
    for form in (lambda rows: rows, lambda rows: (rows,), lambda rows: rows[None]):
        yield {name: BaseModelOutputWithPooling(pooler_output=form(rows)) for name, rows in features.items()}
