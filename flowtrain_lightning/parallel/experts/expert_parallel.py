"""Expert parallelism: ranks of a group hold a share of a mixture's experts each, and trade the rows that pass them.

Everything else of a half is laid out over its data-parallel ranks as ever. A rank's experts see the rows of its whole
group, so that their gradients are sums over that already, and are summed over the other groups alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from flowtrain_lightning.parallel.engine import StepRecord
from flowtrain_lightning.parallel.experts.expert_adapters import adapted_stacks, divide_adapter
from flowtrain_lightning.parallel.experts.experts import ExpertExchange, number_of_experts, set_exchange
from flowtrain_lightning.parallel.gradients import squared_norm
from flowtrain_lightning.parallel.replicate import ReplicatedHalf

EXPERT = "expert"
"""The last dimension of a mesh of experts: the ranks that share them."""


def experts_of(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """The experts of all layers of a half, each layer's as one module."""
    return [part for module in modules for part in module.modules() if number_of_experts(part) is not None]


def divide_experts(experts: Iterable[nn.Module], mesh: DeviceMesh) -> None:
    """Leaves each rank its share of the experts, whose weights become DTensors.

    Args:
        experts: see `experts_of`; all ranks hold equal weights, or weights without memory.
        mesh: its last dimension divides experts; ranks along others hold the same.
    """
    placements: list[Placement] = [*(Replicate() for _ in range(mesh.ndim - 1)), Shard(0)]
    place = mesh.get_local_rank(EXPERT)
    for module in experts:
        set_exchange(module, ExpertExchange(mesh.get_group(EXPERT)))
        for owner in module.modules():
            for name, stack in list(owner.named_parameters(recurse=False)):
                each = len(stack) // mesh[EXPERT].size()
                part = stack.detach()[place * each : (place + 1) * each].clone()  # a view would keep the whole
                shared = DTensor.from_local(
                    part, mesh, placements, run_check=False, shape=stack.shape, stride=stack.stride()
                )
                owner.register_parameter(name, nn.Parameter(shared, stack.requires_grad))


def divide_adapters(modules: Iterable[nn.Module], mesh: DeviceMesh) -> None:
    """Lets each rank compute with its share of the experts' adapters (LoRA), which stay whole.

    Args:
        modules: a half, as `peft` has adapted it.
        mesh: see `divide_experts`.
    """
    place, ranks = mesh.get_local_rank(EXPERT), mesh[EXPERT].size()
    for layer in (layer for module in modules for layer in adapted_stacks(module)):
        count = number_of_experts(layer.get_base_layer())
        if count is not None:
            each = count // ranks
            divide_adapter(layer, slice(place * each, (place + 1) * each))


def shard_experts(
    experts: Iterable[nn.Module], mesh: DeviceMesh, *, mp_policy: MixedPrecisionPolicy, **settings: Any
) -> None:
    """Applies `fully_shard` to divided experts, over the ranks that hold the same ones.

    Args:
        experts: see `divide_experts`.
        mesh: of these ranks; as that of the half, its last dimension shards.
        mp_policy: of the half. Rows come as the layer makes them: their shares are not rounded.
        settings: the other arguments of `fully_shard`.

    Raises:
        ValueError: neither a rank's experts nor the second dimension of their weights can be divided evenly.
    """
    ranks = mesh.size(mesh.ndim - 1)

    def placement(stack: nn.Parameter) -> Shard:
        held = stack.to_local() if isinstance(stack, DTensor) else stack
        # Along the second dimension, PyTorch copies once more what it gathers.
        dim = next((dim for dim, size in enumerate(held.shape[:2]) if size % ranks == 0), None)
        if dim is None:
            raise ValueError(
                f"Experts have a weight of shape {list(stack.shape)}, of which a rank keeps {list(held.shape)}, and "
                f"{ranks} ranks are to share that by FSDP2, but divide neither of its first two sizes evenly. Take "
                "another expert degree, or more replicas."
            )
        return Shard(dim)

    for module in experts:
        policy = replace(mp_policy, cast_forward_inputs=False)
        fully_shard(module, mesh=mesh, mp_policy=policy, shard_placement_fn=placement, **settings)


class ExpertParallelHalf:
    """A half of which every rank has a copy, but of its experts a share; see `HalfEngine`.

    Args:
        common: what is copied.
        experts: the rest: this rank's experts, and their copies on other ranks.
        parameters: of both, in the module's order.
    """

    in_lockstep = True
    record = StepRecord()

    def __init__(self, common: ReplicatedHalf, experts: ReplicatedHalf, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self._common, self._experts = common, experts

    @property
    def trains(self) -> bool:
        """Whether any parameter wants a gradient."""
        return self._common.trains or self._experts.trains

    def begin_step(self) -> None:
        """Before the first forward of a step that trains."""
        self._common.begin_step()
        self._experts.begin_step()

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Runs one forward, together with the ranks that share its experts."""
        return self._common.call(function, *args)

    def backward(self, *, last: bool) -> AbstractContextManager[None]:
        """Inside, one backward runs, together with the ranks that share its experts."""
        return self._common.backward(last=last)

    def send_gradients(self) -> None:
        """Begins to sum all gradients."""
        self._common.send_gradients()
        self._experts.send_gradients()

    def finish_gradients(self, scale: float) -> None:
        """Sums gradients over the ranks that hold the same weights, and scales them."""
        self._common.finish_gradients(scale)
        self._experts.finish_gradients(scale)

    def squared_norm(self, gradients: list[Tensor]) -> Tensor:
        """The squared 2-norm of these gradients over all ranks of the role."""
        return squared_norm(gradients)
