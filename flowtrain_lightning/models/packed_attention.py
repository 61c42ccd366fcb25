"""Attention over packed sequences inside a Hugging Face model, by its own registry of attention functions."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from flowtrain_lightning.attention import varlen_attention
from flowtrain_lightning.data import PackedBatch
from flowtrain_lightning.models.packed_scans import pack_scans

NAME = "flowtrain"
"""The function's name in ``transformers``, like ``"sdpa"``."""


def pack_attention(model: Any) -> None:
    """Lets a Hugging Face model, such as a text model or a vision tower, attend within packed sequences only.

    Its forward then takes a batch of one, in which the sequences lie one after another, with the arguments of
    `sequence_bounds`, and builds no mask: work and memory grow with the tokens, not with their square. A vision tower
    whose own forward passes ``cu_seqlens`` of its images to its layers, as Qwen's, computes all of them at once.

    Scans and short convolutions beside attention begin anew in every sequence, too.

    For decoders in which a token sees those before it, and encoders in which it sees all. What lets tokens of an image
    see each other in a decoder, as Gemma 3 does, is a mask and would be lost.

    Args:
        model: a ``transformers.PreTrainedModel``.

    Raises:
        TypeError: its attention cannot be chosen.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, _packed_attention)
    model.set_attn_implementation(NAME)
    if not _is_packed(model.config):  # it has only warned, and would mix up sequences
        raise TypeError(
            f"The attention of {type(model).__name__} cannot be chosen (transformers says so in a warning), so it "
            "cannot keep packed sequences apart. Take a model whose attention goes through "
            "transformers.AttentionInterface."
        )
    for module in model.modules():
        if hasattr(module, "is_causal") and "cu_seqlens" in inspect.signature(module.forward).parameters:
            module.register_forward_pre_hook(_keep_whole, with_kwargs=True)
    pack_scans(model)


@contextmanager
def own_attention(model: Any) -> Iterator[None]:
    """Inside, a packed model attends by PyTorch's own attention, which takes masks and a cache."""
    model.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        model.set_attn_implementation(NAME)


def refuse_attention_dropout(decoder: Any) -> None:
    """Refuses a decoder that drops scores while it trains, before its first step.

    Args:
        decoder: its config.

    Raises:
        ValueError: says what to set.
    """
    if rate := getattr(decoder, "attention_dropout", 0.0):
        raise ValueError(
            f"The model's config has attention_dropout={rate}, which packed attention does not have. Set "
            "text_config.attention_dropout to 0, or take a model without."
        )


def sequence_bounds(batch: PackedBatch) -> dict[str, Tensor | int]:
    """Bounds of a microbatch's sequences, as keyword arguments of a Hugging Face model's forward."""
    return {
        "cu_seq_lens_q": batch.cu_seqlens,
        "cu_seq_lens_k": batch.cu_seqlens,
        "max_length_q": batch.max_seqlen,
        "max_length_k": batch.max_seqlen,
    }


def _packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """An attention function as ``transformers`` calls it.

    Args:
        module: the calling attention layer.
        query: ``[1, heads, tokens, head_dim]``.
        key: ``[1, key_heads, tokens, head_dim]``.
        value: ``[1, key_heads, tokens, head_dim]``.
        attention_mask: None, since no function for masks is registered under this name.
        scaling: factor of the scores; None is ``head_dim ** -0.5``.
        dropout: of the scores; only 0 is supported.
        is_causal: None asks the layer.
        sliding_window: how far back a token sees.
        cu_seq_lens_q: ``[sequences + 1]`` int32, where each sequence begins and ends.
        max_length_q: tokens of the longest sequence, or more.
        others: what concerns other attention functions.

    Returns:
        ``[1, tokens, heads, head_dim]``, and no scores.
    """
    layer = type(module).__name__
    if cu_seq_lens_q is None or max_length_q is None:
        raise ValueError(
            f"{layer} was not told where the packed sequences begin and end. Pass **sequence_bounds(batch) to the "
            "model's forward; to use the model otherwise, call model.set_attn_implementation('sdpa') before."
        )
    if sliding_window is not None and max_length_q > sliding_window:
        raise ValueError(
            f"{layer} sees {sliding_window} tokens back, but a sequence of {max_length_q} tokens came, and packed "
            "attention has no sliding window. Keep samples shorter: FlowDataModule(token_budget=...)."
        )
    unknown = [name for name in ("softcap", "s_aux", "position_bias") if others.get(name) is not None]
    if dropout or unknown:
        named = ", ".join([*unknown, *(["dropout"] if dropout else [])])
        raise ValueError(
            f"{layer} uses {named}, which packed attention does not have. Set attention_dropout=0 in the model's "
            "config, or take a model without."
        )
    causal = bool(getattr(module, "is_causal", True)) if is_causal is None else is_causal
    if scaling is not None and abs(scaling * query.shape[-1] ** 0.5 - 1) > 1e-9:  # what `torch.compile` can follow
        query = query * (scaling * query.shape[-1] ** 0.5)
    device = query.device.type
    if device != "meta" and torch.is_autocast_enabled(device):  # rotary positions have made queries and keys float32
        dtype = torch.get_autocast_dtype(device)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return varlen_attention(query, key, value, cu_seq_lens_q, max_length_q, causal)[None], None


def _is_packed(config: Any) -> bool:
    """Whether a model has taken the function. No public name says which one it has."""
    return bool(config._attn_implementation == NAME)


def _keep_whole(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Keeps a vision attention layer from cutting its input into images, each to be computed alone.

    It does that for every attention function but flash-attn's, whose names are reserved. Here it sees one long image,
    and the function gets the real bounds.
    """
    if not _is_packed(module.config):  # the model's user has chosen another since
        return args, kwargs
    bounds = kwargs["cu_seqlens"]
    whole = _OneImage((args[0] if args else kwargs["hidden_states"]).shape[0])
    return args, {**kwargs, "cu_seqlens": whole, "cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}


class _OneImage:
    """The bounds of one image, of which such a layer takes the lengths: ``(bounds[1:] - bounds[:-1]).tolist()``.

    A tensor in its place would be read by the host in every layer, which `torch.compile` cannot follow.
    """

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens

    def __getitem__(self, part: slice) -> _OneImage:
        return self

    def __sub__(self, begins: _OneImage) -> _OneImage:
        return self

    def tolist(self) -> list[int]:
        """The length."""
        return [self._tokens]
