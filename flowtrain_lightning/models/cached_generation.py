"""Generation by ``transformers``' own ``generate``, which keeps keys and values of what it has read."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from flowtrain_lightning.compute.generation import ends_of
from flowtrain_lightning.data import PackedBatch
from flowtrain_lightning.models.packed_attention import own_attention, sequence_bounds


def takes_cache(model: Any, text: Any, batch: PackedBatch, arguments: Mapping[str, Any]) -> bool:
    """Whether a model can go on from what its text model is given.

    ``generate`` takes embeddings and positions; features for later layers and masks it would drop. Where ranks share
    weights, all must run as many forwards, which answers of their own length do not.

    Args:
        model: of Hugging Face.
        text: the text model.
        batch: the microbatch.
        arguments: what ``merge`` makes of it.
    """
    known = {"inputs_embeds", "position_ids", "use_cache", *sequence_bounds(batch)}
    begins_with_embeddings = "inputs_embeds" in inspect.signature(model.prepare_inputs_for_generation).parameters
    in_parts = any(isinstance(weight, DTensor) for weight in text.parameters())
    return begins_with_embeddings and arguments.keys() <= known and not in_parts


@torch.no_grad()
def generate_with_cache(
    model: Any,
    text: Any,
    batch: PackedBatch,
    arguments: Mapping[str, Any],
    max_new_tokens: int,
    end_token: int | Collection[int] | None,
) -> list[tuple[int, list[int]]]:
    """Continues every sequence by its likeliest tokens, one sequence after another.

    Args:
        model: of Hugging Face.
        text: its text model, with packed attention.
        batch: the microbatch.
        arguments: what ``merge`` makes of it.
        max_new_tokens: of a sequence.
        end_token: one or several that end a sequence, as do those of the model's own ``generation_config``.

    Returns:
        data set index and new token ids of every sequence, in the microbatch's order.
    """
    from transformers import GenerationConfig

    ends = ends_of(end_token) | ends_of(model.generation_config.eos_token_id)
    settings = GenerationConfig(
        do_sample=False, max_new_tokens=max_new_tokens, eos_token_id=sorted(ends) or None, pad_token_id=0
    )
    bounds, generated = batch.cu_seqlens.tolist(), []
    with own_attention(text), _generating_by(model, settings):
        for number, sample in enumerate(batch.samples):
            span = slice(bounds[number], bounds[number + 1])
            embeddings = arguments["inputs_embeds"][:, span]
            new = model.generate(
                inputs_embeds=embeddings,
                position_ids=arguments["position_ids"][..., span],
                attention_mask=embeddings.new_ones(embeddings.shape[:2], dtype=torch.int64),
                generation_config=settings,
            )[0].tolist()
            generated.append((sample, new[: next((at for at, token in enumerate(new) if token in ends), len(new))]))
    return generated


@contextmanager
def _generating_by(model: Any, settings: Any) -> Iterator[None]:
    """Inside, a model's own settings, such as penalties and beams, do not fill in what these leave open."""
    own, model.generation_config = model.generation_config, settings
    try:
        yield
    finally:
        model.generation_config = own
