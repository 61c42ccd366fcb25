"""Tables of tiles are those that PyTorch makes of the mask of all pairs, and no tensor of that size is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.random import Generator
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flowtrain_lightning.data import IGNORED_LABEL, PackedBatch, TokenSequence
from flowtrain_lightning.data.loading.collate import pack_sequences
from flowtrain_lightning.models.block_attention import TILE, SightMask, block_mask, bounds_of_sight
from flowtrain_lightning.models.gemma import image_blocks
from flowtrain_lightning.models.paligemma import prefix_blocks
from tests.models.test_block_attention import MACHINES
from tests.waits import NeverWaiting

Blocks = Callable[[PackedBatch], Tensor | None]

TABLES = [f"{full}{of}_{what}" for full in ("", "full_") for of in ("kv", "q") for what in ("num_blocks", "indices")]

KINDS: dict[str, Blocks] = {
    "images": lambda batch: image_blocks(batch.media_positions.get("image", batch.targets[:0]), len(batch.tokens)),
    "prefixes": prefix_blocks,
    "neither": lambda batch: None,
}


def sequence(random: Generator, tokens: int) -> TokenSequence:
    """An image of any length anywhere, and an answer at the end."""
    begin, end = np.sort(random.integers(0, tokens, 2))
    labels = np.full(tokens, IGNORED_LABEL)
    labels[random.integers(0, tokens) :] = 7
    nothing = np.array([], dtype=np.int64)
    return TokenSequence(np.ones(tokens, dtype=np.int64), labels, nothing, nothing, np.arange(begin, end))


def microbatch(seed: int) -> PackedBatch:
    """One to five sequences of up to 400 tokens, often padded."""
    random = np.random.default_rng(seed)
    sequences = [sequence(random, tokens) for tokens in random.integers(1, 400, random.integers(1, 6))]
    return pack_sequences(sequences, range(len(sequences)), pad_to=int(random.integers(1, 1500)))


def pairs(batch: PackedBatch, blocks: Tensor | None, window: int | None) -> Tensor:
    """``[tokens, tokens]`` whether the first sees the second: within a sequence, what came before, and its block."""
    own = torch.arange(len(batch.tokens))
    sequences = torch.repeat_interleave(batch.cu_seqlens.diff())
    back = own[:, None] - own
    seen = (back >= 0) if window is None else (back >= 0) & (back < window)
    if blocks is not None:
        seen |= (blocks[:, None] == blocks) & (blocks >= 0)
    return seen & (sequences[:, None] == sequences)


def tables(batch: PackedBatch, kind: str, window: int | None) -> BlockMask:
    return block_mask(*bounds_of_sight(batch.cu_seqlens, KINDS[kind](batch), window, len(batch.tokens)))


WINDOWS = [None, 100, TILE, *(pytest.param(window, marks=pytest.mark.full) for window in (1, 300))]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("kind", KINDS)
def test_tables_are_those_of_the_mask_of_all_pairs(kind, window):
    counts = torch.zeros(3)
    for seed in range(8):
        batch = microbatch(seed)
        seen = pairs(batch, KINDS[kind](batch), window)

        def sees(batch: Any, head: Any, query: Tensor, key: Tensor, seen: Tensor = seen) -> Tensor:
            return seen[query, key]

        expected = create_block_mask(sees, None, None, *seen.shape, device="cpu")
        found = tables(batch, kind, window)
        assert found.seq_lengths == expected.seq_lengths
        for name in TABLES:
            assert torch.equal(getattr(found, name), getattr(expected, name)), (seed, name)
        own = torch.arange(len(seen))
        assert torch.equal(found.mask_mod(own[:1], own[:1], own[:, None], own), seen)
        partial, whole = found.kv_num_blocks.sum(), found.full_kv_num_blocks.sum()
        counts += torch.stack([partial, whole, found.kv_indices.numel() - partial - whole])
    in_part, as_a_whole, not_at_all = counts.tolist()
    assert min(in_part, not_at_all) > 0
    assert as_a_whole > 0 or (kind == "neither" and window in (1, 100, TILE))


@pytest.mark.parametrize("device", MACHINES)
@pytest.mark.parametrize(("kind", "window"), [("images", 100), ("prefixes", None), ("neither", 100)])
def test_attention_over_many_tiles_is_that_of_masks_of_all_pairs(kind, window, device):
    on_gpu = device == "cuda"  # on CPU PyTorch has no backward for it, and compiling takes long
    for seed in (1, 2):
        batch = microbatch(seed).to(torch.device(device))
        assert len(batch.tokens) > 3 * TILE
        torch.manual_seed(seed)
        tensors = [
            torch.randn(len(batch.tokens), heads, 16, device=device, requires_grad=on_gpu) for heads in (4, 2, 2)
        ]
        sight = SightMask(batch, KINDS[kind](batch))
        found = sight.attend_sparsely(*tensors, window, None, compiled=on_gpu)
        expected = sight.attend_densely(*tensors, window, None)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        if on_gpu:
            upstream = torch.randn_like(found)
            ours, theirs = (torch.autograd.grad(x, tensors, upstream) for x in (found, expected))
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


class Largest(TorchDispatchMode):
    """The most elements of a tensor that was made."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        sizes = (leaf.numel() for leaf in tree_leaves(made) if isinstance(leaf, Tensor))
        self.elements = max(self.elements, *sizes, 0)
        return made


@pytest.mark.parametrize("kind", KINDS)
def test_no_tensor_has_an_element_for_each_pair_and_the_host_never_waits(kind):
    random = np.random.default_rng(0)
    batch = pack_sequences([sequence(random, tokens) for tokens in (9000, 4000, 3000)], range(3), pad_to=16384)
    with Largest() as largest:
        tables(batch, kind, 1024)
    assert largest.elements == 16384 + TILE, "one of all tokens, padded to full tiles"
    there = batch.to(torch.device("meta"))
    with NeverWaiting():
        tables(there, kind, 1024)
