"""Repeated layers are compiled once for all numbers of tokens, and compute what they computed before."""

from __future__ import annotations

import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

from flowtrain_lightning.compute.compile_blocks import compile_blocks


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.inner(self.norm(hidden)).relu()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


def test_layers_of_a_kind_share_one_compilation_for_all_numbers_of_tokens():
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, counter = Model(), CompileCounter()
    names, sizes = list(model.state_dict()), (5, 17, 3, 64, 129, 31)
    expected = [model(torch.ones(size, 8)) for size in sizes]
    compile_blocks(model, backend=counter)
    found = [model(torch.ones(size, 8)) for size in sizes[:1]]
    after_warm_up = counter.frame_count
    found += [model(torch.ones(size, 8)) for size in sizes[1:]]
    assert after_warm_up == 2, "one for the first layer, whose input needs no gradient, and one for all others"
    assert counter.frame_count == after_warm_up
    assert list(model.state_dict()) == names
    torch.testing.assert_close(found, expected)
    torch._dynamo.reset()
