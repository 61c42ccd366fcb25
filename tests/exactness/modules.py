"""Modules that train in the tests of exactness, by name."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR

from flowtrain_lightning.attention import varlen_attention
from flowtrain_lightning.data import PackedBatch, PackedMedia, SampleSizes
from flowtrain_lightning.parallel import TensorPlan, TensorStyle
from tests.exactness.mixture import (
    EXPERTS,
    Adapted,
    AdaptedByPeft,
    Balanced,
    Crowded,
    Mixture,
    OnlyExperts,
    Perceptrons,
    adapt_by_peft,
    through_experts,
)
from tests.exactness.two_losses import PLACES, places_of, told_places
from tests.exactness.uneven import Uneven
from tests.tiny import WIDTH, Backbone, Block, Encoder, TinyVLM


class UnusedLevel(TinyVLM):
    """Its encoder returns two tensors, of which the backbone takes the first only."""

    def __init__(self) -> None:
        super().__init__(levels=2)

    def merge(self, batch: PackedBatch, features: dict[str, Any]) -> dict[str, Any]:
        return super().merge(batch, {modality: levels[0] for modality, levels in features.items()})


class Noisy(TinyVLM):
    """What it encodes is scaled by numbers that numpy and Python draw."""

    couples = ("random",)

    def encode(self, media: PackedMedia) -> tuple[Tensor, ...]:
        scale = float(np.random.normal(1, 0.3)) * random.uniform(0.5, 2)
        return tuple(scale * level for level in super().encode(media))


class Counting(TinyVLM):
    """What it encodes depends on buffers that its forwards write: running statistics and a number of forwards."""

    couples = ("batch_norm", "encode")

    def configure_encoder(self) -> None:
        super().configure_encoder()
        self.encoder.norm = nn.BatchNorm1d(WIDTH)

    def encode(self, media: PackedMedia) -> tuple[Tensor, ...]:
        norm = self.encoder.norm
        levels = tuple(norm(level) for level in super().encode(media))
        return tuple((level - norm.running_mean) / (1 + norm.num_batches_tracked) for level in levels)


class OnePiece(nn.Module):
    """A model that exists in one piece, as those of Hugging Face do."""

    def __init__(self) -> None:
        super().__init__()
        self.visual = Encoder(levels=1, dropout=0.0)
        self.language = Backbone()


class Whole(TinyVLM):
    """Its halves are paths in a model that is built at once."""

    halves: ClassVar = {"encoder": ("model.visual",), "backbone": ("model.language",)}

    def configure_whole(self) -> None:
        self.model = OnePiece()

    @property
    def encoder(self) -> nn.Module:
        return self.model.visual

    @property
    def backbone(self) -> nn.Module:
        return self.model.language

    def encode(self, media: PackedMedia) -> tuple[Tensor, ...]:
        return self.model.visual(media)


class DeepEncoder(Encoder):
    """Two blocks in a list."""

    def __init__(self, levels: int, dropout: float) -> None:
        super().__init__(levels, dropout)
        self.more = nn.ModuleList(Block(WIDTH) for _ in range(2))

    def forward(self, media: PackedMedia) -> tuple[Tensor, ...]:
        x = self.block(self.embed(media.patches), media.cu_seqlens, media.max_seqlen, False)
        for block in self.more:
            x = block(x, media.cu_seqlens, media.max_seqlen, False)
        return tuple(head(x.unflatten(0, (-1, 4)).flatten(1)) for head in self.heads)


class DeepBackbone(Backbone):
    """Three blocks in a list, and one tensor for the embedding and the head."""

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.ModuleList(Block(WIDTH) for _ in range(3))
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor, position_ids: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
        x = self.block(x + self.place(position_ids), cu_seqlens, max_seqlen, True)
        for block in self.more:
            x = block(x, cu_seqlens, max_seqlen, True)
        return self.head(x)


class Deep(TinyVLM):
    """Halves of repeated blocks, with tied weights."""

    def configure_encoder(self) -> None:
        self.encoder = DeepEncoder(self.hparams["levels"], self.hparams["dropout"])
        if self.hparams["freeze_encoder"]:
            self.encoder.requires_grad_(False)

    def configure_backbone(self) -> None:
        self.backbone = DeepBackbone()


class DividedBlock(nn.Module):
    """Attention of four heads over two of keys and values, with a norm for each head; and a perceptron."""

    heads, shared = 4, 2

    def __init__(self) -> None:
        super().__init__()
        self.size = WIDTH // self.heads
        self.norm, self.head_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(self.size)
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, self.shared * self.size, bias=False)  # whose gradient would be 0
        self.value = nn.Linear(WIDTH, self.shared * self.size)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.widen, self.narrow = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, cu_seqlens: Tensor, max_seqlen: int, causal: bool) -> Tensor:
        query, key, value = (
            part(self.norm(x)).unflatten(-1, (-1, self.size)) for part in (self.query, self.key, self.value)
        )
        query = self.head_norm(query)
        x = x + self.out(varlen_attention(query, key, value, cu_seqlens, max_seqlen, causal).flatten(1))
        return x + self.narrow(self.widen(x).tanh())


class DividedEncoder(Encoder):
    """Two blocks that tensor ranks can divide."""

    def __init__(self, levels: int, dropout: float) -> None:
        super().__init__(levels, dropout)
        self.block = DividedBlock()


class DividedBackbone(DeepBackbone):
    """Blocks that tensor ranks can divide, and one tensor for the embedding and the head."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.more = DividedBlock(), nn.ModuleList(DividedBlock() for _ in range(2))


def divided_blocks(blocks: Sequence[str]) -> dict[str, TensorStyle]:
    """How tensor ranks divide the layers of some `DividedBlock`."""
    styles: dict[str, TensorStyle] = dict.fromkeys(("query", "key", "value", "widen"), "colwise")
    styles |= dict.fromkeys(("out", "narrow"), "rowwise") | {"head_norm": "replicated_with_grad_allreduce"}
    return {f"{block}.{name}": style for block in blocks for name, style in styles.items()}


class Divided(Deep):
    """Halves that tensor ranks can divide, with marks on some weights."""

    def configure_encoder(self) -> None:
        self.encoder = DividedEncoder(self.hparams["levels"], self.hparams["dropout"])
        if self.hparams["freeze_encoder"]:
            self.encoder.requires_grad_(False)

    def configure_backbone(self) -> None:
        self.backbone = DividedBackbone()
        for block in (self.backbone.block, *self.backbone.more):
            block.norm.weight.learns_fast = block.query.weight.learns_fast = True

    def configure_optimizers(self) -> Any:
        """Weights that carry a mark are a group of their own."""
        configured = super().configure_optimizers()
        optimizer, fast = configured["optimizer"], []
        for group in optimizer.param_groups:
            fast += [weight for weight in group["params"] if hasattr(weight, "learns_fast")]
            group["params"] = [weight for weight in group["params"] if not hasattr(weight, "learns_fast")]
        optimizer.add_param_group({"params": fast, "lr": 3e-2, "initial_lr": 3e-2, "weight_decay": 0.2})
        return configured

    def slice_tokens(self, arguments: dict[str, Any], own: slice) -> dict[str, Any]:
        return {**arguments, "x": arguments["x"][own], "position_ids": arguments["position_ids"][own]}

    def tensor_plan(self, role: str, ranks: int) -> TensorPlan:
        plan = divided_blocks(("encoder.block",) if role == "encoder" else ("backbone.block", "backbone.more.*"))
        if role == "backbone":
            plan |= {"backbone.embed": "embedding_rowwise", "backbone.head": "colwise_gather_output"}
        return plan


class DividedTower(Divided):
    """Its encoder has three blocks that tensor ranks can divide."""

    def configure_encoder(self) -> None:
        self.encoder = DeepEncoder(self.hparams["levels"], self.hparams["dropout"])
        self.encoder.block = DividedBlock()
        self.encoder.more = nn.ModuleList(DividedBlock() for _ in range(2))
        if self.hparams["freeze_encoder"]:
            self.encoder.requires_grad_(False)

    def tensor_plan(self, role: str, ranks: int) -> TensorPlan:
        of_tower = divided_blocks(("encoder.more.*",)) if role == "encoder" else {}
        return {**super().tensor_plan(role, ranks), **of_tower}


class FourDivided(Divided):
    """Its backbone has a block more."""

    def configure_backbone(self) -> None:
        super().configure_backbone()
        self.backbone.more.append(DividedBlock())


class SixDivided(FourDivided):
    """Its backbone has two blocks more still."""

    def configure_backbone(self) -> None:
        super().configure_backbone()
        self.backbone.more.extend(DividedBlock() for _ in range(2))


class EightDivided(SixDivided):
    """Its backbone has two blocks more still."""

    def configure_backbone(self) -> None:
        super().configure_backbone()
        self.backbone.more.extend(DividedBlock() for _ in range(2))


class DividedTokens(Divided):
    """Halves that tensor ranks can divide, in whose layers each computes on its share of the tokens."""

    def tensor_plan(self, role: str, ranks: int) -> TensorPlan:
        blocks = ("encoder.block",) if role == "encoder" else ("backbone.block", "backbone.more.*")
        return {**super().tensor_plan(role, ranks), **dict.fromkeys(blocks, "divided_tokens")}


class DividedMixtureBlock(DividedBlock):
    """Beside what tensor ranks divide, two of four experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, EXPERTS), Perceptrons(balance=0.02)

    def forward(self, x: Tensor, cu_seqlens: Tensor, max_seqlen: int, causal: bool) -> Tensor:
        return through_experts(self, super().forward(x, cu_seqlens, max_seqlen, causal))


class DividedMixture(Divided):
    """Halves that tensor ranks can divide, with experts in some of their layers."""

    def configure_encoder(self) -> None:
        self.encoder = DeepEncoder(self.hparams["levels"], self.hparams["dropout"])
        self.encoder.block = DividedBlock()
        self.encoder.more = nn.ModuleList(DividedMixtureBlock() for _ in range(2))

    def configure_backbone(self) -> None:
        super().configure_backbone()
        self.backbone.more = nn.ModuleList(DividedMixtureBlock() for _ in range(2))

    def tensor_plan(self, role: str, ranks: int) -> TensorPlan:
        return {**super().tensor_plan(role, ranks), **divided_blocks((f"{role}.more.*",))}


class DividedTokensMixture(DividedMixture):
    """The same, in whose backbone's layers each tensor rank computes on its share of the tokens."""

    def tensor_plan(self, role: str, ranks: int) -> TensorPlan:
        layers = ("backbone.block", "backbone.more.*") if role == "backbone" else ()
        tokens: dict[str, TensorStyle] = dict.fromkeys(layers, "divided_tokens")
        return {**super().tensor_plan(role, ranks), **tokens}


class AdaptedDividedMixture(DividedMixture):
    """Of the backbone's experts small matrices train, as ``peft`` adds them."""

    def configure_backbone(self) -> None:
        super().configure_backbone()
        adapt_by_peft(self.backbone.more)


class AdaptedDividedTokensMixture(DividedTokensMixture, AdaptedDividedMixture):
    """The same, with divided tokens."""


class Tower(Encoder):
    """Returns the four patches of each row as they are."""

    def forward(self, media: PackedMedia) -> Tensor:
        x = self.block(self.embed(media.patches), media.cu_seqlens, media.max_seqlen, False)
        return x.unflatten(0, (-1, 4))


class Projecting(Divided):
    """Its backbone half has the projector, beside the decoder."""

    halves: ClassVar = {"encoder": ("encoder",), "backbone": ("backbone", "projector")}

    def configure_encoder(self) -> None:
        self.encoder = Tower(levels=0, dropout=0.0)
        if self.hparams["freeze_encoder"]:
            self.encoder.requires_grad_(False)

    def configure_backbone(self) -> None:
        super().configure_backbone()
        self.projector = nn.Sequential(nn.Flatten(), nn.Linear(4 * WIDTH, WIDTH))

    def merge(self, batch: PackedBatch, features: dict[str, Any]) -> dict[str, Any]:
        rows = {modality: given[0] if isinstance(given, tuple) else given for modality, given in features.items()}
        return super().merge(batch, {modality: self.projector(given) for modality, given in rows.items()})

    def encode(self, media: PackedMedia) -> tuple[Tensor, ...]:
        return (self.encoder(media),)

    def configure_optimizers(self) -> Any:
        configured = super().configure_optimizers()
        group = {"params": list(self.projector.parameters()), "weight_decay": 0.0}
        configured["optimizer"].add_param_group({**group, "initial_lr": self.hparams["lr"]})
        return configured


class Particular(Deep):
    """Halves that are frozen in part, in four groups of parameters, with hooks that change gradients.

    Hooks on two weights double each of their gradients, and one of the module halves what has become of them in the
    groups that have no weight decay.
    """

    def configure_encoder(self) -> None:
        super().configure_encoder()
        self.encoder.embed.requires_grad_(False)

    def configure_backbone(self) -> None:
        super().configure_backbone()
        self.backbone.place.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        rates = iter((1e-2, 3e-3, 5e-3, 2e-2))
        groups = [
            {
                "params": [weight for weight in half.parameters() if (weight.ndim > 1) == matrices],
                "lr": next(rates),
                "weight_decay": 0.3 * matrices,
            }
            for half in (self.encoder, self.backbone)
            for matrices in (True, False)
        ]
        for half in (self.encoder, self.backbone):
            half.block.mlp[1].weight.register_hook(lambda gradient: 2 * gradient)
        optimizer = AdamW(groups)
        scheduler = StepLR(optimizer, step_size=2, gamma=0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        for weight in (weight for group in optimizer.param_groups[1::2] for weight in group["params"]):
            if weight.grad is not None:
                weight.grad.mul_(0.5)


class Telling(Divided):
    """A backbone of two losses."""

    loss_weights: ClassVar = {"backbone": 0.8, PLACES: 0.3}

    def loss(self, outputs: Tensor, batch: PackedBatch) -> Any:
        return {"backbone": super().loss(outputs, batch), PLACES: told_places(outputs, batch)}

    def loss_counts(self, sizes: SampleSizes) -> Mapping[str, int]:
        return places_of(sizes)


KINDS: dict[str, type[TinyVLM]] = {
    "tiny": TinyVLM,
    "unused level": UnusedLevel,
    "noisy": Noisy,
    "counting": Counting,
    "whole": Whole,
    "deep": Deep,
    "divided": Divided,
    "divided tokens": DividedTokens,
    "two losses": Telling,
    "divided tower": DividedTower,
    "four divided blocks": FourDivided,
    "six divided blocks": SixDivided,
    "eight divided blocks": EightDivided,
    "projecting": Projecting,
    "particular": Particular,
    "uneven": Uneven,
    "mixture": Mixture,
    "crowded": Crowded,
    "balanced": Balanced,
    "only experts": OnlyExperts,
    "adapted": Adapted,
    "adapted by peft": AdaptedByPeft,
    "divided mixture": DividedMixture,
    "divided tokens mixture": DividedTokensMixture,
    "adapted divided mixture": AdaptedDividedMixture,
    "adapted divided tokens mixture": AdaptedDividedTokensMixture,
}
