"""The piece of a microbatch on which context ranks are compared with one rank that computes all of it."""

from __future__ import annotations

from dataclasses import replace

import torch

from flowtrain_lightning.data import Features, PackedBatch
from flowtrain_lightning.data.batch import IGNORED_LABEL


def cut(batch: PackedBatch, features: Features, most: int) -> tuple[PackedBatch, Features]:
    """A piece of a microbatch that takes no more room whole than a rank's share of all of it.

    Args:
        batch: the microbatch.
        features: of it.
        most: tokens of the piece, at most.

    Returns:
        its first sequences with a target that fit, or the end of one, and their features. No picture is cut.
    """
    if len(batch.tokens) <= most:
        return batch, features
    targets, bounds = batch.targets.tolist(), batch.cu_seqlens.tolist()
    first = targets[0] if targets else 0
    number = next(n for n, end in enumerate(bounds[1:]) if first < end)
    start, stop = bounds[number], bounds[number + 1]
    if stop - start > most:
        stop = min(stop, next((last + 2 for last in reversed(targets) if last < stop), stop))
        start = _after_media(batch, max(start, stop - most), stop)
    else:
        stop = max(end for end in bounds if start < end <= start + most)
    return _section(batch, features, start, stop)


def _after_media(batch: PackedBatch, start: int, stop: int) -> int:
    """``start``, or the end of the run of media tokens in whose midst it is."""
    media = {place for places in batch.media_positions.values() for place in places.tolist()}
    if start - 1 not in media:
        return start
    return next((place for place in range(start, stop) if place not in media), stop - 1)


def _section(batch: PackedBatch, features: Features, start: int, stop: int) -> tuple[PackedBatch, Features]:
    own = slice(start, stop)
    first = int((batch.cu_seqlens <= start).sum()) - 1
    bounds = torch.unique(batch.cu_seqlens.clamp(start, stop) - start)
    begins = torch.repeat_interleave(bounds[:-1], bounds.diff()).to(batch.position_ids.dtype)
    labels = batch.labels[own].clone()
    labels[bounds[1:].long() - 1] = IGNORED_LABEL  # of a sequence that was cut; of whole ones it is
    inside = {name: (places >= start) & (places < stop) for name, places in batch.media_positions.items()}
    positions = {name: places[inside[name]] - start for name, places in batch.media_positions.items()}
    taken = {name: inside.get(name, own) for name in features}  # what is of no modality has a row for each token
    kept = {
        name: tuple(each[taken[name]] for each in rows) if isinstance(rows, tuple) else rows[taken[name]]
        for name, rows in features.items()
    }
    piece = replace(
        batch,
        tokens=batch.tokens[own],
        labels=labels,
        position_ids=torch.arange(stop - start, device=begins.device, dtype=begins.dtype) - begins,
        cu_seqlens=bounds,
        max_seqlen=int(bounds.diff().max()),
        media_positions=positions,
        samples=batch.samples[first : first + len(bounds) - 1],
        targets=torch.nonzero(labels != IGNORED_LABEL).flatten(),
    )
    return piece, kept
