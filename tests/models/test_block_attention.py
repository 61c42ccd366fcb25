"""Decoders whose images are seen whole: dense masks and sparse ones say the same, and nothing is left unsaid."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from flowtrain_lightning.data import IGNORED_LABEL, PackedBatch
from flowtrain_lightning.models.block_attention import SightMask, attend_in_blocks

transformers = pytest.importorskip("transformers")

LENGTHS = (7, 1, 12)
BLOCKS = torch.tensor([-1, 0, 0, 0, -1, 1, 1, 1, -1, -1, 2, 2, 2, 2, 2, -1, -1, 3, 3, -1])
"""Of the tokens; block 1 reaches over two sequences, whose tokens do not see each other all the same."""

MACHINES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]


def microbatch(device: str = "cpu") -> PackedBatch:
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    tokens = torch.ones_like(positions)
    ends = torch.tensor([0, *LENGTHS], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    labels, nowhere = torch.full_like(tokens, IGNORED_LABEL), torch.zeros(0, dtype=torch.int64)
    batch = PackedBatch(tokens, labels, positions, ends, max(LENGTHS), {}, (0, 1, 2), nowhere)
    return batch.to(torch.device(device))


def by_definition(
    query: Tensor, key: Tensor, value: Tensor, blocks: Tensor, window: int, softcap: float, within: bool = False
) -> Tensor:
    """Attention token by token, in words: one's sequence, and there what came before, or one's block.

    ``within`` the window, that is: of one's block no more of what came before than of others.
    """
    sequences = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    shared, outputs = query.shape[1] // key.shape[1], []
    for token, head in product(range(len(query)), range(query.shape[1])):
        seen = [
            other
            for other in range(len(query))
            if sequences[other] == sequences[token]
            and (
                0 <= token - other < window
                or (blocks[token] == blocks[other] >= 0 and (not within or token - other < window))
            )
        ]
        scores = key[seen, head // shared] @ query[token, head] * query.shape[2] ** -0.5
        outputs.append((softcap * torch.tanh(scores / softcap)).softmax(0) @ value[seen, head // shared])
    return torch.stack(outputs).view_as(query)


def inputs(dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
    torch.manual_seed(0)
    shapes = ((sum(LENGTHS), 4, 16), (sum(LENGTHS), 2, 16), (sum(LENGTHS), 2, 16))
    return [torch.randn(shape, dtype=dtype, device=device, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("blocks", [None, BLOCKS])
def test_every_token_sees_those_before_it_and_its_block(blocks, window, softcap):
    tensors = inputs(torch.float64)
    found = SightMask(microbatch(), blocks).attend(*tensors, window, softcap)
    none = torch.full_like(BLOCKS, -1) if blocks is None else blocks
    expected = by_definition(*tensors, none, window or 99, softcap or 1e9)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    upstream = torch.randn_like(found)
    for ours, theirs in zip(*(torch.autograd.grad(x, tensors, upstream) for x in (found, expected)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("window", [None, 3, 99])
def test_blocks_may_be_seen_in_layers_with_windows_alone_and_within_these(window):
    tensors = inputs(torch.float64)
    sight = SightMask(microbatch(), BLOCKS, in_windows=True)
    seen = torch.full_like(BLOCKS, -1) if window is None else BLOCKS
    found = [sight.attend(*tensors, each, None) for each in (window, None, window)]  # layers take turns
    expected = by_definition(*tensors, seen, window or 99, 1e9, within=True)
    for each in (found[0], found[2]):
        torch.testing.assert_close(each, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("device", MACHINES)
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 3])
def test_the_sparse_mask_of_gpus_says_what_the_dense_one_does(device, window, softcap):
    blocks = BLOCKS.to(device)
    on_gpu = device == "cuda"  # on CPU PyTorch has no backward for it, and compiling takes long
    tensors = [tensor.requires_grad_(on_gpu) for tensor in inputs(torch.float32, device)]
    mask = SightMask(microbatch(device), blocks)
    found = mask.attend_sparsely(*tensors, window, softcap, compiled=on_gpu)
    expected = SightMask(microbatch(device), blocks).attend_densely(*tensors, window, softcap)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    if on_gpu:
        upstream = torch.randn_like(found)
        for ours, theirs in zip(*(torch.autograd.grad(x, tensors, upstream) for x in (found, expected)), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "arguments", "words"),
    [
        ({}, {}, r"was not told which tokens see which\. Pass sight=SightMask"),
        ({"attention_dropout": 0.1}, {"sight": SightMask(microbatch(), None)}, "uses dropout, which packed attention"),
    ],
)
def test_what_is_not_computed_is_refused(changes: dict[str, Any], arguments: dict[str, Any], words: str):
    small = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Gemma3TextConfig(**small, num_key_value_heads=1, head_dim=8, vocab_size=64, **changes)
    model = transformers.AutoModel.from_config(config).train()
    attend_in_blocks(model)
    with pytest.raises(ValueError, match=words):
        model(inputs_embeds=torch.randn(1, sum(LENGTHS), 16), use_cache=False, **arguments)
