"""Tokens and features, merged by a Hugging Face model's own forward, packed or alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from flowtrain_lightning.data import PackedBatch
from flowtrain_lightning.models.block_attention import SightMask, attend_in_blocks
from flowtrain_lightning.models.family_traits import Sight, Traits, as_encoder_output, decoder_of, token_kinds, whole_of
from flowtrain_lightning.models.gemma import image_blocks
from flowtrain_lightning.models.packed_attention import pack_attention, sequence_bounds
from flowtrain_lightning.models.qwen import mrope_positions


def pack_decoder(decoder: Any, sight: Sight) -> None:
    """Lets a decoder attend within packed sequences: by masks where it has windows or image tokens see ahead."""
    (pack_attention if sight == "packed" else attend_in_blocks)(decoder)


def own_merge(
    model: Any,
    traits: Traits,
    batch: PackedBatch,
    levels: Sequence[Tensor],
    offsets: Tensor | None,
    sounds: Tensor | None = None,
) -> dict[str, Any]:
    """Merges by the model's own forward, up to its decoder, whose attention is packed.

    Args:
        model: of ``transformers``.
        traits: of its family.
        batch: a microbatch.
        levels: ``[rows, width]`` features of all its images, and those for deeper layers; empty without images.
        offsets: of M-RoPE, as ``media_offsets`` has them; None without images.
        sounds: ``[rows, width]`` features of all its clips of audio; None without. They take the places of embedded
            tokens before the forward begins, which takes them from nobody else.

    Raises:
        TypeError: the forward needs other outputs of the encoder, too.
    """
    given: dict[str, Any] = {"input_ids": batch.tokens[None], "use_cache": False, **sequence_bounds(batch)}
    given["position_ids"] = batch.position_ids[None]
    if traits.rotary:
        given["position_ids"] = mrope_positions(batch, "image", offsets)[:, None]
    places = batch.media_positions.get("image")
    if levels:
        given["mm_encoder_outputs"] = {"image": as_encoder_output(levels, traits.form)}
    given |= token_kinds(model, batch.tokens, places)
    if sounds is not None:
        embedded = model.get_input_embeddings()(batch.tokens)
        heard = sounds.to(embedded.dtype)
        given["inputs_embeds"] = embedded.index_copy(0, batch.media_positions["audio"], heard)[None]
    try:
        with _located(whole_of(model), batch.tokens.device) as whole:
            arguments = decoder_arguments(decoder_of(model), lambda: whole(**given))
    except AttributeError as error:
        raise TypeError(
            f"{type(model).__name__} asks its encoder's outputs for more than rows of features, which nobody carries "
            f"from encoder ranks to backbone ranks: {error}."
        ) from error
    found = {name: value for name, value in arguments.items() if value is not None}
    if traits.sight != "packed":
        found.pop("attention_mask", None)
        blocks = None
        if traits.sight.startswith("images") and places is not None:
            blocks = image_blocks(places, len(batch.tokens))
        found["sight"] = SightMask(batch, blocks, in_windows=traits.sight == "images in windows")
    return found


@contextmanager
def _located(whole: Any, device: torch.device) -> Iterator[Any]:
    """A model that says that it is on a device.

    It would say that of its first weight, which is of the tower: on ranks that do not encode that has no memory.
    """
    kind: type = type(whole)
    whole.__class__ = _on(kind, device)
    try:
        yield whole
    finally:
        whole.__class__ = kind


@cache
def _on(kind: type, device: torch.device) -> type:
    """The class of a model that says that it is on a device; made once."""
    return type(kind.__name__, (kind,), {"device": device})


class _ReachedError(Exception):
    """The decoder was called; carries its arguments."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        super().__init__()
        self.arguments = dict(arguments)


def decoder_arguments(decoder: nn.Module, forward: Callable[[], Any]) -> dict[str, Any]:
    """Returns the arguments with which a model's own forward calls its decoder, which does not run.

    Args:
        decoder: of the model.
        forward: calls the model.

    Raises:
        TypeError: the forward does not call its decoder, or not by keywords.
    """

    def stop(module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        if args:
            raise TypeError(f"{type(module).__name__} is called by position, so that what it is given has no names.")
        raise _ReachedError(kwargs)

    with _hooked(decoder, stop):
        try:
            forward()
        except _ReachedError as reached:
            return reached.arguments
    raise TypeError(f"The model's own forward never calls its decoder, {type(decoder).__name__}.")


@contextmanager
def _hooked(module: nn.Module, hook: Any) -> Iterator[None]:
    handle = module.register_forward_pre_hook(hook, with_kwargs=True, prepend=True)
    try:
        yield
    finally:
        handle.remove()
