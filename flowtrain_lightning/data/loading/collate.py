"""Packing: token sequences into a microbatch, media items into an encoder batch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from flowtrain_lightning.data.batch import IGNORED_LABEL, PackedBatch, PackedMedia
from flowtrain_lightning.data.media.loaded_media import LoadedMedia
from flowtrain_lightning.data.records.conversation import TokenSequence
from flowtrain_lightning.packing import IMAGE, IntArray, NameArray
from flowtrain_lightning.packing.role_graph import GENERATED

_PADDING_TOKEN = 0
PADDING_LENGTH = 8
"""Tokens of a microbatch without samples."""


def pack_sequences(
    sequences: Sequence[TokenSequence],
    samples: Sequence[int],
    *,
    pad_to: int | None = None,
    modalities: Sequence[NameArray] | None = None,
) -> PackedBatch:
    """One microbatch of at least one sequence.

    Args:
        sequences: the sequences in order.
        samples: their data set indices.
        pad_to: fill up to so many tokens by one more sequence without labels, all of token 0.
        modalities: of each sequence's media items; None where all are images.
    """
    lengths = [len(sequence) for sequence in sequences]
    missing = 0 if pad_to is None else pad_to - sum(lengths)
    lengths += [missing] if missing > 0 else []
    tokens = np.full(sum(lengths), _PADDING_TOKEN, dtype=np.int64)
    labels = np.full(sum(lengths), IGNORED_LABEL, dtype=np.int64)
    ends = np.cumsum(lengths)
    media_positions: list[IntArray] = []
    for sequence, end in zip(sequences, ends, strict=False):
        start = end - len(sequence)
        tokens[start:end] = sequence.tokens
        labels[start:end] = sequence.labels
        media_positions.append(start + sequence.media_positions)
    positions = np.concatenate(media_positions)
    generated = 0 if modalities is None else sum(int(np.count_nonzero(names == GENERATED)) for names in modalities)
    return PackedBatch(
        tokens=torch.from_numpy(tokens),
        labels=torch.from_numpy(labels),
        position_ids=torch.from_numpy(np.concatenate([np.arange(length, dtype=np.int64) for length in lengths])),
        cu_seqlens=_boundaries(lengths),
        max_seqlen=max(lengths),
        media_positions=_by_modality(positions, sequences, modalities),
        samples=tuple(samples),
        targets=torch.from_numpy(np.flatnonzero(labels != IGNORED_LABEL)),
        generated=generated,
    )


def padding_microbatch() -> PackedBatch:
    """A microbatch without samples and labels, for a rank that must run one and has none: a few tokens 0."""
    tokens = torch.full((PADDING_LENGTH,), _PADDING_TOKEN, dtype=torch.int64)
    return PackedBatch(
        tokens=tokens,
        labels=torch.full_like(tokens, IGNORED_LABEL),
        position_ids=torch.arange(PADDING_LENGTH),
        cu_seqlens=_boundaries([PADDING_LENGTH]),
        max_seqlen=PADDING_LENGTH,
        media_positions={},
        samples=(),
        targets=tokens[:0],
    )


def no_media(modality: str) -> PackedMedia:
    """An encoder batch with nothing to encode."""
    return PackedMedia(modality, torch.empty(0, 0), _boundaries([]), torch.empty(0, 2, dtype=torch.int64), 0, ())


def pack_media(items: Sequence[LoadedMedia]) -> PackedMedia:
    """One encoder batch of at least one media item; all are of one modality."""
    shared = items[0].normalisation
    alike = all(item.normalisation is shared for item in items)
    moments = [1 if item.clip is None else item.clip.moments for item in items]
    lengths = [math.prod(item.grid) for item, count in zip(items, moments, strict=True) for _ in range(count)]
    return PackedMedia(
        modality=items[0].modality,
        pixels=torch.from_numpy(np.concatenate([item.pixels if alike else item.patches for item in items])),
        cu_seqlens=_boundaries(lengths),
        grid=torch.tensor([item.grid for item in items], dtype=torch.int64),
        max_seqlen=max(lengths),
        rows=tuple(item.rows for item in items),
        sizes=tuple(item.size for item in items),
        normalisation=torch.from_numpy(shared) if alike and shared is not None else None,
        clips=tuple(item.clip for item in items) if any(item.clip is not None for item in items) else (),
        tiles=tuple(item.tiles for item in items) if any(item.tiles is not None for item in items) else (),
    )


def _by_modality(
    positions: IntArray, sequences: Sequence[TokenSequence], modalities: Sequence[NameArray] | None
) -> dict[str, torch.Tensor]:
    """Modality -> those of the positions at which its rows go, by name."""
    if modalities is None:
        return {IMAGE: torch.from_numpy(positions)} if len(positions) else {}
    pairs = zip(modalities, sequences, strict=True)
    of_each = np.concatenate([np.repeat(names, sequence.media_rows) for names, sequence in pairs])
    return {name: torch.from_numpy(positions[of_each == name]) for name in np.unique(of_each).tolist()}


def _boundaries(lengths: Sequence[int]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
