"""What autograd keeps of a forward lies in host memory until its backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks


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
            if isinstance(tensor if tensor._base is None else tensor._base, nn.Parameter):
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
