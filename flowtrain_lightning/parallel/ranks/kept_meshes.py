"""DTensor keeps the meshes of what it has computed: those of groups that are gone are taken out of its memory."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def forget_meshes() -> None:
    """To be called after the default group was destroyed, before another one is made.

    DTensor keeps the result of each kind of operation together with the mesh of the first tensors, and takes meshes for
    equal where their ranks and names are. Groups are numbered anew after each `destroy_process_group`, so the mesh that
    it has kept would name a group that is not there, or one of other ranks. Each thread keeps its own: a GPU's backward
    runs in one of PyTorch's, which is asked by a backward.
    """
    _forget()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        with torch.enable_grad():
            asked = torch.zeros((), device="cuda", requires_grad=True) * 1
            asked.register_hook(_forget)  # type: ignore[no-untyped-call]
            asked.backward()  # type: ignore[no-untyped-call]


def _forget(_: Tensor | None = None) -> None:
    # PyTorch has no public function for it; `torch.distributed.tensor.debug`, which takes seconds to import, does this.
    kept = DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding
    kept.cache_clear()  # type: ignore[no-untyped-call]
    clear_in_dispatch = getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None)  # not in every release
    if clear_in_dispatch is not None:
        clear_in_dispatch()
