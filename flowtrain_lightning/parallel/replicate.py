"""The replicated layout: every rank of a role holds the whole half; gradients are summed once a step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from flowtrain_lightning.parallel.engine import StepRecord
from flowtrain_lightning.parallel.gradients import local_gradient, local_part, scale_gradients, squared_norm
from flowtrain_lightning.parallel.offloading import ActivationsOnHost

BUCKET_BYTES = 32 << 20
_NOTHING = nullcontext()


class ReplicatedHalf:
    """A half of which every rank has a copy; see `HalfEngine`.

    Gradients are summed in buckets, which may leave while the step's last backward still runs: each as soon as the
    gradients of all its parameters are final, and the buckets before it have left, so that all ranks sum in one order
    whatever each of them used.

    Args:
        parameters: of the half; those of a tensor-parallel half are shards.
        group: the ranks whose gradients are summed; None is the default group.
        early: buckets leave during the last backward. In the group then must be nothing else meanwhile: ranks come to
            their last backwards at different times.
        activations: where these lie between forward and backward, if not on the device.
    """

    in_lockstep = False
    record = StepRecord()

    def __init__(
        self,
        parameters: list[nn.Parameter],
        group: dist.ProcessGroup | None = None,
        *,
        early: bool = False,
        activations: ActivationsOnHost | None = None,
    ) -> None:
        self.parameters = parameters
        self._group = group
        self._early = early
        self._activations = activations or _NOTHING
        self._alone = not dist.is_initialized() or dist.get_world_size(group) == 1
        self._buckets: list[_Bucket] = []
        self._left = 0  # buckets that are on their way

    @property
    def trains(self) -> bool:
        """Whether any parameter wants a gradient."""
        return any(parameter.requires_grad for parameter in self.parameters)

    def begin_step(self) -> None:
        """Sorts the parameters that want a gradient into buckets, last ones first, as a backward comes to them."""
        self._buckets, self._left = [], 0
        if not self._alone:
            wanted = [parameter for parameter in reversed(self.parameters) if parameter.requires_grad]
            self._buckets = [_Bucket(members) for members in _divided(wanted)]

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Runs one forward."""
        with self._activations:
            return function(*args)

    def backward(self, *, last: bool) -> AbstractContextManager[None]:
        """Inside, one backward runs; during the last one, what is final is summed."""
        return self._summing() if last and self._early and not self._alone else _NOTHING

    @contextmanager
    def _summing(self) -> Iterator[None]:
        handles = []
        for bucket in self._buckets:
            for parameter in bucket.parameters:
                hook = self._noting(bucket)
                handles.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def send_gradients(self) -> None:
        """Begins to sum all that is not on its way."""
        for bucket in self._buckets[self._left :]:
            bucket.send(self._group)
        self._left = len(self._buckets)

    def finish_gradients(self, scale: float) -> None:
        """Sums the other gradients, lets the device wait for all sums, and scales them."""
        if self._alone:
            found = [local_gradient(parameter) for parameter in self.parameters if parameter.requires_grad]
            scale_gradients([gradient for gradient in found if gradient is not None], scale)
            return
        self.send_gradients()
        for bucket in self._buckets:
            bucket.receive(scale)
        # Read, which waits for the device, only where this rank has not used all: what it has used, somebody has.
        asked = [bucket.flags for bucket in self._buckets if bucket.lacks_some]
        used = iter(torch.cat(asked).tolist() if asked else [])
        for bucket in self._buckets:
            bucket.write_back(used)
        self._buckets, self._left = [], 0

    def squared_norm(self, gradients: list[Tensor]) -> Tensor:
        """The squared 2-norm of these gradients, which are equal on all ranks that hold copies."""
        return squared_norm(gradients)

    def _noting(self, bucket: _Bucket) -> Callable[[Tensor], None]:
        done = False

        def note(_: Tensor) -> None:
            nonlocal done
            if done:
                raise RuntimeError(
                    "A weight gets its gradient in several parts of one backward, as under "
                    "torch.utils.checkpoint(..., use_reentrant=True), while ranks already sum the first one. Use "
                    "use_reentrant=False."
                )
            done = True
            bucket.missing -= 1
            while self._left < len(self._buckets) and self._buckets[self._left].missing == 0:
                self._buckets[self._left].send(self._group)
                self._left += 1

        return note


class _Bucket:
    """Gradients that are summed together, and behind them one flag per parameter: "somebody has a gradient".

    From when it is sent a gradient lies in the bucket alone, and in the end it is a part of the bucket's memory: no
    second copy of all gradients is kept. Shards of tensor ranks, and weights of another memory format, keep theirs.

    Attributes:
        parameters: of one dtype on one device.
        missing: gradients that the step's last backward has not made final yet.
        lacks_some: this rank had no gradient of some parameter when it sent them; others may have one.
    """

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.missing = len(parameters)
        self.lacks_some = False
        self._flat: Tensor | None = None
        self._work: Any = None

    def send(self, group: dist.ProcessGroup | None) -> None:
        """Begins to sum."""
        values = [local_part(parameter.data) for parameter in self.parameters]
        total = sum(value.numel() for value in values)
        flat = values[0].new_zeros(total + len(values))
        start = 0
        for number, (parameter, value) in enumerate(zip(self.parameters, values, strict=True)):
            gradient = local_gradient(parameter)
            if gradient is None:
                self.lacks_some = True
            else:
                flat[start : start + value.numel()].copy_(gradient.reshape(-1))
                flat[total + number] = 1
                if _may_lie_in_flat(parameter):
                    parameter.grad = None
            start += value.numel()
        self._flat, self._work = flat, dist.all_reduce(flat, group=group, async_op=True)

    def receive(self, scale: float) -> None:
        """Waits for the sums, and scales the gradients."""
        assert self._flat is not None, "it was sent"
        self._work.wait()
        self._flat[: -len(self.parameters)].mul_(scale)

    @property
    def flags(self) -> Tensor:
        """For each parameter how many ranks have a gradient, float32; 0 is none."""
        assert self._flat is not None, "it was received"
        return self._flat[-len(self.parameters) :].float()

    def write_back(self, used: Iterator[float]) -> None:
        """Puts the sums into the gradients of the parameters that some rank has used.

        Args:
            used: the flags come next, where ``lacks_some``.
        """
        assert self._flat is not None, "it was received"
        start = 0
        for parameter in self.parameters:
            value = local_part(parameter.data)
            if not self.lacks_some or next(used) > 0:
                summed = self._flat[start : start + value.numel()].view_as(value)
                if _may_lie_in_flat(parameter):
                    parameter.grad = summed
                else:
                    if parameter.grad is None:
                        parameter.grad = torch.empty_like(parameter)
                    local_part(parameter.grad).copy_(summed)
            start += value.numel()
        self._flat = self._work = None


def _may_lie_in_flat(parameter: nn.Parameter) -> bool:
    return not isinstance(parameter, DTensor) and parameter.is_contiguous()


def broadcast_half(tensors: Iterable[Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Gives every rank of a group the values of its first rank (parameters and buffers of one half).

    Args:
        tensors: of the half, in one order on all ranks.
        group: None is the default group.
    """
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return
    for tensor in tensors:
        values = local_part(tensor.detach())
        in_one_piece = values.contiguous()  # as gloo reads and writes them
        dist.broadcast(in_one_piece, group_src=0, group=group)
        if in_one_piece is not values:
            values.copy_(in_one_piece)


def broadcast_copies(
    tensors: Iterable[Tensor], group: dist.ProcessGroup | None = None, replicas: dist.ProcessGroup | None = None
) -> None:
    """Gives the ranks that hold the same of a tensor the values of their first one.

    Args:
        tensors: in one order on all ranks. Those that are no DTensor all ranks of the group hold.
        group: None is the default group.
        replicas: the ranks that hold the same of DTensors in other meshes, if there are such meshes.
    """
    for tensor in tensors:
        if not isinstance(tensor, DTensor):
            broadcast_half([tensor], group)
            continue
        for dim, placement in enumerate(tensor.placements):
            if placement.is_replicate():
                broadcast_half([tensor.to_local()], tensor.device_mesh.get_group(dim))
        if replicas is not None:
            broadcast_half([tensor], replicas)


def _divided(parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Parameters of one kind together, in lists of about `BUCKET_BYTES`."""
    by_kind: dict[tuple[torch.device, torch.dtype], list[nn.Parameter]] = defaultdict(list)
    for parameter in parameters:
        by_kind[parameter.device, parameter.dtype].append(parameter)
    for of_kind in by_kind.values():
        members: list[nn.Parameter] = []
        size = 0
        for parameter in of_kind:
            members.append(parameter)
            size += parameter.numel() * parameter.element_size()
            if size >= BUCKET_BYTES:
                yield members
                members, size = [], 0
        if members:
            yield members
