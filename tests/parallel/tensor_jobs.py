"""What a rank does in the tests of tensor plans; it writes down what it saw."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from flowtrain_lightning.parallel import local_part
from flowtrain_lightning.parallel.tensor_plan import TensorPlan, divide_layers
from tests.forks import write_down

PLAN: TensorPlan = {
    "half.words": "embedding_rowwise",
    "half.layers.*.widen": "colwise",
    "half.layers.*.narrow": "rowwise",
    "half.scores": "colwise_gather_output",
}
REFUSED: dict[str, TensorPlan] = {
    "nothing of that name": {"half.layer.*.widen": "colwise"},
    "an unknown style": {"half.scores": "diagonal"},  # type: ignore[dict-item]
    "another kind of module": {"half.words": "colwise"},
    "an odd width": {"half.odd": "colwise"},
    "one of two that are tied": {"half.words": "embedding_rowwise"},
}


class Widening(nn.Module):
    """What is repeated."""

    def __init__(self) -> None:
        super().__init__()
        self.widen, self.narrow = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(self.widen(x).tanh())


class Words(nn.Module):
    """An embedding, layers, and the embedding once more as a head."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.scores = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
        self.layers = nn.Sequential(Widening(), Widening())
        self.odd = nn.Linear(4, 3)
        self.scores.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.scores(self.layers(self.words(tokens)))


def divide(folder: Path) -> None:
    """What a rank holds of a divided half and what it computes, beside the whole; and what of a plan is refused."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    mesh, tokens = init_device_mesh("cpu", (2,)), torch.arange(6)
    whole, half = _built(), _built()
    half.layers[1].narrow.requires_grad_(False)
    found: dict[str, Any] = {"summed": len(divide_layers({"half": half}, PLAN, mesh))}
    found["held"] = [local_part(weight).numel() for weight in (half.words.weight, half.layers[0].narrow.weight)]
    found["is tied"] = half.scores.weight is half.words.weight
    found["stays frozen"] = not half.layers[1].narrow.weight.requires_grad
    found["error"] = float((half(tokens) - whole(tokens)).abs().max())
    for name, plan in REFUSED.items():
        try:
            divide_layers({"half": _built()}, plan, mesh)
        except ValueError as error:
            found[name] = str(error)
    write_down(folder, found)
    dist.destroy_process_group()


def _built() -> Words:
    torch.manual_seed(0)
    return Words().double()
