"""A module whose halves have mixtures of experts, stacked in one weight for all experts of a layer."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import flowtrain_lightning as flow
from flowtrain_lightning.parallel.experts.experts import grouped_product
from tests.tiny import WIDTH, Backbone, Block, Encoder, TinyVLM

EXPERTS, CHOSEN, RANK = 4, 2, 2


class Perceptrons(flow.Experts):
    """Perceptrons with a bias each."""

    def __init__(self, balance: float = 0.0) -> None:
        super().__init__(EXPERTS, balance)
        self.widen = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) / 4)
        self.bias = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH) / 4)
        self.narrow = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) / 4)

    def compute(self, rows: Tensor, weights: Mapping[str, Tensor], ends: Tensor) -> Tensor:
        expert = torch.searchsorted(ends, torch.arange(len(rows)), right=True)
        wide = grouped_product(rows, weights["widen"], ends) + weights["bias"][expert]
        return grouped_product(wide.tanh(), weights["narrow"], ends)


class MixtureBlock(Block):
    """A layer in which each row passes two of four experts, or all rows the same two.

    A router that is computed again in a backward would choose the two others.
    """

    def __init__(self, width: int, alike: bool, balance: float = 0.0) -> None:
        super().__init__(width)
        self.router = nn.Linear(width, EXPERTS)
        self.experts = Perceptrons(balance)
        self.alike = alike

    def forward(self, x: Tensor, cu_seqlens: Tensor, max_seqlen: int, causal: bool) -> Tensor:
        return through_experts(self, super().forward(x, cu_seqlens, max_seqlen, causal), alike=self.alike)


def through_experts(block: Any, x: Tensor, *, alike: bool = False) -> Tensor:
    """Rows, and what the experts of a block make of them."""
    scores = block.router(x).softmax(dim=-1)
    experts = block.experts.get_base_layer() if hasattr(block.experts, "base_layer") else block.experts
    chosen = experts.choose(scores * (-1 if _is_in_a_backward() else 1), CHOSEN)
    chosen = torch.arange(CHOSEN).expand_as(chosen) if alike else chosen
    return x + block.experts(x, chosen, scores.gather(-1, chosen))


def _is_in_a_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


class MixtureEncoder(Encoder):
    """Has experts in two of three layers."""

    def __init__(self, levels: int, dropout: float, alike: bool, balance: float) -> None:
        super().__init__(levels, dropout)
        self.more = nn.ModuleList(MixtureBlock(WIDTH, alike, balance) for _ in range(2))

    def forward(self, media: flow.PackedMedia) -> tuple[Tensor, ...]:
        x = self.block(self.embed(media.patches), media.cu_seqlens, media.max_seqlen, False)
        for block in self.more:
            x = block(x, media.cu_seqlens, media.max_seqlen, False)
        return tuple(head(x.unflatten(0, (-1, 4)).flatten(1)) for head in self.heads)


class MixtureBackbone(Backbone):
    """Has experts in two of three layers."""

    def __init__(self, alike: bool, balance: float) -> None:
        super().__init__()
        self.more = nn.ModuleList(MixtureBlock(WIDTH, alike, balance) for _ in range(2))

    def forward(self, x: Tensor, position_ids: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
        x = self.block(x + self.place(position_ids), cu_seqlens, max_seqlen, True)
        for block in self.more:
            x = block(x, cu_seqlens, max_seqlen, True)
        return self.head(x)


class Mixture(TinyVLM):
    """Halves with experts in some of their layers."""

    alike = False
    balance = 0.0

    def configure_encoder(self) -> None:
        self.encoder = MixtureEncoder(self.hparams["levels"], self.hparams["dropout"], self.alike, self.balance)
        if self.hparams["freeze_encoder"]:
            self.encoder.requires_grad_(False)

    def configure_backbone(self) -> None:
        self.backbone = MixtureBackbone(self.alike, self.balance)

    def slice_tokens(self, arguments: dict, own: slice) -> dict:
        return {**arguments, "x": arguments["x"][own], "position_ids": arguments["position_ids"][own]}


class Crowded(Mixture):
    """All rows pass the experts of one rank; those of others get none."""

    alike = True


class OnlyExperts(Mixture):
    """Of the backbone nothing trains but experts: without pictures nothing that comes to them wants a gradient."""

    def configure_backbone(self) -> None:
        super().configure_backbone()
        self.backbone.requires_grad_(False)
        for block in self.backbone.more:
            block.experts.requires_grad_()


class Balanced(Mixture):
    """Biases, which follow every step, have a say in who is chosen."""

    balance = 0.02


class LowRank(Perceptrons):
    """Perceptrons that are frozen, with a pair of small matrices of each beside the first product."""

    def __init__(self, balance: float = 0.0) -> None:
        super().__init__(balance)
        self.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(EXPERTS, RANK, WIDTH) / 2)
        self.up = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, RANK) / 2)

    def compute(self, rows: Tensor, weights: Mapping[str, Tensor], ends: Tensor) -> Tensor:
        added = grouped_product(grouped_product(rows, weights["down"], ends), weights["up"], ends)
        expert = torch.searchsorted(ends, torch.arange(len(rows)), right=True)
        wide = grouped_product(rows, weights["widen"], ends) + weights["bias"][expert] + added
        return grouped_product(wide.tanh(), weights["narrow"], ends)


class Adapted(Mixture):
    """Of the backbone's experts small matrices train, by stacks of its own."""

    def configure_backbone(self) -> None:
        super().configure_backbone()
        for block in self.backbone.more:
            block.experts = LowRank()


class AdaptedByPeft(Mixture):
    """Of the backbone's experts small matrices train, as ``peft`` adds them."""

    def configure_backbone(self) -> None:
        super().configure_backbone()
        adapt_by_peft(self.backbone.more)


def adapt_by_peft(blocks: Iterable[nn.Module]) -> None:
    """Adds adapters to the experts of blocks, and freezes all else of these."""
    peft = importlib.import_module("peft")
    stacks = ["experts.widen", "experts.narrow"]
    config = peft.LoraConfig(r=RANK, target_modules=[], target_parameters=stacks, init_lora_weights=False)
    for block in blocks:
        peft.inject_adapter_in_model(config, block)


class PlainBalance:
    """What keeps the experts of a plain loop equally full: every token that passes them until `step` is looked at."""

    def __init__(self, model: nn.Module) -> None:
        self._experts = [part for part in model.modules() if isinstance(part, Perceptrons) and part.balance is not None]
        self._chosen: list[list[int]] = [[] for _ in self._experts]
        for chosen, part in zip(self._chosen, self._experts, strict=True):
            part.register_forward_pre_hook(lambda _, given, chosen=chosen: chosen.extend(given[1].flatten().tolist()))

    def step(self) -> None:
        for chosen, part in zip(self._chosen, self._experts, strict=True):
            for expert in range(EXPERTS):
                fuller = chosen.count(expert) - len(chosen) / EXPERTS
                part.balance.raised[expert] -= (fuller > 0) - (fuller < 0)
            chosen.clear()
