"""Cross entropy over a vocabulary of which no more scores exist at a time than one chunk of tokens has."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

CHUNK = 1024
"""Tokens whose scores exist together: 0.6 GB in float32 for a vocabulary of 152,000."""


def summed_cross_entropy(
    head: Callable[[Tensor], Tensor], hidden: Tensor, labels: Tensor, chunk: int = CHUNK
) -> Tensor:
    """Cross entropy of the scores that ``head`` gives, summed over the tokens; in float32 at least.

    Scores are the widest tensors of a language model. Where there are more tokens than a chunk, each chunk's are made,
    used and dropped, and made once more in the backward. The head is called as it is, so that whatever it brings along
    (sharded weights, adapters, hooks) takes part.

    Args:
        head: ``[tokens, width]`` -> ``[tokens, vocabulary]`` scores.
        hidden: ``[tokens, width]``, what the head takes, at target tokens only.
        labels: ``[tokens]`` int64.
        chunk: tokens.

    Returns:
        a scalar; its gradient reaches ``hidden`` and the head's weights.
    """

    def of_chunk(part: Tensor, wanted: Tensor) -> Tensor:
        scores = head(part)
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        return functional.cross_entropy(scores, wanted, reduction="sum")

    if len(labels) <= chunk:
        return of_chunk(hidden, labels)
    parts = zip(torch.split(hidden, chunk), torch.split(labels, chunk), strict=True)
    losses: list[Tensor] = [checkpoint(of_chunk, part, wanted, use_reentrant=False) for part, wanted in parts]
    return torch.stack(losses).sum()
