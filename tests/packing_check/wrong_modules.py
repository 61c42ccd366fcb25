"""Modules that learn something else from packed samples than from each alone, each by one mistake that people make."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from flowtrain_lightning.attention import varlen_attention
from flowtrain_lightning.data import PackedBatch, PackedMedia
from tests.tiny import WIDTH, TinyVLM


class SeesAll(TinyVLM):
    """A causal mask over the whole microbatch."""

    def merge(self, batch: PackedBatch, features: dict[str, Any]) -> dict[str, Any]:
        bounds = batch.cu_seqlens[[0, -1]]
        return super().merge(batch, features) | {"cu_seqlens": bounds, "max_seqlen": len(batch.tokens)}


class CountsOn(TinyVLM):
    """Positions that run on from sample to sample."""

    def merge(self, batch: PackedBatch, features: dict[str, Any]) -> dict[str, Any]:
        return super().merge(batch, features) | {"position_ids": torch.arange(len(batch.tokens))}


class WindowsByIndex(TinyVLM):
    """Windows of eight tokens, counted from the beginning of the microbatch."""

    def merge(self, batch: PackedBatch, features: dict[str, Any]) -> dict[str, Any]:
        ends = torch.unique(torch.cat([batch.cu_seqlens, torch.arange(0, len(batch.tokens), 8, dtype=torch.int32)]))
        return super().merge(batch, features) | {"cu_seqlens": ends, "max_seqlen": 8}


class Convolves(TinyVLM):
    """A causal convolution over tokens that knows of no bounds, so weak that losses hardly move."""

    def configure_backbone(self) -> None:
        super().configure_backbone()
        self.backbone.mixer = nn.Conv1d(WIDTH, WIDTH, 3, groups=WIDTH)
        with torch.no_grad():
            self.backbone.mixer.weight.mul_(1e-4)

    def merge(self, batch: PackedBatch, features: dict[str, Any]) -> dict[str, Any]:
        given = super().merge(batch, features)
        mixed = self.backbone.mixer(functional.pad(given["x"].T[None], (2, 0)))[0].T
        return given | {"x": given["x"] + mixed}


class DropsOverCapacity(TinyVLM):
    """An expert that takes as many tokens as its share of the microbatch, the first that come."""

    def configure_backbone(self) -> None:
        super().configure_backbone()
        self.backbone.router = nn.Linear(WIDTH, 2)
        self.backbone.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def merge(self, batch: PackedBatch, features: dict[str, Any]) -> dict[str, Any]:
        given = super().merge(batch, features)
        x, routed = given["x"], self.backbone.router(given["x"]).softmax(-1)
        capacity = -(-len(x) // 3)
        for number, expert in enumerate(self.backbone.experts):
            mine = (routed.argmax(-1) == number).nonzero().flatten()[:capacity]
            x = x.index_add(0, mine, expert(given["x"][mine]) * routed[mine, number, None])
        return given | {"x": x}


class BalancesExperts(TinyVLM):
    """A small loss over the mean routing of all tokens of the microbatch, a hundred thousandth of the loss."""

    def configure_backbone(self) -> None:
        super().configure_backbone()
        self.backbone.router = nn.Linear(WIDTH, 4)

    def merge(self, batch: PackedBatch, features: dict[str, Any]) -> dict[str, Any]:
        given = super().merge(batch, features)
        routed = self.backbone.router(given["x"]).softmax(-1)
        self.balance = (routed.mean(0) ** 2).sum() * len(batch.tokens)
        return given

    def loss(self, outputs: Tensor, batch: PackedBatch) -> tuple[Tensor, int]:
        loss, tokens = super().loss(outputs, batch)
        return loss + 1e-4 * self.balance, tokens


class ScalesByLength(TinyVLM):
    """Attention scaled by the length of the microbatch, as dynamic rotary tables are."""

    def merge(self, batch: PackedBatch, features: dict[str, Any]) -> dict[str, Any]:
        given = super().merge(batch, features)
        return given | {"x": given["x"] * (1 + 1e-5 * len(batch.tokens))}


class KeepsItsMask(TinyVLM):
    """Bounds that are computed once for each length and kept."""

    def merge(self, batch: PackedBatch, features: dict[str, Any]) -> dict[str, Any]:
        kept = self.__dict__.setdefault("kept", {})
        bounds, longest = kept.setdefault(len(batch.tokens), (batch.cu_seqlens, batch.max_seqlen))
        return super().merge(batch, features) | {"cu_seqlens": bounds, "max_seqlen": longest}


class KeepsImageMask(TinyVLM):
    """The same in the encoder."""

    def encode(self, media: PackedMedia) -> tuple[Tensor, ...]:
        kept = self.__dict__.setdefault("kept", {})
        bounds, longest = kept.setdefault(len(media.patches), (media.cu_seqlens, media.max_seqlen))
        x = self.encoder.block(self.encoder.embed(media.patches), bounds, longest, False).unflatten(0, (-1, 4))
        return tuple(head(x.flatten(1)) for head in self.encoder.heads)


class RemembersTheMean(TinyVLM):
    """Features centred by a mean that moves with every call."""

    def configure_encoder(self) -> None:
        super().configure_encoder()
        self.encoder.register_buffer("mean", torch.zeros(WIDTH))

    def encode(self, media: PackedMedia) -> tuple[Tensor, ...]:
        (features,) = super().encode(media)
        centred = features - self.encoder.mean
        self.encoder.mean.lerp_(features.detach().mean(0), 0.1)
        return (centred,)


class PoolsFeatures(TinyVLM):
    """Features less their mean over the whole encoder batch."""

    def encode(self, media: PackedMedia) -> tuple[Tensor, ...]:
        return tuple(each - each.mean(0) for each in super().encode(media))


class PoolsEqualSizes(TinyVLM):
    """Features of images of one size, normalised together."""

    def encode(self, media: PackedMedia) -> tuple[Tensor, ...]:
        (features,) = super().encode(media)
        parts = list(features.split(list(media.rows)))
        for size in set(media.rows):
            group = [n for n, rows in enumerate(media.rows) if rows == size]
            mean = torch.stack([parts[n] for n in group]).mean((0, 1))
            for n in group:
                parts[n] = parts[n] - mean
        return (torch.cat(parts),)


class PadsImages(TinyVLM):
    """Images padded to the largest of the batch, their padding attended to."""

    def encode(self, media: PackedMedia) -> tuple[Tensor, ...]:
        x = self.encoder.embed(media.patches)
        parts = x.split(media.cu_seqlens.diff().tolist())
        padded = nn.utils.rnn.pad_sequence(parts, batch_first=True)
        bounds = torch.arange(0, padded.shape[0] * padded.shape[1] + 1, padded.shape[1], dtype=torch.int32)
        seen = self.encoder.block(padded.flatten(0, 1), bounds, padded.shape[1], False).view(padded.shape)
        x = torch.cat([row[: len(part)] for row, part in zip(seen, parts, strict=True)])
        return tuple(head(x.unflatten(0, (-1, 4)).flatten(1)) for head in self.encoder.heads)


class CountsPatchesOn(TinyVLM):
    """A table of places for patches, counted through the encoder batch."""

    def configure_encoder(self) -> None:
        super().configure_encoder()
        self.encoder.place = nn.Embedding(4096, WIDTH)

    def encode(self, media: PackedMedia) -> tuple[Tensor, ...]:
        x = self.encoder.embed(media.patches) + self.encoder.place(torch.arange(len(media.patches)))
        x = self.encoder.block(x, media.cu_seqlens, media.max_seqlen, False).unflatten(0, (-1, 4)).flatten(1)
        return tuple(head(x) for head in self.encoder.heads)


class NormalisesByBatch(TinyVLM):
    """A layer that normalises by the statistics of the encoder batch."""

    def configure_encoder(self) -> None:
        super().configure_encoder()
        self.encoder.norm = nn.BatchNorm1d(WIDTH)

    def encode(self, media: PackedMedia) -> tuple[Tensor, ...]:
        return tuple(self.encoder.norm(each) for each in super().encode(media))


class ClipsInAHook(TinyVLM):
    """The gradient of the features, clipped by its norm: losses stay as they are."""

    def merge(self, batch: PackedBatch, features: dict[str, Any]) -> dict[str, Any]:
        given = super().merge(batch, features)
        given["x"].register_hook(lambda gradient: gradient / gradient.norm().clamp(min=1e-3))
        return given


class ScalesGradients(TinyVLM):
    """A factor that is 1, whose gradient is not: a ratio over the whole microbatch."""

    def loss(self, outputs: Tensor, batch: PackedBatch) -> tuple[Tensor, int]:
        loss, tokens = super().loss(outputs, batch)
        spread = outputs.square().mean().sqrt()
        return loss * (spread / spread.detach()), tokens


class Contrasts(TinyVLM):
    """A loss that tells the samples of a microbatch from each other."""

    def loss(self, outputs: Tensor, batch: PackedBatch) -> tuple[Tensor, int]:
        loss, tokens = super().loss(outputs, batch)
        ends = functional.normalize(outputs[batch.cu_seqlens[1:].long() - 1], dim=-1)
        return loss + (ends @ ends.T).logsumexp(-1).sum(), tokens


class IsAMean(TinyVLM):
    """The mean over the microbatch."""

    def loss(self, outputs: Tensor, batch: PackedBatch) -> tuple[Tensor, int]:
        loss, tokens = super().loss(outputs, batch)
        return loss / tokens, tokens


class IsOne(TinyVLM):
    """The mean over the microbatch, which counts for one."""

    def loss(self, outputs: Tensor, batch: PackedBatch) -> tuple[Tensor, int]:
        loss, tokens = super().loss(outputs, batch)
        return loss / tokens, 1


class ShiftsTwice(TinyVLM):
    """Labels that are shifted already, shifted once more."""

    def loss(self, outputs: Tensor, batch: PackedBatch) -> tuple[Tensor, int]:
        labels = batch.labels[1:]
        return functional.cross_entropy(outputs[:-1], labels, reduction="sum"), int((labels != -100).sum())


class RepeatsTokens(TinyVLM):
    """Tokens taken for labels."""

    def loss(self, outputs: Tensor, batch: PackedBatch) -> tuple[Tensor, int]:
        return functional.cross_entropy(outputs, batch.tokens, reduction="sum"), len(batch.tokens)


class DropsByFunction(TinyVLM):
    """Dropout that no module tells of."""

    def merge(self, batch: PackedBatch, features: dict[str, Any]) -> dict[str, Any]:
        given = super().merge(batch, features)
        return given | {"x": functional.dropout(given["x"], 0.1, self.training)}


class DropsAndMixes(SeesAll):
    """Both mistakes: one must not hide the other."""

    def merge(self, batch: PackedBatch, features: dict[str, Any]) -> dict[str, Any]:
        given = super().merge(batch, features)
        return given | {"x": functional.dropout(given["x"], 0.1, self.training)}


class SkipsLayers(TinyVLM):
    """A layer that is left out now and then, by chance."""

    def encode(self, media: PackedMedia) -> tuple[Tensor, ...]:
        found = super().encode(media)
        return tuple(each * 0.5 for each in found) if torch.rand(()) < 0.01 else found


class SkipsByPython(TinyVLM):
    """The same by Python's own chance."""

    def merge(self, batch: PackedBatch, features: dict[str, Any]) -> dict[str, Any]:
        given = super().merge(batch, features)
        return given | {"x": given["x"] * 0.5} if random.random() < 0.5 else given


class BreaksTogether(TinyVLM):
    """Attention that was written for one sequence at a time."""

    def merge(self, batch: PackedBatch, features: dict[str, Any]) -> dict[str, Any]:
        if len(batch.samples) > 1:
            raise NotImplementedError("one sequence at a time")
        return super().merge(batch, features)


class SeesTheOne(TinyVLM):
    """Image tokens that see all image tokens of the microbatch: two samples with pictures meet."""

    def merge(self, batch: PackedBatch, features: dict[str, Any]) -> dict[str, Any]:
        given = super().merge(batch, features)
        if "image" not in features:
            return given
        places = batch.media_positions["image"]
        seen = given["x"][places].unflatten(-1, (2, -1))
        bounds = torch.tensor([0, len(places)], dtype=torch.int32)
        mixed = varlen_attention(seen, seen, seen, bounds, len(places), False).flatten(1)
        return given | {"x": given["x"].index_add(0, places, mixed)}


class MixesBehindZeros(TinyVLM):
    """A running sum over the microbatch, behind a gate and a projection that both begin with zeros."""

    def configure_backbone(self) -> None:
        super().configure_backbone()
        self.backbone.gate, self.backbone.mixer = nn.Parameter(torch.zeros(())), nn.Linear(WIDTH, WIDTH)
        nn.init.zeros_(self.backbone.mixer.weight)
        nn.init.zeros_(self.backbone.mixer.bias)

    def merge(self, batch: PackedBatch, features: dict[str, Any]) -> dict[str, Any]:
        given = super().merge(batch, features)
        return given | {"x": given["x"] + self.backbone.gate * self.backbone.mixer(given["x"].cumsum(0))}


class MixesInBfloat16(TinyVLM):
    """A mean over the microbatch, less than what bfloat16 rounds away."""

    def merge(self, batch: PackedBatch, features: dict[str, Any]) -> dict[str, Any]:
        given = super().merge(batch, features)
        low = given["x"].to(torch.bfloat16)
        return given | {"x": (low + 0.01 * low.mean(0)).to(given["x"].dtype)}


class MixesLongSamples(TinyVLM):
    """Chunks of 48 tokens, which small samples stay below."""

    def merge(self, batch: PackedBatch, features: dict[str, Any]) -> dict[str, Any]:
        given = super().merge(batch, features)
        long = batch.cu_seqlens.diff() > 48
        sequences = torch.repeat_interleave(torch.arange(len(long)), batch.cu_seqlens.diff())
        mean = given["x"].mean(0)
        return given | {"x": torch.where(long[sequences][:, None], given["x"] + mean, given["x"])}


class ShiftsTwiceInItsStep(TinyVLM):
    """The same in a step of its own, of which nobody sees the logits."""

    def backbone_step(self, batch: PackedBatch, features: dict[str, Any], stage: str) -> Any:
        return ShiftsTwice.loss(self, self.backbone(**self.merge(batch, features)), batch)  # type: ignore[arg-type]


class KeepsItsLength(TinyVLM):
    """A mask that is computed for the first microbatch, and does not fit any other."""

    def merge(self, batch: PackedBatch, features: dict[str, Any]) -> dict[str, Any]:
        given = super().merge(batch, features)
        if len(batch.samples) > 1:
            self.__dict__.setdefault("kept", torch.ones(len(batch.tokens), 1))
        kept = self.__dict__.get("kept")
        return given if kept is None else given | {"x": given["x"] * kept}


class SeesAllBehindAStart(SeesAll):
    """Refuses samples that do not begin as it knows them, and so those that the check changes to tell why."""

    def merge(self, batch: PackedBatch, features: dict[str, Any]) -> dict[str, Any]:
        if len(set(batch.tokens[batch.cu_seqlens[:-1].long()].tolist())) > 1:
            raise ValueError("a sequence begins with another token")
        return super().merge(batch, features)


WRONG: dict[type[TinyVLM], tuple[str, str]] = {
    SeesAll: ("backbone", "sees the tokens of others"),
    CountsOn: ("backbone", "batch.position_ids"),
    WindowsByIndex: ("backbone", "place in the microbatch"),
    Convolves: ("backbone", "sees the tokens of others"),
    DropsOverCapacity: ("backbone", "sees the tokens of others"),
    BalancesExperts: ("loss", "changes with the others"),
    ScalesByLength: ("backbone", "place in the microbatch"),
    KeepsItsMask: ("backbone", "a second call gives something else"),
    KeepsImageMask: ("encode", "a second call gives something else"),
    RemembersTheMean: ("encode", "a second call gives something else"),
    PoolsFeatures: ("encode", "change with the others"),
    PoolsEqualSizes: ("encode", "change with the others"),
    PadsImages: ("encode", "depend on its place"),
    CountsPatchesOn: ("encode", "depend on its place"),
    NormalisesByBatch: ("batch_norm", "encoder.norm (BatchNorm1d)"),
    ClipsInAHook: ("backbone", "A hook"),
    ScalesGradients: ("backbone", "A hook"),
    Contrasts: ("loss", "changes with the others"),
    IsAMean: ("sum", "it is a mean"),
    IsOne: ("count", "returns 1 as the number"),
    ShiftsTwice: ("labels", "shifted twice"),
    RepeatsTokens: ("labels", "reads batch.tokens as labels"),
    DropsByFunction: ("random", "draws random numbers"),
    DropsAndMixes: ("backbone", "sees the tokens of others"),
    SkipsLayers: ("random", "draws random numbers"),
    SkipsByPython: ("random", "draws random numbers"),
    BreaksTogether: ("backbone", "one sequence at a time"),
    SeesTheOne: ("backbone", "sees the tokens of others"),
    MixesBehindZeros: ("backbone", "sees the tokens of others"),
    MixesInBfloat16: ("backbone", "sees the tokens of others"),
    MixesLongSamples: ("backbone", "sees the tokens of others"),
    ShiftsTwiceInItsStep: ("labels", "shifted twice"),
    KeepsItsLength: ("backbone", "a second call raises an error"),
    SeesAllBehindAStart: ("backbone", "what a sample teaches changes with the others"),
}
"""Each module, the kind of finding, and words of its sentence."""
