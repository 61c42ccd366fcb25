"""What each token of a microbatch sees, as two numbers; and the tables of tiles that ``flex_attention`` asks for.

A token sees an unbroken row of tokens, so that its first and its last say all. Which tiles of `TILE` queries and `TILE`
keys are to be computed follows from the least and the greatest of these in a tile: no mask of all pairs is ever made.
On a GPU all of it is computed there, and the host waits for nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.functional import pad

TILE = 128
"""Tokens on a side of a tile; what ``flex_attention`` takes by itself."""


def bounds_of_sight(
    cu_seqlens: Tensor, blocks: Tensor | None, window: int | None, tokens: int
) -> tuple[Tensor, Tensor]:
    """The first and the last token that each token sees.

    Args:
        cu_seqlens: ``[sequences + 1]`` int32, where each sequence begins and ends.
        blocks: as in `SightMask`.
        window: a token sees itself and ``window - 1`` tokens before it, and its block; None: all before it.
        tokens: of the microbatch, all of which lie in sequences.

    Returns:
        ``[tokens]`` int32 each; what is seen lies between them, both included.
    """
    own = torch.arange(tokens, dtype=torch.int32, device=cu_seqlens.device)
    begins = torch.repeat_interleave(cu_seqlens[:-1], cu_seqlens.diff(), output_size=tokens)
    first = begins if window is None else torch.maximum(begins, own - (window - 1))
    if blocks is None:
        return first, own
    opens = (own == begins) | (blocks != pad(blocks[:-1], (1, 0), value=-1))
    block_first = torch.where(opens, own, 0).cummax(0).values
    closes = pad(opens[1:], (0, 1), value=True)
    block_last = torch.where(closes, own, tokens).flip(0).cummin(0).values.flip(0)
    inside = blocks >= 0
    return torch.where(inside, torch.minimum(first, block_first), first), torch.where(inside, block_last, own)


def block_mask(first: Tensor, last: Tensor) -> BlockMask:
    """What ``create_block_mask`` makes of the same mask, without the mask.

    Args:
        first: ``[tokens]`` int32, what `bounds_of_sight` returns.
        last: ``[tokens]`` int32, no less than the token itself.

    Returns:
        for all heads; its largest tensors have ``(tokens / TILE) ** 2`` elements.
    """
    tokens = len(first)
    tiles = -(-tokens // TILE)
    missing = tiles * TILE - tokens
    rows_first = pad(first, (0, missing), value=tokens).view(tiles, TILE)
    rows_last = pad(last, (0, missing), value=-1).view(tiles, TILE)
    begins = torch.arange(tiles, device=first.device) * TILE
    ends = begins + (TILE - 1)
    # What a tile's tokens see has no gaps, since each sees itself: whatever meets it is seen by one of them.
    seen = (rows_first.amin(1)[:, None] <= ends) & (rows_last.amax(1)[:, None] >= begins)
    whole = (rows_first.amax(1)[:, None] <= begins) & (rows_last.amin(1)[:, None] >= ends)

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (first[query] <= key) & (key <= last[query])

    return BlockMask.from_kv_blocks(
        *_listed(seen & ~whole), *_listed(whole), BLOCK_SIZE=TILE, mask_mod=sees, seq_lengths=(tokens, tokens)
    )


def _listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """How many of each row are chosen, ``[1, 1, tiles]``, and which, before all others, ``[1, 1, tiles, tiles]``."""
    order = torch.argsort(chosen.to(torch.int32), dim=-1, descending=True, stable=True)
    return chosen.sum(-1, dtype=torch.int32)[None, None], order.to(torch.int32)[None, None]
