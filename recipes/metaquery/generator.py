"""A small diffusion transformer: of each picture it reads rows of the condition and noisy patches as one sequence."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flowtrain_lightning.data import PackedTargets
from recipes.quickstart.model import Block, Packing, patch_positions, rotary_angles

_BESIDE = 64
"""Where rows of the condition stand: beside the picture, so that no patch has their place."""


class Generator(nn.Module):
    """Predicts what leads from pictures to noise, for flow matching.

    Args:
        patch_dim: numbers of a patch.
        width: of its rows.
        depth: blocks.
        heads: per block.
        merge_size: side of the blocks in whose order patches come.
    """

    def __init__(self, patch_dim: int, width: int, depth: int, heads: int, merge_size: int) -> None:
        super().__init__()
        self.head_dim, self.merge_size = width // heads, merge_size
        self.embed, self.head = nn.Linear(patch_dim, width), nn.Linear(width, patch_dim)
        self.time = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList(Block(width, heads, causal=False, depth=depth) for _ in range(depth))
        self.norm = nn.RMSNorm(width, eps=1e-6)

    def forward(self, noisy: Tensor, time: Tensor, condition: Tensor, items: PackedTargets) -> Tensor:
        """``[patches, patch_dim]`` what leads to noise.

        Args:
            noisy: ``[patches, patch_dim]`` pictures with noise.
            time: ``[items]`` 0 is a picture, 1 is noise.
            condition: ``[condition rows, width]`` of the items.
            items: says whose each row and patch is.
        """
        numbers = torch.arange(len(items), device=noisy.device)
        owner = torch.cat([items.per_row(numbers), items.per_patch(numbers)])
        order = torch.argsort(owner, stable=True)  # each item's condition, and behind it its patches
        rows = torch.cat([condition, self.embed(noisy)]) + self._embedded(time)[owner]
        beside = _BESIDE + torch.cat([torch.arange(count) for count in items.condition_rows])[:, None].expand(-1, 2)
        places = torch.cat([beside, patch_positions(items.media.grid, self.merge_size)]).to(noisy.device)[order]
        angles = [rotary_angles(place, self.head_dim // 2, base=100.0) for place in places.unbind(1)]
        lengths = torch.bincount(owner, minlength=len(items))
        bounds = nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
        packing = Packing(bounds, int(lengths.max()), torch.cat(angles, dim=-1))
        rows = rows[order]
        for block in self.blocks:
            rows = block(rows, packing)
        found: Tensor = self.head(self.norm(rows))
        return found[torch.argsort(order)][len(condition) :]

    def _embedded(self, time: Tensor) -> Tensor:
        width = self.embed.out_features
        speeds = torch.exp(-torch.arange(0, width, 2, device=time.device) / width * 9.0) * 1000.0
        angles = time[:, None] * speeds
        embedded: Tensor = self.time(torch.cat([angles.sin(), angles.cos()], dim=-1))
        return embedded
