"""Media items that are to be generated, packed for one forward, each with random numbers of its own."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flowtrain_lightning.data.batch import PackedMedia


@dataclass(frozen=True)
class PackedTargets:
    """Media items of any microbatches that a role behind the backbone generates in one forward, without padding.

    Random numbers belong to an item of a step, so they are the same however items are dealt to ranks and batches.

    Attributes:
        media: the items as they should become.
        seed: of the run.
        epoch: of the step.
        step: number of the step in its epoch.
    """

    media: PackedMedia
    seed: int
    epoch: int
    step: int

    def __len__(self) -> int:
        return len(self.media.items)

    @property
    def values(self) -> Tensor:
        """``[patches, patch_dim]`` the items one after another, as the data module's image processor makes patches."""
        return self.media.patches

    @property
    def patches(self) -> tuple[int, ...]:
        """``[items]`` patches of each."""
        return tuple(high * wide for high, wide in self.media.grid.tolist())

    @property
    def condition_rows(self) -> tuple[int, ...]:
        """``[items]`` rows of the condition of each, which come one after another."""
        return tuple(item.condition_rows for item in self.media.items)

    def images(self, channels: int = 3) -> Tensor:
        """``[items, channels, height, width]`` the items as images, where all are of one size.

        Raises:
            ValueError: they differ in size.
        """
        return self.media.images(channels)

    def normal_like(self, name: str) -> Tensor:
        """``[patches, patch_dim]`` numbers of a normal distribution, one for each of `values`.

        Args:
            name: of these numbers, so that others of the same items differ.
        """
        width = self.values.shape[1]
        drawn = [torch.randn(count, width, generator=own) for own, count in self._streams(name)]
        return torch.cat(drawn).to(self.values)

    def uniform(self, name: str) -> Tensor:
        """``[items]`` a number from 0 to 1 for each item.

        Args:
            name: of these numbers, so that others of the same items differ.
        """
        return torch.cat([torch.rand(1, generator=own) for own, _ in self._streams(name)]).to(self.values)

    def per_patch(self, of_items: Tensor) -> Tensor:
        """``[patches, ...]`` what is said of each item, ``[items, ...]``, repeated for each of its patches."""
        return _repeated(of_items, self.patches)

    def per_row(self, of_items: Tensor) -> Tensor:
        """``[condition rows, ...]`` what is said of each item, repeated for each of the rows of its condition."""
        return _repeated(of_items, self.condition_rows)

    def to(self, device: torch.device, non_blocking: bool = False) -> PackedTargets:
        """The same items on ``device``."""
        return replace(self, media=self.media.to(device, non_blocking))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors that move to a device."""
        return self.media.tensors

    def with_values(self, values: Tensor) -> PackedTargets:
        """The same items with other values, for example in another precision."""
        return replace(self, media=self.media.with_patches(values))

    def _streams(self, name: str) -> list[tuple[torch.Generator, int]]:
        """A generator for each item, and its patches. They draw on the host, in float32 for every precision."""
        found = []
        for item, count in zip(self.media.items, self.patches, strict=True):
            told = "/".join(map(str, (self.seed, self.epoch, self.step, item.sample, item.number, name)))
            seed = int.from_bytes(hashlib.sha256(told.encode()).digest()[:8], "little") >> 1
            found.append((torch.Generator().manual_seed(seed), count))
        return found


def _repeated(of_items: Tensor, counts: tuple[int, ...]) -> Tensor:
    return of_items.repeat_interleave(torch.tensor(counts, device=of_items.device), dim=0, output_size=sum(counts))
