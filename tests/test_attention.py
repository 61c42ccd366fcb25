"""What the one attention function promises about packed sequences."""

import inspect
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from flowtrain_lightning import attention
from flowtrain_lightning.attention import (
    by_flash_attention,
    by_torch,
    flash_kernel,
    kernel_for,
    torch_varlen_kernel,
    varlen_attention,
)

LENGTHS = [5, 1, 9, 3]
CU_SEQLENS = torch.tensor([0, 5, 6, 15, 18], dtype=torch.int32)
HALF_ON_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def packed(key_heads: int = 4, dtype: torch.dtype = torch.float64, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(sum(LENGTHS), heads, 8, dtype=dtype, generator=generator).requires_grad_()
        for heads in (4, key_heads, key_heads)
    ]


def masked_reference(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
    """Attention by one dense block-diagonal mask and repeated key heads."""
    owner = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    allowed = owner[:, None] == owner[None, :]
    if causal:
        allowed = allowed.tril()
    shared = query.shape[1] // key.shape[1]
    q, k, v = (
        x.transpose(0, 1) for x in (query, key.repeat_interleave(shared, dim=1), value.repeat_interleave(shared, dim=1))
    )
    return scaled_dot_product_attention(q, k, v, attn_mask=allowed).transpose(0, 1)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("key_heads", [4, 2, 1])
def test_output_and_gradients_equal_a_dense_block_diagonal_mask(causal: bool, key_heads: int) -> None:
    inputs = packed(key_heads)
    output = varlen_attention(*inputs, CU_SEQLENS, max(LENGTHS), causal)
    expected = masked_reference(*inputs, causal)
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    weight = torch.randn_like(output)
    gradients = torch.autograd.grad((output * weight).sum(), inputs)
    expected_gradients = torch.autograd.grad((expected * weight).sum(), inputs)
    torch.testing.assert_close(gradients, expected_gradients, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("causal", [True, False])
def test_gradients_pass_the_numerical_check(causal: bool) -> None:
    cu_seqlens = torch.tensor([0, 3, 5], dtype=torch.int32)
    inputs = [torch.randn(5, heads, 2, dtype=torch.float64, requires_grad=True) for heads in (2, 1, 1)]
    assert torch.autograd.gradcheck(lambda q, k, v: varlen_attention(q, k, v, cu_seqlens, 3, causal), inputs)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_changing_one_sequence_leaves_the_others_bit_equal(causal: bool, dtype: torch.dtype) -> None:
    inputs = packed(2, dtype)
    other = [x.detach().clone() for x in inputs]
    for x in other:
        x[6:15] += 1
    before = varlen_attention(*inputs, CU_SEQLENS, max(LENGTHS), causal)
    after = varlen_attention(*other, CU_SEQLENS, max(LENGTHS), causal)
    assert torch.equal(before[:6], after[:6])
    assert torch.equal(before[15:], after[15:])
    assert not torch.equal(before[6:15], after[6:15])


def test_a_causal_token_does_not_see_later_ones() -> None:
    inputs = packed()
    later = [x.detach().clone() for x in inputs]
    for x in later:
        x[4] += 1
    before = varlen_attention(*inputs, CU_SEQLENS, max(LENGTHS), causal=True)
    after = varlen_attention(*later, CU_SEQLENS, max(LENGTHS), causal=True)
    assert torch.equal(before[:4], after[:4])
    assert not torch.equal(before[4], after[4])


def test_an_empty_sequence_changes_nothing() -> None:
    inputs = packed()
    with_empty = torch.tensor([0, 5, 5, 6, 15, 18], dtype=torch.int32)
    assert torch.equal(
        varlen_attention(*inputs, with_empty, max(LENGTHS), causal=True),
        varlen_attention(*inputs, CU_SEQLENS, max(LENGTHS), causal=True),
    )


def test_heads_that_do_not_divide_are_refused_with_both_numbers() -> None:
    query, key, value = (torch.randn(3, heads, 4) for heads in (4, 3, 3))
    with pytest.raises(ValueError, match="4 query heads for 3 key heads"):
        varlen_attention(query, key, value, torch.tensor([0, 3], dtype=torch.int32), 3, causal=True)


def test_pytorchs_own_kernel_takes_the_arguments_that_it_is_given() -> None:
    kernel, options = torch_varlen_kernel()
    inspect.signature(kernel).bind(*[None] * 5, 9, 9, window_size=(-1, 0), **options)


@pytest.mark.parametrize(
    ("hopper", "installed", "chosen"),
    [
        (True, ("flash_attn_interface", "flash_attn"), "flash_attn_interface"),
        (True, ("flash_attn",), "flash_attn"),
        (False, ("flash_attn_interface", "flash_attn"), "flash_attn"),
        (False, ("flash_attn_interface",), None),
        (True, (), None),
    ],
)
def test_version_3_of_flash_attn_comes_before_version_2_on_hopper_gpus_alone(
    monkeypatch: pytest.MonkeyPatch, hopper: bool, installed: tuple[str, ...], chosen: str | None
) -> None:
    for name in ("flash_attn_interface", "flash_attn"):
        found = SimpleNamespace(flash_attn_varlen_func=name) if name in installed else None
        monkeypatch.setitem(sys.modules, name, found)
    assert flash_kernel(hopper) == chosen


@pytest.mark.parametrize("installed", [False, True])
def test_half_precision_takes_flash_attn_where_it_is_installed_else_pytorchs_kernel(
    monkeypatch: pytest.MonkeyPatch, installed: bool
) -> None:
    def kernel(query: Tensor, *_: Any, **options: Any) -> Tensor:
        return query[:0]

    found = SimpleNamespace(flash_attn_varlen_func=kernel) if installed else None
    monkeypatch.setitem(sys.modules, "flash_attn", found)
    device = torch.device("meta", 1 + installed)  # which no other test asks for: a choice is made once per device
    assert kernel_for(device) == (__name__ if installed else "torch")
    monkeypatch.setattr(attention, "kernel_for", lambda _: kernel_for(device))
    inputs = [x.detach().to("meta", torch.bfloat16) for x in packed()]
    output = varlen_attention(*inputs, CU_SEQLENS.to("meta"), max(LENGTHS), causal=True)
    assert len(output) == (0 if installed else sum(LENGTHS)), "what that kernel gives"


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("more", [(), (None,)])
def test_flash_attn_is_given_bounds_and_cause_and_may_tell_more_than_was_asked(
    monkeypatch: pytest.MonkeyPatch, more: tuple[None, ...], deterministic: bool
) -> None:
    asked = []

    def kernel(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *, causal, **options):
        assert (max_seqlen_q, max_seqlen_k, causal) == (max(LENGTHS), max(LENGTHS), True)
        assert cu_seqlens_q is cu_seqlens_k
        asked.append(options)
        return (q + 1, *more) if more else q + 1

    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic)
    inputs = [x.detach().to("meta", torch.bfloat16) for x in packed(key_heads=2)]
    output = by_flash_attention(kernel, *inputs, CU_SEQLENS.to("meta"), max(LENGTHS), True)
    assert output.shape == inputs[0].shape
    assert asked == [{"deterministic": deterministic}]


def test_heads_of_other_sizes_than_pytorchs_kernel_takes_are_filled_up_with_zeros() -> None:
    def kernel(q, k, v, *bounds, scale, **options):
        assert all(x.shape[-1] % 8 == 0 for x in (q, k, v)), "as PyTorch's kernel demands"
        causal = options["window_size"] == (-1, 0)
        sequences = zip(*(torch.split(x.transpose(0, 1), LENGTHS, dim=1) for x in (q, k, v)), strict=True)
        found = [scaled_dot_product_attention(*each, is_causal=causal, scale=scale) for each in sequences]
        return torch.cat(found, dim=1).transpose(0, 1)

    inputs = [x[..., :5] for x in packed()]
    found = by_torch(kernel, {}, *inputs, CU_SEQLENS, max(LENGTHS), True)
    torch.testing.assert_close(found, varlen_attention(*inputs, CU_SEQLENS, max(LENGTHS), True))


def test_half_precision_runs_one_kernel_without_reading_bounds_or_copying_key_heads() -> None:
    # On the meta device nothing can be read, and PyTorch's kernel gives shapes.
    query, key, value = (x.detach().to("meta", torch.bfloat16).requires_grad_() for x in packed(key_heads=2))
    output = varlen_attention(query, key, value, CU_SEQLENS.to("meta"), max(LENGTHS), causal=True)
    output.sum().backward()
    assert output.shape == query.shape
    assert key.grad is not None
    assert key.grad.shape == key.shape


@HALF_ON_CUDA
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("key_heads", [4, 2])
def test_the_half_precision_kernel_on_cuda_agrees_with_float32(causal: bool, key_heads: int) -> None:
    inputs = [x.detach().to("cuda", torch.bfloat16).requires_grad_() for x in packed(key_heads)]
    exact = [x.detach().float().requires_grad_() for x in inputs]
    cu_seqlens = CU_SEQLENS.cuda()
    output = varlen_attention(*inputs, cu_seqlens, max(LENGTHS), causal)
    expected = varlen_attention(*exact, cu_seqlens, max(LENGTHS), causal)
    torch.testing.assert_close(output.float(), expected, rtol=2e-2, atol=2e-2)
    gradients = torch.autograd.grad(output.float().square().sum(), inputs)
    expected_gradients = torch.autograd.grad(expected.square().sum(), exact)
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient.float(), expected_gradient, rtol=5e-2, atol=5e-2)
