"""Moves saved activations and the optimizer's tensors into host memory, so that a device has room."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks


def is_of_weights(tensor: Tensor) -> bool:
    """Whether a tensor that autograd saves is a weight, a view of one, or what autocast has cast of one."""
    base = tensor if tensor._base is None else tensor._base
    if isinstance(base, nn.Parameter):
        return True
    if base.grad_fn is None or base.grad_fn.name() != "ToCopyBackward0":
        return False
    return all(isinstance(getattr(cause, "variable", None), nn.Parameter) for cause, _ in base.grad_fn.next_functions)


class ActivationsOnHost(saved_tensors_hooks):
    """Inside, saved activations leave for host memory, and return when their backward asks for them.

    As `torch.autograd.graph.save_on_cpu`, but weights stay where they are: they are there for the backward anyway, and
    those that were gathered of shards would be copied whole.

    Args:
        pinned: host memory is page-locked, for fast copies to and from a GPU.

    Attributes:
        bytes_left: which have gone to host memory so far.
        bytes_returned: which have come back so far.
    """

    def __init__(self, *, pinned: bool) -> None:
        self.bytes_left = 0
        self.bytes_returned = 0

        def leave(tensor: Tensor) -> Any:
            if is_of_weights(tensor):
                return tensor
            self.bytes_left += tensor.nbytes
            on_host = torch.empty(tensor.size(), dtype=tensor.dtype, layout=tensor.layout, pin_memory=pinned)
            # Nobody waits: backwards run on the stream of their forward, after this, and nobody else reads the copy.
            return tensor.device, on_host.copy_(tensor, non_blocking=pinned)

        def come_back(kept: Any) -> Tensor:
            if isinstance(kept, Tensor):
                return kept
            device, on_host = kept
            self.bytes_returned += on_host.nbytes
            returned: Tensor = on_host.to(device, non_blocking=pinned)
            return returned

        super().__init__(leave, come_back)


class SteppedOnHost:
    """Copies in host memory of what a rank optimizes, after ZeRO-Offload (Ren et al., arXiv 2101.06840).

    A step goes: `take_weights`, backwards on the device, `take_gradients`, the optimizer, `return_weights`. Weights are
    sent in both directions, since a checkpoint or a hook of the user's may have changed them on the device.

    Args:
        on_device: what computes.
        pinned: host memory is page-locked, for fast copies to and from a GPU.

    Attributes:
        tensors: what the optimizer steps, one for each of ``on_device``.
        bytes_left: which have gone to host memory so far.
        bytes_returned: which have come back so far.
    """

    def __init__(self, on_device: Sequence[Tensor], *, pinned: bool) -> None:
        def on_host() -> list[Tensor]:
            return [torch.empty_like(flat, device="cpu", pin_memory=pinned, requires_grad=False) for flat in on_device]

        self._on_device = on_device
        self._gradients = on_host()
        self.tensors = [flat.requires_grad_() for flat in on_host()]
        self.bytes_left = 0
        self.bytes_returned = 0

    @torch.no_grad()
    def take_weights(self) -> None:
        """Copies the weights as they are now; they are there once `take_gradients` has returned."""
        for kept, flat in zip(self.tensors, self._on_device, strict=True):
            kept.copy_(flat, non_blocking=True)
            self.bytes_left += flat.nbytes

    def take_gradients(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Copies gradients, one for each tensor, and waits for them; the copies are those of the last step."""
        for kept, gradient in zip(self._gradients, gradients, strict=True):
            kept.copy_(gradient)
            self.bytes_left += gradient.nbytes
        return self._gradients

    @torch.no_grad()
    def return_weights(self) -> None:
        """Puts what was stepped in the place of the weights."""
        for flat, kept in zip(self._on_device, self.tensors, strict=True):
            flat.copy_(kept, non_blocking=True)
            self.bytes_returned += kept.nbytes
