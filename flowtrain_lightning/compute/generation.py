"""Greedy generation on a packed microbatch, with features from wherever they were encoded."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from flowtrain_lightning.data import IGNORED_LABEL, Features, PackedBatch
from flowtrain_lightning.parallel.deepspeed.deepspeed_partition import is_partitioned
from flowtrain_lightning.parallel.experts.experts import exchange_of
from flowtrain_lightning.parallel.halves import HalvedModule
from flowtrain_lightning.parallel.stages.stage_forward import StageForward
from flowtrain_lightning.parallel.stages.stage_relay import StageRelay


class GeneratingModule(HalvedModule, Protocol):
    """The methods with which a module generates; `FlowModule` has them."""

    max_new_tokens: int
    end_token: int | Collection[int] | None

    @property
    def staged(self) -> Mapping[str, StageForward]:
        """Role -> runs the stage of it that this rank holds; without those of which it has all layers, or none."""

    def merge(self, batch: PackedBatch, features: Features) -> dict[str, Any]:
        """Token embeddings and features -> the backbone's keyword arguments."""

    def logits(self, outputs: Any) -> Tensor:
        """The backbone's outputs -> ``[tokens, vocabulary]``."""


@torch.no_grad()
def generate_greedily(module: GeneratingModule, batch: PackedBatch, features: Features) -> list[tuple[int, list[int]]]:
    """Continues every sequence by its likeliest tokens.

    The whole microbatch is computed anew for every token, without a cache: simple, exact, meant for looking at what
    a model has learned. Ranks that need each other in a forward all run as many, whenever their sequences end.

    Returns:
        data set index and new token ids of every sequence, in the microbatch's order.
    """
    backbone = module.get_submodule(module.halves[module.role_graph.trunk][0])
    sequences = len(batch.samples)
    generated: list[list[int]] = [[] for _ in range(sequences)]
    open_sequences = set(range(sequences))
    others_wait, ends = _needs_others(backbone), ends_of(module.end_token)
    staged = module.staged.get(module.role_graph.trunk)
    relay = None if staged is None else StageRelay(staged)
    for _ in range(module.max_new_tokens):
        if not open_sequences and not others_wait:
            break
        last = batch.cu_seqlens[1 : sequences + 1].long() - 1
        scores = partial(_scores, module, backbone, batch, features)
        choose = partial(_likeliest, last)
        likeliest = (choose(scores()) if relay is None else relay(scores, choose, len(batch.tokens))).tolist()
        if not open_sequences:
            continue
        for sequence in sorted(open_sequences):
            if likeliest[sequence] in ends:
                open_sequences.discard(sequence)
            else:
                generated[sequence].append(likeliest[sequence])
        if open_sequences:
            batch = _append(batch, torch.tensor(likeliest, device=batch.tokens.device))
    return list(zip(batch.samples, generated, strict=True))


def ends_of(end_token: int | Collection[int] | None) -> frozenset[int]:
    """The ids that end a sequence, of what a module has as its ``end_token``."""
    if end_token is None:
        return frozenset()
    return frozenset([end_token] if isinstance(end_token, int) else end_token)


def _scores(module: GeneratingModule, half: nn.Module, batch: PackedBatch, features: Features) -> Tensor:
    return module.logits(half(**module.merge(batch, features)))


def _likeliest(last: Tensor, logits: Tensor) -> Tensor:
    return logits[last].argmax(dim=-1)


def _needs_others(half: nn.Module) -> bool:
    """Whether other ranks take part in every forward of the half."""
    in_shards = any(isinstance(module, FSDPModule) or exchange_of(module) is not None for module in half.modules())
    return in_shards or any(map(is_partitioned, half.parameters()))


def _append(batch: PackedBatch, tokens: Tensor) -> PackedBatch:
    """One more token at the end of every sequence; positions of media move along. Padding is dropped."""
    ends = batch.cu_seqlens[1 : len(batch.samples) + 1].long()
    used = int(ends[-1])
    sequence_of = torch.repeat_interleave(
        torch.arange(len(ends), device=ends.device), torch.diff(batch.cu_seqlens[: len(batch.samples) + 1]).long()
    )
    old_positions = torch.arange(used, device=ends.device) + sequence_of
    new_positions = ends + torch.arange(len(ends), device=ends.device)
    grown = used + len(ends)

    def spread(old: Tensor, new: Tensor) -> Tensor:
        out = old.new_empty(grown)
        out[old_positions] = old[:used]
        out[new_positions] = new.to(old.dtype)
        return out

    return replace(
        batch,
        tokens=spread(batch.tokens, tokens),
        labels=batch.labels.new_full((grown,), IGNORED_LABEL),
        position_ids=spread(batch.position_ids, batch.position_ids[ends - 1] + 1),
        cu_seqlens=torch.cat([batch.cu_seqlens[:1], (new_positions + 1).to(batch.cu_seqlens.dtype)]),
        max_seqlen=batch.max_seqlen + 1,
        media_positions={name: old_positions[positions] for name, positions in batch.media_positions.items()},
    )
