"""Modules that are unusual and right: what they learn from packed samples is the sum of what they learn from each."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from flowtrain_lightning.data import PackedBatch, PackedMedia
from tests.exactness.modules import Deep, DeepBackbone
from tests.tiny import WIDTH, Block, TinyVLM


class Plain(TinyVLM):
    """The module of most tests."""


class TwoLevels(TinyVLM):
    """Features of two tensors."""

    def __init__(self) -> None:
        super().__init__(levels=2)


class Frozen(TinyVLM):
    """An encoder that does not train."""

    def __init__(self) -> None:
        super().__init__(freeze_encoder=True)


class FrozenBackbone(TinyVLM):
    """A backbone that does not train, behind an encoder that does."""

    def configure_backbone(self) -> None:
        super().configure_backbone()
        self.backbone.requires_grad_(False)


class DropsByModule(TinyVLM):
    """nn.Dropout, which the log tells of."""

    def __init__(self) -> None:
        super().__init__(dropout=0.3)


class SquaresLogits(TinyVLM):
    """A z-loss at all tokens, those without labels too."""

    def loss(self, outputs: Tensor, batch: PackedBatch) -> tuple[Tensor, int]:
        loss, tokens = super().loss(outputs, batch)
        return loss + 1e-3 * outputs.logsumexp(-1).square().sum(), tokens


class LooksFurther(TinyVLM):
    """Every token also learns the token after the next, within its sequence."""

    def configure_backbone(self) -> None:
        super().configure_backbone()
        self.backbone.further = nn.Linear(self.backbone.head.out_features, self.backbone.head.out_features)

    def loss(self, outputs: Tensor, batch: PackedBatch) -> tuple[Tensor, int]:
        loss, tokens = super().loss(outputs, batch)
        further = batch.tokens.roll(-2)
        sequence = torch.repeat_interleave(torch.arange(len(batch.cu_seqlens) - 1), batch.cu_seqlens.diff().long())
        inside = (sequence.roll(-2) == sequence) & (torch.arange(len(further)) < len(further) - 2)
        targets = torch.where(inside, further, -100)
        return loss + functional.cross_entropy(self.backbone.further(outputs), targets, reduction="sum"), tokens


class WeighsTargets(TinyVLM):
    """A weight for every target, and their sum as the count."""

    def loss(self, outputs: Tensor, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        each = functional.cross_entropy(outputs, batch.labels, reduction="none")
        weights = (batch.labels != -100) / (1.0 + batch.position_ids)
        return (each * weights).sum(), weights.sum()


class CountsSamples(TinyVLM):
    """Counts the samples, and not their tokens."""

    def loss(self, outputs: Tensor, batch: PackedBatch) -> tuple[Tensor, int]:
        return super().loss(outputs, batch)[0], len(batch.samples)


class HeadAtTargets(TinyVLM):
    """Logits at targets only: outputs are not one row for each token."""

    def backbone_step(self, batch: PackedBatch, features: dict[str, Any], stage: str) -> Any:
        given = self.merge(batch, features)
        x = given["x"] + self.backbone.place(given["position_ids"])
        hidden = self.backbone.block(x, given["cu_seqlens"], given["max_seqlen"], True)
        logits = self.backbone.head(hidden[batch.targets])
        return functional.cross_entropy(logits, batch.labels[batch.targets], reduction="sum"), len(batch.targets)


class IsZero(TinyVLM):
    """A policy gradient: the ratio of a probability to itself, times an advantage that sums to nothing."""

    def loss(self, outputs: Tensor, batch: PackedBatch) -> tuple[Tensor, int]:
        chosen = -functional.cross_entropy(outputs[batch.targets], batch.labels[batch.targets], reduction="none")
        ratio = (chosen - chosen.detach()).exp()
        advantage = torch.sin(3.0 * batch.tokens[batch.targets].to(chosen.dtype))
        return (-(ratio - 1) * advantage).sum(), len(batch.targets)


class PreparesMedia(TinyVLM):
    """What follows from sizes is made beforehand, and added to the patches."""

    def prepare_media(self, media: PackedMedia) -> dict[str, Tensor]:
        counts = media.cu_seqlens.diff().tolist()
        return {"places": torch.cat([torch.linspace(-1, 1, count) for count in counts])}

    def encode(self, media: PackedMedia) -> tuple[Tensor, ...]:
        patches = media.patches + 0.1 * media.inputs["places"].to(media.patches.dtype)[:, None]
        return super().encode(media.with_patches(patches))


class OwnGenerator(TinyVLM):
    """Noise from a generator that each sample seeds."""

    def merge(self, batch: PackedBatch, features: dict[str, Any]) -> dict[str, Any]:
        given = super().merge(batch, features)
        noise = []
        for sample, length in zip(batch.samples, batch.cu_seqlens.diff().tolist(), strict=False):
            own = torch.Generator().manual_seed(sample)
            noise.append(torch.randn(length, WIDTH, generator=own, dtype=given["x"].dtype))
        return given | {"x": given["x"] + 0.1 * torch.cat(noise)}


class SeedsEachSample(TinyVLM):
    """The same by torch's generator, which is given back as it was."""

    def merge(self, batch: PackedBatch, features: dict[str, Any]) -> dict[str, Any]:
        given = super().merge(batch, features)
        noise = []
        with torch.random.fork_rng(devices=[]):
            for sample, length in zip(batch.samples, batch.cu_seqlens.diff().tolist(), strict=False):
                torch.manual_seed(sample)
                noise.append(torch.randn(length, WIDTH, dtype=given["x"].dtype))
        return given | {"x": given["x"] + 0.1 * torch.cat(noise)}


class RoundsToFloat32(TinyVLM):
    """A norm and logits in float32, as Hugging Face's models have."""

    def merge(self, batch: PackedBatch, features: dict[str, Any]) -> dict[str, Any]:
        given = super().merge(batch, features)
        single = given["x"].float()
        normal = single * (single.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        return given | {"x": normal.to(given["x"].dtype)}

    def loss(self, outputs: Tensor, batch: PackedBatch) -> tuple[Tensor, int]:
        return super().loss(outputs.float(), batch)


class KeepsItsTable(TinyVLM):
    """A table that stays in float32 when the module is moved, as rotary frequencies do in transformers 5.17."""

    def configure_backbone(self) -> None:
        super().configure_backbone()
        self.table = [torch.linspace(0.1, 1.0, WIDTH, dtype=torch.float32)]

    def merge(self, batch: PackedBatch, features: dict[str, Any]) -> dict[str, Any]:
        given = super().merge(batch, features)
        table = self.table[0].to(given["x"].device)
        return given | {"x": given["x"] + batch.position_ids[:, None].float() @ table[None].float()}


class OnlyFloat32(TinyVLM):
    """Takes no other precision."""

    def encode(self, media: PackedMedia) -> tuple[Tensor, ...]:
        if media.patches.dtype != torch.float32:
            raise TypeError("this kernel computes in float32")
        return super().encode(media)


class FrozenStatistics(TinyVLM):
    """Batch norm that keeps the statistics that it has, as of a pretrained tower."""

    def configure_encoder(self) -> None:
        super().configure_encoder()
        self.encoder.norm = nn.BatchNorm1d(WIDTH).eval()

    def encode(self, media: PackedMedia) -> tuple[Tensor, ...]:
        return tuple(self.encoder.norm(each) for each in super().encode(media))


class GrowsATable(TinyVLM):
    """A table of positions that grows when a longer sequence comes, and a count of calls."""

    def configure_backbone(self) -> None:
        super().configure_backbone()
        self.backbone.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def merge(self, batch: PackedBatch, features: dict[str, Any]) -> dict[str, Any]:
        given = super().merge(batch, features)
        self.backbone.calls += 1
        table = self.__dict__.get("table")
        if table is None or len(table) < batch.max_seqlen:
            self.table = table = torch.arange(batch.max_seqlen).double().sin()
        return given | {"x": given["x"] + table[batch.position_ids].to(given["x"].dtype)[:, None]}


class Recomputes(TinyVLM):
    """Activations that are computed again."""

    def encode(self, media: PackedMedia) -> tuple[Tensor, ...]:
        x = self.encoder.embed(media.patches)
        x = checkpoint(self.encoder.block, x, media.cu_seqlens, media.max_seqlen, False, use_reentrant=False)
        return tuple(head(x.unflatten(0, (-1, 4)).flatten(1)) for head in self.encoder.heads)


class ClipsEachSample(TinyVLM):
    """A hook that works within each sample."""

    def merge(self, batch: PackedBatch, features: dict[str, Any]) -> dict[str, Any]:
        given = super().merge(batch, features)
        lengths = batch.cu_seqlens.diff().tolist()

        def clipped(gradient: Tensor) -> Tensor:
            return torch.cat([part / part.norm().clamp(min=1e-3) for part in gradient.split(lengths)])

        given["x"].register_hook(clipped)
        return given


class PadsWithinAMask(TinyVLM):
    """Sequences padded to the longest, with a mask: sums of other lengths, so other rounding."""

    def backbone_step(self, batch: PackedBatch, features: dict[str, Any], stage: str) -> Any:
        given = self.merge(batch, features)
        x = given["x"] + self.backbone.place(given["position_ids"])
        lengths = batch.cu_seqlens.diff().tolist()
        padded = nn.utils.rnn.pad_sequence(x.split(lengths), batch_first=True)
        block, size = self.backbone.block, padded.shape[1]
        query, key, value = block.attention(block.norm(padded)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        there = torch.arange(size) < torch.tensor(lengths)[:, None]
        mask = there[:, None, None] & torch.ones(size, size, dtype=torch.bool).tril() | torch.eye(size).bool()
        seen = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask).transpose(1, 2).flatten(2)
        padded = padded + block.out(seen)
        logits = self.backbone.head(padded + block.mlp(padded))[there]
        return functional.cross_entropy(logits, batch.labels, reduction="sum"), int((batch.labels != -100).sum())


class Projects(TinyVLM):
    """A projector that runs wherever features are given, of no rows too."""

    halves = {"encoder": ("encoder",), "backbone": ("backbone", "projector")}  # noqa: RUF012

    def configure_backbone(self) -> None:
        super().configure_backbone()
        self.projector = nn.Linear(WIDTH, WIDTH)

    def merge(self, batch: Any, features: Any) -> Any:
        return super().merge(batch, {name: self.projector(rows) for name, rows in features.items()})


class ProjectsSome(Projects):
    """The same, which leaves it out where a sample has no media."""

    def merge(self, batch: Any, features: Any) -> Any:
        return super().merge(batch, features if batch.media_positions else {})


class ReadingBackbone(DeepBackbone):
    """Adds the embeddings behind every block but the first."""

    def forward(self, x: Tensor, position_ids: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
        x = first = x + self.place(position_ids)
        x = self.block(x, cu_seqlens, max_seqlen, True)
        for block in self.more:
            x = block(x, cu_seqlens, max_seqlen, True) + first
        return self.head(x)


class ReadsAgain(Deep):
    """Its backbone reads the embeddings beside hidden states."""

    def configure_backbone(self) -> None:
        self.backbone = ReadingBackbone()


class LeavingBlock(Block):
    """Leaves a term of the loss."""

    term: Tensor

    def forward(self, *inputs: Any) -> Tensor:
        made: Tensor = super().forward(*inputs)
        self.term = made.square().sum()
        return made


class LeavesTerms(Deep):
    """Each block leaves a term beside hidden states, as balancing losses are."""

    def configure_backbone(self) -> None:
        self.backbone = DeepBackbone()
        self.backbone.block = LeavingBlock(WIDTH)
        self.backbone.more = nn.ModuleList(LeavingBlock(WIDTH) for _ in range(3))

    def loss(self, outputs: Tensor, batch: PackedBatch) -> tuple[Tensor, int]:
        loss, tokens = super().loss(outputs, batch)
        terms = [block.term for block in (self.backbone.block, *self.backbone.more)]
        return (loss + 0.01 * sum(terms) if tokens else loss), tokens


class HoldsALock(TinyVLM):
    """Holds what nobody can copy, and a setting that its setup makes."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()

    def setup(self, stage: str) -> None:
        self.scale = 2.0

    def loss(self, outputs: Tensor, batch: PackedBatch) -> tuple[Tensor, int]:
        with self.lock:
            loss, tokens = super().loss(outputs, batch)
        return self.scale * loss, tokens


class ComputesInHalfPrecision(TinyVLM):
    """A block under an autocast that the module sets itself."""

    def backbone_step(self, batch: PackedBatch, features: dict[str, Any], stage: str) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            outputs = self.backbone(**self.merge(batch, features))
        return self.loss(outputs, batch)


class TakesTimesInFloat32(TinyVLM):
    """A layer on positions in float32, as of weights that nobody has made float64."""

    def configure_backbone(self) -> None:
        super().configure_backbone()
        self.backbone.time = nn.Linear(1, WIDTH)

    def merge(self, batch: PackedBatch, features: dict[str, Any]) -> dict[str, Any]:
        given = super().merge(batch, features)
        return given | {"x": given["x"] + self.backbone.time(batch.position_ids[:, None].float() / 10)}


RIGHT = (
    Plain,
    TwoLevels,
    Frozen,
    FrozenBackbone,
    DropsByModule,
    SquaresLogits,
    LooksFurther,
    WeighsTargets,
    CountsSamples,
    HeadAtTargets,
    IsZero,
    PreparesMedia,
    OwnGenerator,
    SeedsEachSample,
    RoundsToFloat32,
    KeepsItsTable,
    OnlyFloat32,
    FrozenStatistics,
    GrowsATable,
    Recomputes,
    ClipsEachSample,
    PadsWithinAMask,
    Projects,
    HoldsALock,
    ComputesInHalfPrecision,
    TakesTimesInFloat32,
)
