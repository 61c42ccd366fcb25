"""Attention of decoders in which some tokens, such as those of an image, see each other, whichever comes first.

A token sees an unbroken row of tokens, so that its first and its last say all. Which tiles of `TILE` queries and `TILE`
keys ``flex_attention`` computes follows from the least and the greatest of these in a tile: no mask of all pairs is
ever made. On a GPU all of it is computed there, and the host waits for nothing.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import pad, scaled_dot_product_attention

from flowtrain_lightning.attention import varlen_attention
from flowtrain_lightning.data import PackedBatch
from flowtrain_lightning.models.packed_scans import pack_scans

NAME = "flowtrain_blocks"
"""The function's name in ``transformers``, like ``"sdpa"``."""


def attend_in_blocks(model: Any) -> None:
    """Lets a decoder of Hugging Face attend within packed sequences, by a `SightMask` that its forward is given.

    Args:
        model: a ``transformers.PreTrainedModel`` such as Gemma's. Its forward then takes a batch of one and ``sight=``.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, _attention)
    model.set_attn_implementation(NAME)
    pack_scans(model)


class SightMask:
    """The mask of a microbatch: a token sees those before it in its sequence, and all of its own block.

    On CPU, and in float64 anywhere, PyTorch's ``scaled_dot_product_attention`` gets a mask, one sequence after another;
    on a GPU ``flex_attention`` leaves out whatever no token of it sees. Masks are made once for all layers.

    Args:
        batch: the microbatch.
        blocks: ``[tokens]`` the number of the block that a token lies in, or -1; None where nothing is in a block.
            Tokens next to each other that have the same number, and lie in the same sequence, are one block.
        in_windows: only layers with a window see blocks, and before a token as far as it reaches; else all layers see
            whole blocks.
    """

    def __init__(self, batch: PackedBatch, blocks: Tensor | None, *, in_windows: bool = False) -> None:
        self._blocks = blocks
        self._in_windows = in_windows
        self._cu_seqlens = batch.cu_seqlens
        self._max_seqlen = batch.max_seqlen
        self._bounds: dict[int | None, tuple[Tensor, Tensor]] = {}
        self._dense: dict[int | None, list[Tensor]] = {}
        self._sparse: dict[int | None, BlockMask] = {}

    def attend(self, query: Tensor, key: Tensor, value: Tensor, window: int | None, softcap: float | None) -> Tensor:
        """Attention of one layer.

        Args:
            query: ``[tokens, heads, head_dim]``, to be scaled by ``head_dim ** -0.5``.
            key: ``[tokens, key_heads, head_dim]``.
            value: ``[tokens, key_heads, head_dim]``.
            window: a token sees itself and ``window - 1`` tokens before it, and its block; None: all before it.
            softcap: scores become ``softcap * tanh(scores / softcap)``, as in Gemma 2.

        Returns:
            ``[tokens, heads, head_dim]``.
        """
        if window is not None and window >= self._max_seqlen and not self._in_windows:
            window = None
        if self._seen(window) is None and window is None and softcap is None:
            return varlen_attention(query, key, value, self._cu_seqlens, self._max_seqlen, causal=True)
        if query.is_cuda and query.dtype != torch.float64:
            return self.attend_sparsely(query, key, value, window, softcap, compiled=True)
        return self.attend_densely(query, key, value, window, softcap)

    def _seen(self, window: int | None) -> Tensor | None:
        """The blocks that a layer sees."""
        return None if self._in_windows and window is None else self._blocks

    def _sight(self, window: int | None, tokens: int) -> tuple[Tensor, Tensor]:
        """``[tokens]`` the first and the last that each token sees."""
        if window not in self._bounds:
            self._bounds[window] = bounds_of_sight(
                self._cu_seqlens, self._seen(window), window, tokens, within=self._in_windows
            )
        return self._bounds[window]

    def attend_densely(
        self, query: Tensor, key: Tensor, value: Tensor, window: int | None, softcap: float | None
    ) -> Tensor:
        """As `attend`, sequence by sequence with a mask of its own."""
        if window not in self._dense:
            tokens = torch.split(torch.arange(len(query), device=query.device), self._cu_seqlens.diff().tolist())
            first, last = self._sight(window, len(query))
            self._dense[window] = [(first[own, None] <= own) & (own <= last[own, None]) for own in tokens]
        masks = self._dense[window]
        lengths = [len(mask) for mask in masks]
        outputs = []
        for mask, *packed in zip(
            masks, *(torch.split(x.transpose(0, 1), lengths, dim=1) for x in (query, key, value)), strict=True
        ):
            q, k, v = (x[None] for x in packed)
            if softcap is None:
                output = scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])
            else:
                output = _capped_attention(q, k, v, mask, softcap)
            outputs.append(output[0])
        return torch.cat(outputs, dim=1).transpose(0, 1)

    def attend_sparsely(
        self, query: Tensor, key: Tensor, value: Tensor, window: int | None, softcap: float | None, *, compiled: bool
    ) -> Tensor:
        """As `attend`, by ``flex_attention``, which on a GPU is to be compiled."""
        if window not in self._sparse:
            self._sparse[window] = block_mask(*self._sight(window, len(query)))

        def cap(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return score if softcap is None else softcap * torch.tanh(score / softcap)

        attend = compiled_flex_attention() if compiled else flex_attention
        output: Tensor = attend(
            *(x.transpose(0, 1)[None] for x in (query, key, value)),
            score_mod=None if softcap is None else cap,
            block_mask=self._sparse[window],
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return output[0].transpose(0, 1)


def _capped_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, softcap: float) -> Tensor:
    """As ``scaled_dot_product_attention``, which knows no softcap; ``[1, heads, tokens, head_dim]``."""
    shared = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(shared, dim=1), value.repeat_interleave(shared, dim=1)
    scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
    scores = softcap * torch.tanh(scores / softcap)
    shares = scores.masked_fill(~mask, -math.inf).softmax(
        dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32)
    )
    return shares.to(value.dtype) @ value


@cache
def compiled_flex_attention() -> Any:
    """PyTorch's ``flex_attention`` is fast, and sparing of memory, only where it is compiled."""
    return torch.compile(flex_attention)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sight: SightMask | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """An attention function as ``transformers`` calls it: ``[1, heads, tokens, head_dim]`` tensors."""
    if sight is None:
        raise ValueError(
            f"{type(module).__name__} was not told which tokens see which. Pass sight=SightMask(batch, blocks) to the "
            "model's forward; to use the model otherwise, call model.set_attn_implementation('eager') before."
        )
    if dropout:
        raise ValueError(
            f"{type(module).__name__} uses dropout, which packed attention does not have. Set attention_dropout=0 in "
            "the model's config."
        )
    if scaling is not None and abs(scaling * query.shape[-1] ** 0.5 - 1) > 1e-9:  # what `torch.compile` can follow
        query = query * (scaling * query.shape[-1] ** 0.5)
    device = query.device.type
    if device != "meta" and torch.is_autocast_enabled(device):  # rotary positions have made queries and keys float32
        dtype = torch.get_autocast_dtype(device)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return sight.attend(query, key, value, sliding_window, softcap)[None], None


TILE = 128
"""Tokens on a side of a tile; what ``flex_attention`` takes by itself."""


def bounds_of_sight(
    cu_seqlens: Tensor, blocks: Tensor | None, window: int | None, tokens: int, *, within: bool = False
) -> tuple[Tensor, Tensor]:
    """The first and the last token that each token sees.

    Args:
        cu_seqlens: ``[sequences + 1]`` int32, where each sequence begins and ends.
        blocks: as in `SightMask`.
        window: a token sees itself and ``window - 1`` tokens before it, and its block; None: all before it.
        tokens: of the microbatch, all of which lie in sequences.
        within: of its block a token sees no more before it than of others.

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
    last = torch.where(inside, block_last, own)
    return (first if within else torch.where(inside, torch.minimum(first, block_first), first)), last


def block_mask(first: Tensor, last: Tensor) -> BlockMask:
    """Make the block mask that ``create_block_mask`` makes of the same mask, without the mask.

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
