"""A small vision-language model in plain PyTorch: a native-resolution ViT and a decoder language model.

Both halves work on packed rows: pictures or sequences lie one after another in one tensor, and ``cu_seqlens`` says
where each begins. They are built of the same block; the encoder's attends both ways and by two coordinates, the
backbone's to the left and by one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from flowtrain_lightning.attention import varlen_attention


@dataclass(frozen=True)
class Packing:
    """How rows are packed, and where each stands in its own picture or sequence.

    Attributes:
        cu_seqlens: ``[sequences + 1]`` int32, where each begins and ends.
        max_seqlen: rows of the longest.
        rotation: ``[rows, head_dim / 2]`` angles by which rotary embeddings turn queries and keys.
    """

    cu_seqlens: Tensor
    max_seqlen: int
    rotation: Tensor


class Attention(nn.Module):
    """Multi-head attention with rotary positions, within each packed sequence."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.output = nn.Linear(width, width, bias=False)

    def forward(self, rows: Tensor, packing: Packing) -> Tensor:
        """``[rows, width]`` -> ``[rows, width]``."""
        query, key, value = self.query_key_value(rows).unflatten(1, (3, self.heads, -1)).unbind(1)
        query, key = rotate(query, packing.rotation), rotate(key, packing.rotation)
        mixed = varlen_attention(query, key, value, packing.cu_seqlens, packing.max_seqlen, self.causal)
        projected: Tensor = self.output(mixed.flatten(1))
        return projected


class SwiGLU(nn.Module):
    """The gated feed-forward layer of today's language models."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_and_up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, rows: Tensor) -> Tensor:
        """``[rows, width]`` -> ``[rows, width]``."""
        gate, up = self.gate_and_up(rows).chunk(2, dim=-1)
        projected: Tensor = self.down(nn.functional.silu(gate) * up)
        return projected


class Block(nn.Module):
    """Attention and feed-forward, each on normalised rows and added to them; one of ``depth`` such blocks."""

    def __init__(self, width: int, heads: int, causal: bool, depth: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(width, eps=1e-6)
        self.attention = Attention(width, heads, causal)
        self.feed_forward_norm = nn.RMSNorm(width, eps=1e-6)
        self.feed_forward = SwiGLU(width, 8 * width // 3)
        # At first a block adds little: the deeper ones then see the patches and tokens, and learning starts at once.
        for last in (self.attention.output, self.feed_forward.down):
            nn.init.normal_(last.weight, std=0.02 / math.sqrt(2 * depth))

    def forward(self, rows: Tensor, packing: Packing) -> Tensor:
        """``[rows, width]`` -> ``[rows, width]``."""
        rows = rows + self.attention(self.attention_norm(rows), packing)
        added: Tensor = rows + self.feed_forward(self.feed_forward_norm(rows))
        return added


class VisionEncoder(nn.Module):
    """A ViT for pictures of any size: patches in, one row of features per block of patches out.

    Args:
        patch_dim: numbers in one patch.
        width: of the ViT.
        depth: blocks.
        heads: per block.
        merge_size: side of the block of patches that becomes one row of features.
        feature_width: numbers in a row of features.
    """

    def __init__(self, patch_dim: int, width: int, depth: int, heads: int, merge_size: int, feature_width: int) -> None:
        super().__init__()
        self.merge_size, self.head_dim = merge_size, width // heads
        self.embed = nn.Linear(patch_dim, width)
        self.blocks = nn.ModuleList(Block(width, heads, causal=False, depth=depth) for _ in range(depth))
        self.norm = nn.RMSNorm(width, eps=1e-6)
        merged = merge_size**2 * width
        self.merger = nn.Sequential(nn.Linear(merged, merged), nn.GELU(), nn.Linear(merged, feature_width))

    def forward(self, patches: Tensor, positions: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
        """Features of packed pictures.

        Args:
            patches: ``[patches, patch_dim]``, block after block, so that neighbours in the tensor merge.
            positions: ``[patches, 2]`` row and column of every patch; see `patch_positions`.
            cu_seqlens: ``[pictures + 1]`` int32.
            max_seqlen: patches of the largest picture.

        Returns:
            ``[patches / merge_size ** 2, feature_width]``.
        """
        # Half of each head turns by the patch's row, the other half by its column.
        angles = [rotary_angles(position, self.head_dim // 2, base=100.0) for position in positions.unbind(1)]
        packing = Packing(cu_seqlens, max_seqlen, torch.cat(angles, dim=-1))
        rows = self.embed(patches)
        for block in self.blocks:
            rows = block(rows, packing)
        features: Tensor = self.merger(self.norm(rows).reshape(-1, self.merge_size**2 * rows.shape[1]))
        return features


class LanguageModel(nn.Module):
    """A decoder language model that reads embeddings, so that features may stand among them.

    Args:
        vocabulary: tokens it knows.
        feature_width: numbers in a row of an encoder's features.
        width: of its rows.
        depth: blocks.
        heads: per block.
    """

    def __init__(self, vocabulary: int, feature_width: int, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.head_dim = width // heads
        self.embed = nn.Embedding(vocabulary, width)
        self.project = nn.Linear(feature_width, width)
        self.blocks = nn.ModuleList(Block(width, heads, causal=True, depth=depth) for _ in range(depth))
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.output = nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.embed.weight, std=0.02)
        nn.init.normal_(self.output.weight, std=0.02)

    def forward(self, embeddings: Tensor, position_ids: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
        """Scores of the next token: ``[tokens, vocabulary]``, see `states`."""
        scores: Tensor = self.output(self.states(embeddings, position_ids, cu_seqlens, max_seqlen))
        return scores

    def states(self, embeddings: Tensor, position_ids: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
        """What the last block makes of the tokens, normalised.

        Args:
            embeddings: ``[tokens, width]`` embedded tokens and features.
            position_ids: ``[tokens]`` from 0 in every sequence.
            cu_seqlens: ``[sequences + 1]`` int32.
            max_seqlen: tokens of the longest sequence.

        Returns:
            ``[tokens, width]``.
        """
        packing = Packing(cu_seqlens, max_seqlen, rotary_angles(position_ids, self.head_dim, base=10_000.0))
        rows = embeddings
        for block in self.blocks:
            rows = block(rows, packing)
        normal: Tensor = self.norm(rows)
        return normal


def patch_positions(grid: Tensor, merge_size: int) -> Tensor:
    """``[patches, 2]`` row and column of every patch of pictures whose patches are ordered block after block."""
    positions = []
    for rows, columns in grid.tolist():
        position = torch.cartesian_prod(torch.arange(rows), torch.arange(columns))
        blocks = position.reshape(rows // merge_size, merge_size, columns // merge_size, merge_size, 2)
        positions.append(blocks.transpose(1, 2).reshape(-1, 2))
    return torch.cat(positions)


def rotary_angles(positions: Tensor, dim: int, base: float) -> Tensor:
    """``[rows, dim / 2]`` angles of rotary embeddings for integer ``positions`` of shape ``[rows]``."""
    speeds = base ** (-torch.arange(0, dim, 2, device=positions.device, dtype=torch.float32) / dim)
    return positions[:, None].float() * speeds


def rotate(heads: Tensor, angles: Tensor) -> Tensor:
    """Turn the pairs of numbers in each head of ``[rows, heads, head_dim]`` by ``[rows, head_dim / 2]`` angles."""
    cos, sin = (x.to(heads.dtype)[:, None] for x in (angles.cos(), angles.sin()))
    first, second = heads.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)
