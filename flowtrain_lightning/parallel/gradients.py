"""Gradients whatever the layout keeps them as: this rank's part of them, their norm over all ranks, clipping."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def local_part(tensor: Tensor) -> Tensor:
    """Returns this rank's part of a tensor: its shard, or all of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_gradient(parameter: nn.Parameter) -> Tensor | None:
    """Returns this rank's part of a parameter's gradient, which is divided among ranks as the parameter is.

    Where a product has no rows, as that of a head with no target token, no division costs DTensor less than another,
    and it may leave the gradient whole on every rank.
    """
    gradient = parameter.grad
    if not isinstance(gradient, DTensor):
        return gradient
    if isinstance(parameter, DTensor) and gradient.placements != parameter.placements:
        gradient = parameter.grad = gradient.redistribute(placements=parameter.placements)
    return gradient.to_local()


def squared_norm(gradients: Sequence[Tensor]) -> Tensor:
    """The squared 2-norm of gradients over the ranks that share them, each value counted once.

    `torch.nn.utils.get_total_norm` fails where gradients lie on different meshes, so squares are summed mesh by mesh.

    Args:
        gradients: plain tensors, and sharded ones, whose shards are summed over the ranks that hold them. All ranks
            that share one pass it.

    Returns:
        a float64 scalar.
    """
    device = local_part(gradients[0]).device if gradients else torch.device("cpu")
    total = torch.zeros((), dtype=torch.float64, device=device)
    by_groups: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = {}
    reduced_on: dict[tuple[dist.ProcessGroup, ...], str] = {}
    for gradient in gradients:
        groups: tuple[dist.ProcessGroup, ...] = ()
        if isinstance(gradient, DTensor):
            mesh, placements = gradient.device_mesh, gradient.placements
            # Not by `is_shard`: what FSDP2 and tensor ranks both cut along one dimension is another kind of shard.
            groups = tuple(mesh.get_group(n) for n, placed in enumerate(placements) if not placed.is_replicate())
            reduced_on[groups] = mesh.device_type
        by_groups.setdefault(groups, []).append(local_part(gradient))
    for groups, parts in by_groups.items():
        squares = nn.utils.get_total_norm(parts).double().square()
        if groups:
            squares = squares.to(reduced_on[groups])  # parts in host memory are summed on the device all the same
        for group in groups:
            dist.all_reduce(squares, group=group)
        total = total + squares.to(device)
    return total


def squared_norms(parameters: Sequence[nn.Parameter]) -> Tensor:
    """The squared 2-norm of each parameter's gradient over the ranks that share it; 0 where there is none.

    Args:
        parameters: all ranks that share them pass the same ones.

    Returns:
        ``[parameters]`` float64.
    """
    by_groups: dict[tuple[dist.ProcessGroup, ...], list[int]] = {}
    device = "cpu"
    for number, parameter in enumerate(parameters):
        groups: tuple[dist.ProcessGroup, ...] = ()
        if isinstance(parameter, DTensor):
            mesh, device = parameter.device_mesh, parameter.device_mesh.device_type
            groups = tuple(
                mesh.get_group(n) for n, place in enumerate(parameter.placements) if not place.is_replicate()
            )
        elif parameter.is_cuda:
            device = "cuda"
        by_groups.setdefault(groups, []).append(number)
    found = torch.zeros(len(parameters), dtype=torch.float64, device=device)
    for groups, numbers in by_groups.items():
        held = [local_gradient(parameters[number]) for number in numbers]
        squares = [found.new_zeros(()) if part is None else part.double().square().sum().to(device) for part in held]
        summed = torch.stack(squares)
        for group in groups:
            dist.all_reduce(summed, group=group)
        found[numbers] = summed
    return found


def count_hooks(parameter: nn.Parameter) -> tuple[int, int]:
    """Counts the hooks that wait for a parameter's gradient: before it is added to ``grad``, and after.

    PyTorch has no public way to ask.
    """
    before, after = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
    return len(before or ()), len(after or ())


def scale_gradients(gradients: Iterable[Tensor], factor: float) -> None:
    """Multiplies this rank's parts of gradients in place, on a GPU by few kernels for all of them."""
    parts = [local_part(gradient) for gradient in gradients]
    if parts:
        torch._foreach_mul_(parts, factor)


def clip_to_norm(gradients: Iterable[Tensor], limit: float, norm: Tensor) -> None:
    """Scales gradients in place so that their norm is ``limit`` at most, as `torch.nn.utils.clip_grads_with_norm_`.

    A norm on the gradients' device is not read, and one on the host not copied to the device: there a single number of
    the host goes along with the kernel.
    """
    factor = torch.clamp(limit / (norm + 1e-6), max=1.0)
    parts = [local_part(gradient) for gradient in gradients]
    if any(part.is_cpu for part in parts):
        factor = factor.cpu()
    for part in parts:
        part.mul_(factor)


def clip_to_value(gradients: Iterable[Tensor], limit: float) -> None:
    """Clamps gradients in place to the range from ``-limit`` to ``limit``."""
    for gradient in gradients:
        local_part(gradient).clamp_(-limit, limit)
