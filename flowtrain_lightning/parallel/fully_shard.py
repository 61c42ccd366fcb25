"""FSDP2 and HSDP: the ranks of a shard group hold a share of every weight, and gather a block when it computes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from hashlib import blake2b
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from flowtrain_lightning.allocator.role_layout import Recompute
from flowtrain_lightning.parallel.blocks import recompute_in_backward, repeated_blocks
from flowtrain_lightning.parallel.engine import StepRecord
from flowtrain_lightning.parallel.gradients import count_hooks, scale_gradients, squared_norm
from flowtrain_lightning.parallel.offloading import ActivationsOnHost
from flowtrain_lightning.parallel.replicate import ReplicatedHalf
from flowtrain_lightning.parallel.unused_weights import UnusedWeights


class FullyShardedHalf:
    """A half whose weights, gradients and optimizer states are sharded; see `HalfEngine`.

    Repeated blocks gather their weights when they compute, one at a time; everything else of the half, such as
    embeddings, norms and heads, is gathered for the whole forward of the user's method. So it does not matter whether
    that method calls the half's ``forward``, only modules of it, or uses a tied weight by itself.

    Args:
        modules: path -> module, together the half; their weights may have no memory yet.
        mesh: one dimension for FSDP2, ``("replica", "shard")`` for HSDP.
        replicas: the ranks that hold the same shards in other meshes of one dimension: their gradients are summed in
            `finish_gradients`, since these ranks come to their last backwards at different times.
        wrap: shards those modules within the half that are gathered alone; it is given the mesh and the other
            arguments of `fully_shard`. By default these modules are the repeated blocks.
        fill: gives the shards their numbers, if they have none yet.
        absent: parameters of the modules that other stages hold.
        precision: what is gathered and reduced in which dtype.
        reshard_after_forward: gather blocks a second time for their backward; less memory, more communication.
        recompute: what of a block runs a second time in the backward, see `recompute_in_backward`.
        offload_parameters: shards and optimizer states lie in host memory.
        activations: where these lie between forward and backward, if not on the device.
    """

    in_lockstep = True

    def __init__(
        self,
        modules: dict[str, nn.Module],
        mesh: DeviceMesh,
        *,
        replicas: dist.ProcessGroup | None = None,
        wrap: Callable[..., None] | None = None,
        fill: Callable[[], None] | None = None,
        absent: Collection[nn.Parameter] = (),
        precision: MixedPrecisionPolicy | None = None,
        reshard_after_forward: bool = True,
        recompute: Recompute = "none",
        offload_parameters: bool = False,
        activations: ActivationsOnHost | None = None,
    ) -> None:
        policy = precision or MixedPrecisionPolicy()
        offload: OffloadPolicy = (
            CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if offload_parameters else OffloadPolicy()
        )
        settings: dict[str, Any] = {"mp_policy": policy, "offload_policy": offload}
        if absent:
            settings["ignored_params"] = {*absent}
        for block in (block for module in modules.values() for block in repeated_blocks(module)):
            recompute_in_backward(block, recompute)
        wrap = wrap or partial(shard_repeated_blocks, modules.values())
        wrap(mesh, reshard_after_forward=reshard_after_forward, **settings)
        self._root = RoleForward(modules)
        fully_shard(self._root, mesh=mesh, **settings)
        if fill is not None:
            fill()
        self._fsdp_modules = [module for module in self._root.modules() if isinstance(module, FSDPModule)]
        for module in self._fsdp_modules:
            module.set_gradient_divide_factor(1.0)
            # Without it a sum in float32 fails on gloo, and passes in float64.
            module.set_force_sum_reduction_for_comms(True)
        for number, module in enumerate(self._fsdp_modules):
            module.register_forward_pre_hook(partial(self._note, number))
        self._layers = blake2b(digest_size=8)
        self._has_replicas = mesh.ndim > 1
        self._activations = activations or nullcontext()
        elsewhere = {id(parameter) for parameter in absent}
        self.parameters = [parameter for parameter in self._root.parameters() if id(parameter) not in elsewhere]
        self._unused = UnusedWeights(self._root, self.parameters, mesh.device_type)
        self._wanted = [parameter.requires_grad for parameter in self.parameters]
        self._copies = None if replicas is None else ReplicatedHalf(self.parameters, replicas)
        self._outstanding = 0  # forwards whose backward has not begun

    @property
    def trains(self) -> bool:
        """Whether any parameter wants a gradient."""
        return any(parameter.requires_grad for parameter in self.parameters)

    @property
    def record(self) -> StepRecord:
        """The weights that this rank has used since the step began."""
        return StepRecord(self._layers.hexdigest(), self._unused.numbers)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _note(self, number: int, *_: Any) -> None:
        """Before a module gathers its weights: a rank that gathers another one at that time gets these in its place."""
        self._layers.update(number.to_bytes(4, "big"))

    def begin_step(self) -> None:
        """Raises where parameters were frozen or unfrozen since they were sharded, or have hooks that nobody calls.

        Raises:
            ValueError: says what to do.
        """
        if any(count_hooks(parameter)[0] for parameter in self.parameters):
            raise ValueError(
                "A hook was registered with `register_hook` on a weight in shards (FSDP2), which never calls it. Look "
                "at final gradients in `on_before_optimizer_step`, use `register_post_accumulate_grad_hook`, or take a "
                "layout of whole copies."
            )
        if [parameter.requires_grad for parameter in self.parameters] != self._wanted:
            raise ValueError(
                "`requires_grad` of a parameter was changed after its half was sharded (FSDP2), which gathers weights "
                "as they were then. Set it where the half is built, and save a checkpoint and go on from it in a new "
                "run to change it; or take a layout of whole copies."
            )
        self._outstanding = 0
        self._unused.begin_step()
        self._layers = blake2b(digest_size=8)
        if self._copies is not None:
            self._copies.begin_step()

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Runs one forward with the half's weights at hand."""
        with self._activations:
            result = self._unused.call(self._root, function, *args)
        if not torch.is_grad_enabled():
            # No backward will follow that gives the gathered weights back. As long as they are there, they stand in
            # the module in place of the shards, and whoever asks for its parameters would get them.
            for module in self._fsdp_modules:
                module.reshard()
        else:
            self._outstanding += 1
        return result

    @contextmanager
    def backward(self, *, last: bool) -> Iterator[None]:
        """Inside, one backward runs. Gradients are scattered in each; replicas are summed in the last one.

        To FSDP2 every backward is a last one that leaves no forward outstanding: else it keeps what the root has sent,
        for a 7B 4.4 GB of embeddings and head in float32, throughout the next forward. Nothing waits longer for that:
        the next forward begins by gathering these weights, in the same group and so after they were sent.

        Raises:
            RuntimeError: the last one has left out layers of which replicas had not summed the gradients.
        """
        assert isinstance(self._root, FSDPModule)
        self._outstanding -= 1
        self._root.set_is_last_backward(last or self._outstanding == 0)
        if self._has_replicas:
            self._root.set_requires_all_reduce(last)
        before = frozenset(self._unused.summed)
        self._unused.summed.clear()
        yield
        if last and self._has_replicas and not before <= self._unused.summed:
            raise RuntimeError(
                "The step's last backward has left out layers that others went through, so their gradients would miss "
                "the sum over replicas (HSDP) and come a step late. Let every forward run all layers, if only with no "
                "rows, or leave `replicas` out of the layout."
            )
        self._unused.summed |= before

    def send_gradients(self) -> None:
        """Nothing is left to send: each backward has."""

    def finish_gradients(self, scale: float) -> None:
        """Scales the gradients, which are summed already over the ranks of the mesh."""
        if self._copies is not None:
            self._copies.finish_gradients(scale)
            return
        scale_gradients([parameter.grad for parameter in self.parameters if parameter.grad is not None], scale)

    def squared_norm(self, gradients: list[Tensor]) -> Tensor:
        """The squared 2-norm of these gradients over all ranks of the role."""
        return squared_norm(gradients)


def shard_repeated_blocks(modules: Iterable[nn.Module], mesh: DeviceMesh, **settings: Any) -> None:
    """Applies `fully_shard` to every repeated block of the modules that is here, with these arguments.

    Raises:
        ValueError: a block shares a weight with another one, or with what stands outside of it.
    """
    ignored = {id(parameter) for parameter in settings.get("ignored_params", ())}
    halves = [*modules]
    blocks = [*dict.fromkeys(block for half in halves for block in repeated_blocks(half))]
    outside = [part for half in halves for part in _outside(half, {*blocks})]
    users = Counter(key for block in blocks for key in {*map(id, block.parameters())})
    users += Counter({id(weight) for part in outside for weight in part.parameters(recurse=False)})
    for block in blocks:
        for name, parameter in block.named_parameters():
            if users[id(parameter)] > 1:
                raise ValueError(
                    f"The weight {name!r} of a {type(block).__name__} is a weight of other layers, too, and ranks "
                    "gather each of these layers alone (FSDP2). Give each layer a weight of its own, override "
                    "`parallelize_...` of the half so that it shards none of them, or take a layout of whole copies."
                )
        if any(id(parameter) not in ignored for parameter in block.parameters()):
            fully_shard(block, mesh=mesh, **settings)


def _outside(module: nn.Module, blocks: Collection[nn.Module]) -> Iterator[nn.Module]:
    """All parts of a module that lie in none of these blocks."""
    if module not in blocks:
        yield module
        for child in module.children():
            yield from _outside(child, blocks)


class RoleForward(nn.Module):
    """Runs methods of the user's module as the forward of one module that holds the half, for FSDP2's hooks."""

    def __init__(self, modules: dict[str, nn.Module]) -> None:
        super().__init__()
        for path, module in modules.items():
            self.add_module("/" + path.replace(".", "/"), module)  # no name that a module has anyway

    def forward(self, function: Callable[..., Any], *args: Any) -> Any:
        """``function(*args)``."""
        return function(*args)
