"""Attention over packed sequences: one function, on the fastest kernel that is there."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

Kernel = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention of whole sequences: queries, keys and values -> what is attended to."""

PackedKernel = Callable[[Tensor, Tensor, Tensor, Tensor, int, bool], Tensor]
"""As `varlen_attention`."""

_kernels: dict[str, PackedKernel] = {}
_chosen: dict[torch.device, str] = {}  # of `_kernels`, for every device that was asked for

_around: Callable[[Kernel, Tensor, Tensor, Tensor], Tensor] | None = None
# Of the process and not of a thread: autograd computes forwards again in threads of its own.


@contextmanager
def attending_by(around: Callable[[Kernel, Tensor, Tensor, Tensor], Tensor]) -> Iterator[None]:
    """Inside, `varlen_attention` leaves it to ``around`` what its kernel gets: for ranks that share sequences."""
    global _around
    former, _around = _around, around
    try:
        yield
    finally:
        _around = former


def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, max_seqlen: int, causal: bool
) -> Tensor:
    """Scaled dot-product attention in which every packed sequence sees itself alone.

    In half precision on CUDA this is flash-attn where it is installed, on Hopper GPUs its version 3 before its version
    2, else PyTorch's ``varlen_attn``. Everywhere else it is PyTorch's ``scaled_dot_product_attention``, one sequence
    after another: exact in any precision, and on CPU also the fastest way. On CUDA it waits for the lengths there.

    Args:
        query: ``[tokens, heads, head_dim]`` floats, the sequences one after another.
        key: ``[tokens, key_heads, head_dim]``; each key head serves ``heads / key_heads`` adjacent query heads.
        value: ``[tokens, key_heads, head_dim]``.
        cu_seqlens: ``[sequences + 1]`` int32, where each sequence begins and ends.
        max_seqlen: tokens of the longest sequence.
        causal: whether a token sees only itself and the tokens before it.

    Returns:
        ``[tokens, heads, head_dim]``, in the dtype of ``query``.

    Raises:
        ValueError: if the query heads are no multiple of the key heads.
    """
    heads, key_heads = query.shape[1], key.shape[1]
    if heads % key_heads != 0:
        raise ValueError(
            f"varlen_attention got {heads} query heads for {key_heads} key heads, "
            "but needs a whole number of query heads per key head; change one of the two."
        )

    def kernel(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return _attend(query, key, value, cu_seqlens, max_seqlen, causal)

    return kernel(query, key, value) if _around is None else _around(kernel, query, key, value)


def _attend(query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, max_seqlen: int, causal: bool) -> Tensor:
    """By the fastest kernel that is there."""
    # Bounds that lie on a device are never read by the host, which would wait for all that the device still has to do.
    if cu_seqlens.device.type in ("cuda", "meta") and query.dtype in (torch.float16, torch.bfloat16):
        return _kernels[kernel_for(query.device)](query, key, value, cu_seqlens, max_seqlen, causal)
    return _per_sequence(query, key, value, cu_seqlens, causal)


def kernel_for(device: torch.device) -> str:
    """Finds the kernel for packed sequences in half precision on a device; returns what it is called in `_kernels`.

    A name and not the kernel, since this is what `torch.compile` can be told to take as constant. Were the search
    compiled too, it would cut every layer in pieces, and look for packages anew in each of them.
    """
    if device not in _chosen:
        flash_attention = flash_kernel(is_hopper(device))
        if flash_attention is None:
            name, _kernels["torch"] = "torch", torch_attention()
        else:
            name = flash_attention.__module__
            _kernels[name] = partial(by_flash_attention, flash_attention)
        _chosen[device] = name
    return _chosen[device]


def is_hopper(device: torch.device) -> bool:
    """Whether a device is a GPU of NVIDIA's Hopper generation, such as an H100."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def flash_kernel(hopper: bool) -> Callable[..., Any] | None:
    """flash-attn's kernel for packed sequences, or None where it is not installed.

    Args:
        hopper: for a GPU that version 3 is made for, which is a package of its own.
    """
    for module in ("flash_attn_interface", "flash_attn") if hopper else ("flash_attn",):
        with suppress(ImportError):
            kernel: Callable[..., Any] = importlib.import_module(module).flash_attn_varlen_func
            return kernel
    return None


def torch_attention() -> PackedKernel:
    """PyTorch's own kernel for packed sequences in half precision."""
    return partial(by_torch, *torch_varlen_kernel())


def by_flash_attention(
    kernel: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    causal: bool,
) -> Tensor:
    """By flash-attn, whose backward adds up in any order unless it is told not to, as PyTorch's kernels are."""
    same_each_time = torch.are_deterministic_algorithms_enabled()
    bounds = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    found = kernel(query, key, value, *bounds, causal=causal, deterministic=same_each_time)
    packed: Tensor = found[0] if isinstance(found, tuple) else found  # early builds of version 3 tell more
    return packed


def by_torch(
    kernel: Callable[..., Any],
    options: dict[str, bool],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    causal: bool,
) -> Tensor:
    """By PyTorch's own kernel, which shares key heads without copies and takes heads of multiples of 8 only."""
    width = query.shape[-1]
    if width % 8:
        query, key, value = (pad(x, (0, -width % 8)) for x in (query, key, value))
    packed: Tensor = kernel(
        query,
        key,
        value,
        cu_seqlens,
        cu_seqlens,
        max_seqlen,
        max_seqlen,
        scale=width**-0.5,
        window_size=(-1, 0) if causal else (-1, -1),
        **options,
    )
    return packed[..., :width] if width % 8 else packed


def torch_varlen_kernel() -> tuple[Callable[..., Any], dict[str, bool]]:
    """PyTorch's kernel for packed sequences, and what it must be told to take fewer key heads than query heads.

    PyTorch 2.11's takes them as they are, and later ones as soon as they are told to.

    Raises:
        RuntimeError: this PyTorch's kernel is too old.
    """
    from torch.nn.attention.varlen import varlen_attn

    parameters = inspect.signature(varlen_attn).parameters
    if "window_size" not in parameters:
        raise RuntimeError(
            f"PyTorch {torch.__version__} has no kernel for packed sequences with causal windows. On GPUs install "
            "torch 2.11 or newer, or flash-attn."
        )
    return varlen_attn, {"enable_gqa": True} if "enable_gqa" in parameters else {}


def _per_sequence(query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, causal: bool) -> Tensor:
    """One call per sequence: no mask, no padding, and no other sequence within reach."""
    lengths = cu_seqlens.diff().tolist()
    shared = query.shape[1] // key.shape[1]
    if query.is_cuda and shared > 1:  # with grouped heads only the slowest kernel takes float32
        key, value, shared = key.repeat_interleave(shared, dim=1), value.repeat_interleave(shared, dim=1), 1
    outputs = []
    for packed in zip(*(torch.split(x, lengths) for x in (query, key, value)), strict=True):
        q, k, v = (x.transpose(0, 1)[None] for x in packed)
        output = scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=shared > 1)
        outputs.append(output[0].transpose(0, 1))
    return torch.cat(outputs) if outputs else query
