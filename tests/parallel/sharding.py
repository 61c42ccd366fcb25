"""What a rank does in the tests of FSDP2 halves; every function runs in real processes and writes down what it saw."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from flowtrain_lightning.parallel.fully_shard import FullyShardedHalf
from flowtrain_lightning.parallel.offloading import ActivationsOnHost
from tests.forks import write_down


class Layer(nn.Module):
    """What is repeated."""

    def __init__(self) -> None:
        super().__init__()
        self.widen, self.narrow = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(self.widen(x).tanh())


class Layered(nn.Module):
    """Three layers alike, between two others."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Layer() for _ in range(3))
        self.outlet = nn.Linear(8, 8)


def memory_of_shards(folder: Path) -> None:
    """How many numbers this rank holds between steps, and how many of them lie in gradients after one.

    And what it tells of this step, of one in which half of the ranks want a gradient of what they put into the layers,
    with the gradients of it, and of one in which every other rank leaves out another layer; in that the half is given
    something that it does not read. And what is said where a loss has no gradient.
    """
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    torch.manual_seed(0)
    half = Layered()
    plain = deepcopy(half)
    whole = sum(parameter.numel() for parameter in half.parameters())
    engine = FullyShardedHalf({"half": half}, init_device_mesh("cpu", (dist.get_world_size(),)))
    engine.begin_step()
    loss = engine.call(_forward(half), torch.ones(3, 8)).sum()
    with engine.backward(last=True):
        loss.backward()
    engine.finish_gradients(1.0)
    held = [parameter.to_local().numel() for parameter in engine.parameters]
    gradients = [parameter.grad.to_local().numel() for parameter in engine.parameters if parameter.grad is not None]
    seen: dict[str, Any] = {"whole": whole, "held": sum(held), "gradients": sum(gradients)}
    seen |= {"layers": engine.record.layers, "unused": sorted(engine.record.unused)}
    half.zero_grad()
    engine.begin_step()
    with engine.backward(last=True):
        own = torch.ones(3, 8, requires_grad=dist.get_rank() % 2 > 0)
        engine.call(_layers(half), own).sum().backward()
    (dist.get_world_size() * _layers(plain)(torch.ones(3, 8)).sum()).backward()
    pairs = zip(engine.parameters, plain.parameters(), strict=True)
    seen["as plain"] = [
        other.grad is None or torch.allclose(one.grad.full_tensor(), other.grad) for one, other in pairs
    ]
    seen["unused then"] = sorted(engine.record.unused)
    del half.blocks[dist.get_rank() % 2]
    engine.begin_step()
    with engine.backward(last=True):
        read, unread = (torch.ones(3, 8, requires_grad=True) for _ in range(2))
        engine.call(lambda read, _: _forward(half)(read), read, {"image": (unread,)}).sum().backward()
    seen |= {"given": [read.grad is not None, unread.grad is not None], "other layers": engine.record.layers}
    with pytest.raises(RuntimeError) as refused:
        engine.call(lambda x: _forward(half)(x).detach(), torch.ones(3, 8))
    write_down(folder, {**seen, "refused": str(refused.value)})
    dist.destroy_process_group()


def thaw_a_shard(folder: Path) -> None:
    """What is said when a weight is frozen after it was sharded."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    half = Layered()
    engine = FullyShardedHalf({"half": half}, init_device_mesh("cpu", (dist.get_world_size(),)))
    hook = half.outlet.weight.register_hook(lambda gradient: None)
    said = {"hooked": _refusal(engine)}
    hook.remove()
    said["again"] = _refusal(engine)
    half.outlet.requires_grad_(False)
    write_down(folder, {**said, "thawed": _refusal(engine)})
    dist.destroy_process_group()


def skip_a_layer_at_last(folder: Path) -> None:
    """What is said where replicas (HSDP) sum in a last backward that goes through fewer layers than the others."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    half = Layered()
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("replica", "shard"))
    engine = FullyShardedHalf({"half": half}, mesh)
    engine.begin_step()
    first = engine.call(_forward(half), torch.ones(3, 8)).sum()
    with engine.backward(last=False):
        first.backward()
    last = engine.call(lambda x: half.outlet(half.blocks[0](half.inlet(x))), torch.ones(3, 8)).sum()
    with pytest.raises(RuntimeError) as refused, engine.backward(last=True):
        last.backward()
    write_down(folder, {"refused": str(refused.value)})
    dist.destroy_process_group()


class Summed(NamedTuple):
    """A loss and its count, as users may name them."""

    loss: Tensor
    count: int


def losses_in_containers(folder: Path) -> None:
    """What this rank has not used, by what kind of container its forward returns the loss in."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    half = Layered()
    engine = FullyShardedHalf({"half": half}, init_device_mesh("cpu", (dist.get_world_size(),)))
    unused: dict[str, list[int]] = {}
    kinds = {
        "tuple": lambda loss: (loss, 3),
        "list": lambda loss: [loss, 3],
        "named tuple": lambda loss: Summed(loss, 3),
        "mapping": lambda loss: MappingProxyType({"backbone": Summed(loss, 3)}),
    }
    for name, kind in kinds.items():
        engine.begin_step()
        found = engine.call(lambda x, kind=kind: kind(_forward(half)(x).sum()), torch.ones(3, 8))
        loss, count = found["backbone"] if name == "mapping" else found
        with engine.backward(last=True):
            loss.backward()
        unused[name] = [*sorted(engine.record.unused), *[-1] * (count != 3)]
    write_down(folder, unused)
    dist.destroy_process_group()


def share_a_layer(folder: Path) -> None:
    """What is said when two blocks, or a block and what stands behind the blocks, have a layer in common.

    And when weights of a block are of several dtypes, of which one is frozen or not.
    """
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    mesh, said = init_device_mesh("cpu", (dist.get_world_size(),)), {}
    for name in ("blocks", "outlet", "whole block", "several dtypes", "frozen dtype"):
        half = Layered()
        if name == "blocks":
            half.blocks[2].widen = half.blocks[0].widen
        elif name == "outlet":
            half.outlet = half.blocks[0].narrow
        elif name == "whole block":
            half.blocks.append(half.blocks[0])  # one block that runs twice is gathered twice
        else:
            half.blocks[1].narrow.double().requires_grad_(name == "several dtypes")
        try:
            FullyShardedHalf({"half": half}, mesh)
            said[name] = ""
        except ValueError as error:
            said[name] = str(error)
    write_down(folder, said)
    dist.destroy_process_group()


def _refusal(engine: FullyShardedHalf) -> str:
    try:
        engine.begin_step()
    except ValueError as error:
        return str(error)
    return ""


def offload_parameters(folder: Path) -> None:
    """The gradients' norm of a step with and without offloading, and the bytes that leave and return."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    found: dict[str, Any] = {}
    activations = ActivationsOnHost(pinned=False)
    for offloads in (False, True):
        torch.manual_seed(0)
        half = Layered()
        engine = FullyShardedHalf(
            {"half": half},
            init_device_mesh("cpu", (dist.get_world_size(),)),
            offload_parameters=offloads,
            activations=activations if offloads else None,
        )
        engine.begin_step()
        loss = engine.call(_forward(half), torch.ones(3, 8)).sum()
        with engine.backward(last=True):
            loss.backward()
        engine.finish_gradients(1.0)
        norm = engine.squared_norm([p.grad for p in engine.parameters if p.grad is not None])
        found[str(offloads)] = float(norm)
    found |= {"left": activations.bytes_left, "returned": activations.bytes_returned}
    write_down(folder, found)
    dist.destroy_process_group()


def _forward(half: Layered) -> Callable[[Tensor], Tensor]:
    return lambda x: _layers(half)(half.inlet(x))


def _layers(half: Layered) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        for block in half.blocks:
            x = block(x)
        return half.outlet(x)

    return forward
