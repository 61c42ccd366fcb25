"""Trains a small decoder for some steps in this process and prints by how many bytes its peak memory rose."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch.nn import functional


class Layer(torch.nn.Module):
    """A gated decoder layer with grouped queries."""

    def __init__(self, hidden, inner, heads, key_value_heads, size):
        super().__init__()
        self.split, self.size = [heads * size, key_value_heads * size, key_value_heads * size], size
        self.qkv = torch.nn.Linear(hidden, sum(self.split), False)
        self.leave = torch.nn.Linear(heads * size, hidden, False)
        self.up, self.down = torch.nn.Linear(hidden, 2 * inner, False), torch.nn.Linear(inner, hidden, False)
        self.first, self.second = torch.nn.LayerNorm(hidden, bias=False), torch.nn.LayerNorm(hidden, bias=False)

    def forward(self, x):
        parts = self.qkv(self.first(x)).split(self.split, -1)
        q, k, v = (one.unflatten(-1, (-1, self.size)).transpose(1, 2) for one in parts)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.leave(seen.transpose(1, 2).flatten(2))
        gate, up = self.up(self.second(x)).chunk(2, -1)
        return x + self.down(functional.silu(gate) * up)


def memory(name):
    """``VmRSS``, or ``VmHWM`` for the peak, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def step(model, optimizer, *microbatches):
    for tokens in microbatches:
        functional.cross_entropy(model(tokens)[0], tokens[0]).backward()
    optimizer.step()
    optimizer.zero_grad()


def main():
    hidden, inner, heads, key_value_heads, size, layers, vocabulary, length = map(int, sys.argv[1:])
    tokens = torch.randint(0, 8, (1, 16))
    warm = torch.nn.Sequential(torch.nn.Embedding(8, 8), torch.nn.Linear(8, 8))
    step(warm, torch.optim.AdamW(warm.parameters()), tokens)  # libraries are loaded by the first use
    before = memory("VmRSS")
    stack = [Layer(hidden, inner, heads, key_value_heads, size) for _ in range(layers)]
    ends = torch.nn.Embedding(vocabulary, hidden), torch.nn.Linear(hidden, vocabulary, False)
    model = torch.nn.Sequential(ends[0], *stack, ends[1])
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    tokens = torch.randint(0, vocabulary, (1, length))
    step(model, optimizer, tokens[:, :16])  # makes the optimizer's states
    step(model, optimizer, tokens, tokens)
    print(memory("VmHWM") - before)


if __name__ == "__main__":
    main()
