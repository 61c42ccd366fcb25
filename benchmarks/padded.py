"""What a user has today: the same layers in an ordinary LightningModule, on batches padded by a collate function."""

from __future__ import annotations

from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, Sampler

from benchmarks.modules import Work, sizes
from flowtrain_lightning.data import IGNORED_LABEL
from flowtrain_lightning.data.loading.sample_loader import SampleLoader
from flowtrain_lightning.data.steps.sampler import Sampling
from recipes.quickstart.model import Block, LanguageModel, VisionEncoder, patch_positions, rotary_angles, rotate
from recipes.quickstart.module import QuickstartVLM

Sample = dict[str, Any]
Batch = dict[str, Tensor]


class PaddedVLM(L.LightningModule):
    """The quickstart's encoder and backbone on ``[batch, longest, width]`` with dense masks.

    Args:
        name: which of ``benchmarks.modules.MODULES``.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        packed = QuickstartVLM(**sizes(name))
        packed.configure_model()
        self.encoder: VisionEncoder = packed.encoder
        self.backbone: LanguageModel = packed.backbone

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The mean loss over this rank's target tokens."""
        total, tokens = self.summed_loss(batch)
        return total / max(tokens, 1)

    def summed_loss(self, batch: Batch) -> tuple[Tensor, int]:
        """The loss summed over target tokens, and their number."""
        rows = batch["rows"]
        features = self._features(batch)[torch.arange(int(rows.max())) < rows[:, None]]
        embeddings = self.backbone.embed(batch["tokens"])
        projected = self.backbone.project(features).to(embeddings.dtype)
        embeddings = embeddings.masked_scatter(batch["is_media"][..., None], projected)
        scores = self._scores(embeddings, batch["lengths"])
        learned = batch["labels"] != IGNORED_LABEL
        loss = cross_entropy(scores[learned].float(), batch["labels"][learned], reduction="sum")
        return loss, int(learned.sum())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW, as in the packed module."""
        return torch.optim.AdamW(self.parameters(), lr=2e-4, betas=(0.9, 0.98))

    def _features(self, batch: Batch) -> Tensor:
        """``[pictures, rows of the largest, width]``."""
        encoder, patches = self.encoder, batch["patches"]
        positions = torch.split(patch_positions(batch["grid"], encoder.merge_size), batch["grid"].prod(1).tolist())
        position = pad_sequence(list(positions), batch_first=True)
        angles = torch.cat(
            [rotary_angles(p.flatten(), encoder.head_dim // 2, base=100.0) for p in position.unbind(-1)], dim=-1
        )
        there = torch.arange(patches.shape[1]) < batch["grid"].prod(1)[:, None]
        x = encoder.embed(patches)
        for block in encoder.blocks:
            x = _padded_block(block, x, angles, there[:, None, None, :])
        merged = encoder.norm(x).reshape(len(patches), -1, encoder.merge_size**2 * x.shape[-1])
        features: Tensor = encoder.merger(merged)
        return features

    def _scores(self, embeddings: Tensor, lengths: Tensor) -> Tensor:
        """``[samples, longest, vocabulary]``."""
        backbone = self.backbone
        longest = embeddings.shape[1]
        angles = rotary_angles(torch.arange(longest), backbone.head_dim, base=10_000.0).repeat(len(embeddings), 1)
        there = torch.arange(longest) < lengths[:, None]
        causal = torch.ones(longest, longest, dtype=torch.bool).tril()
        x = embeddings
        for block in backbone.blocks:
            x = _padded_block(block, x, angles, causal & there[:, None, None, :])
        scores: Tensor = backbone.output(backbone.norm(x))
        return scores


def _padded_block(block: Any, x: Tensor, angles: Tensor, mask: Tensor) -> Tensor:
    """What `recipes.quickstart.model.Block` computes, on padded rows ``[batch, longest, width]``."""
    assert isinstance(block, Block)
    attention = block.attention
    projected = attention.query_key_value(block.attention_norm(x)).unflatten(-1, (3, attention.heads, -1))
    query, key, value = projected.unbind(2)
    query, key = (rotate(heads.flatten(0, 1), angles).view_as(heads) for heads in (query, key))
    query, key, value = (heads.transpose(1, 2) for heads in (query, key, value))
    mixed = scaled_dot_product_attention(query, key, value, attn_mask=mask)
    x = x + attention.output(mixed.transpose(1, 2).flatten(2))
    added: Tensor = x + block.feed_forward(block.feed_forward_norm(x))
    return added


class PaddedDataset(Dataset[Sample]):
    """Samples one by one, read as the packed variants read them."""

    def __init__(self, samples: SampleLoader) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples.source)

    def __getitem__(self, sample: int) -> Sample:
        source = self._samples.source
        measured = source.sizes(np.array([sample]))
        record = source.record(sample)
        rows = measured.media_rows
        sequence = self._samples.sequence(record, int(measured.tokens[0]), rows)
        pictures = [self._samples.media(record, sample, number, count, 0) for number, count in enumerate(rows.tolist())]
        is_media = torch.zeros(len(sequence), dtype=torch.bool)
        is_media[torch.from_numpy(sequence.media_positions)] = True
        return {
            "tokens": torch.from_numpy(sequence.tokens),
            "labels": torch.from_numpy(sequence.labels),
            "is_media": is_media,
            "pictures": [(torch.from_numpy(picture.patches), picture.grid, picture.rows) for picture in pictures],
        }


def pad(samples: list[Sample]) -> Batch:
    """Sequences padded to the longest one, pictures to the largest; at least one picture is expected."""
    pictures = [picture for sample in samples for picture in sample["pictures"]]
    fill = {"tokens": 0, "labels": IGNORED_LABEL, "is_media": 0}
    return {
        **{
            name: pad_sequence([sample[name] for sample in samples], batch_first=True, padding_value=value)
            for name, value in fill.items()
        },
        "lengths": torch.tensor([len(sample["tokens"]) for sample in samples]),
        "patches": pad_sequence([patches for patches, _, _ in pictures], batch_first=True),
        "grid": torch.tensor([grid for _, grid, _ in pictures]),
        "rows": torch.tensor([rows for _, _, rows in pictures]),
    }


class RankSampler(Sampler[int]):
    """This rank's half of every step: the same samples per step as in the packed variants."""

    def __init__(self, sampling: Sampling, rank: int, ranks: int) -> None:
        self._sampling, self._rank, self._ranks = sampling, rank, ranks

    def __len__(self) -> int:
        return self._sampling.steps * self._sampling.global_batch_size // self._ranks

    def __iter__(self) -> Any:
        for step in range(self._sampling.steps):
            yield from self._sampling.step(0, step)[self._rank :: self._ranks].tolist()


class PaddedData(L.LightningDataModule):
    """An ordinary DataLoader with a padding collate function."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self._packed = work.data()

    def train_dataloader(self) -> DataLoader[Sample]:
        """Half of each step's samples on each of the ranks."""
        assert self.trainer is not None
        self._packed.setup("fit")
        steps = self._packed.train_dataloader().steps
        assert isinstance(steps.sampling, Sampling), "a step is a number of samples here"
        ranks = self.trainer.world_size
        sampler = RankSampler(steps.sampling, self.trainer.global_rank, ranks)
        batch_size = steps.sampling.global_batch_size // ranks
        return DataLoader(PaddedDataset(steps.samples), batch_size=batch_size, sampler=sampler, collate_fn=pad)
