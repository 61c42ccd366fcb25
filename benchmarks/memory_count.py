"""Bytes that a rank of a role holds, counted without a device: nothing is computed, and no other rank exists.

Two counts make the sum, since no mode of torch does both. What is kept by a layout (weights, gradients, optimizer
states, blocks that are gathered) is counted on fake tensors, by the engine that training uses, in a process group
whose collectives do nothing; each block computes next to nothing there. What is kept of a batch (saved activations,
what one layer works with, logits) is counted on the meta device, by the module's own methods with the types that mixed
precision gives them. Layers that tensor ranks share are divided in both, by the plan by which training divides them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode  # they have no public names
from torch.autograd.graph import get_gradient_edge
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from benchmarks.live_bytes import COMPUTING, EmulatedAutocast, LiveBytes
from flowtrain_lightning import FlowModule, PackedBatch, PackedMedia
from flowtrain_lightning.allocator import ENCODER, ROLES, Layout
from flowtrain_lightning.allocator.role_layout import Recompute
from flowtrain_lightning.compute.feature_spec import as_features
from flowtrain_lightning.compute.step_metrics import MetricAccumulator
from flowtrain_lightning.parallel import HalfEngine
from flowtrain_lightning.parallel.blocks import recompute_in_backward, repeated_blocks
from flowtrain_lightning.parallel.experts.expert_parallel import experts_of
from flowtrain_lightning.parallel.gradients import local_part
from flowtrain_lightning.parallel.halves import half_parameters, half_trains
from flowtrain_lightning.parallel.layouts import make_engine
from flowtrain_lightning.parallel.ranks.cross_group import CrossGroup
from flowtrain_lightning.parallel.ranks.groups import Groups
from flowtrain_lightning.parallel.ranks.job_secret import JobKey
from flowtrain_lightning.parallel.role_groups import make_groups
from flowtrain_lightning.parallel.tensor_plan import divide_layers
from flowtrain_lightning.placement.meta_device import MetaTensorMode, copy_on_meta


@dataclass(frozen=True)
class CountedStates:
    """What a rank holds of a role whatever it computes on, in bytes.

    Attributes:
        weights: its shards or copies, and what computing needs of them all the time.
        gradients: of them, when a step ends.
        optimizer: two moments.
        gathered: at most, of what comes and goes while blocks compute: gathered weights, and gradients that are not
            scattered yet.
        gathered_at_the_end: of a backward, where nothing of its batch is kept any longer; the same.
    """

    weights: int
    gradients: int
    optimizer: int
    gathered: int
    gathered_at_the_end: int


@dataclass(frozen=True)
class CountedBatch:
    """What a rank holds of one batch of a role, in bytes.

    Attributes:
        saved: what is kept from its forward to its backward.
        peak: at most, in forward and backward; nothing of weights and their gradients.
        weight_copies: of whole copies in float32, what autocast casts of them and keeps meanwhile.
    """

    saved: int
    peak: int
    weight_copies: int


def count_states(module: FlowModule, role: str, layout: Layout, recompute: Recompute, precision: str) -> CountedStates:
    """What a layout keeps and gathers, by the engine that puts it onto the half.

    Args:
        module: not built.
        role: whose half.
        layout: of the role.
        recompute: what of a block is computed again.
        precision: of the Trainer.
    """
    with _fake_ranks(layout.ranks) as groups:
        with FakeTensorMode() as fake:
            module.set_local_roles(ROLES)
            module.configure_model()
        blocks = [block for path in module.halves[role] for block in repeated_blocks(module.get_submodule(path))]
        for block in blocks:
            for part in (block, *experts_of([block])):  # experts gather what is theirs
                part.forward = partial(_touch, part)
        inside = {id(weight) for block in blocks for weight in block.parameters()}
        half = {id(weight) for weight in half_parameters(module, role)}
        named = [(name, id(one)) for name, one in module.named_parameters(remove_duplicate=False) if id(one) in half]
        first = next(number for number, (_, weight) in enumerate(named) if weight in inside)
        before, after = (
            [name for name, weight in side if weight not in inside] for side in (named[:first], named[first:])
        )
        # Outside of the mode, since meshes are read; what is made of fake weights is fake all the same.
        engine = make_engine(
            module,
            role,
            layout,
            make_groups(role, layout, groups, "cpu", waits_for_others=False, has_experts=bool(experts_of(blocks))),
            recompute=recompute,
            offload="none",
            device_type="cpu",
            precision=precision,
            early=True,
            fill=_nothing,  # weights are fake, and there from the start
        )
        with fake:
            return _step(module, engine, _Model(before, blocks, after), layout.tensor, fake)


class _Model(NamedTuple):
    """Blocks, and names of the weights that are used before and after them."""

    before: list[str]
    blocks: list[nn.Module]
    after: list[str]


def _step(module: FlowModule, engine: HalfEngine, model: _Model, tensor: int, fake: FakeTensorMode) -> CountedStates:
    """Forward, backward and optimizer, of weights alone; each tensor rank has one token."""
    most, most_at_the_end = 0, 0

    def sums(names: list[str]) -> Tensor | float:
        return _sums(map(module.get_parameter, names)) if names else 0.0

    def forward() -> Tensor:
        rows = torch.zeros(tensor, 1, requires_grad=True)
        rows.register_hook(blocks_are_done)  # type: ignore[no-untyped-call]
        out = rows + sums(model.before)
        for block in model.blocks:
            out = block(out)
        return (out + sums(model.after)).sum()

    def blocks_are_done(_: Tensor) -> None:
        nonlocal most
        most = max(most, live.restart())

    optimizer = torch.optim.AdamW([weight for weight in engine.parameters if weight.requires_grad])
    engine.begin_step()
    with LiveBytes((local_part(weight.detach()) for weight in engine.parameters), fake) as live:
        for last in (False, True):  # the second finds the gradients of the first
            loss = engine.call(forward)
            with engine.backward(last=last):
                loss.backward()  # type: ignore[no-untyped-call]
            most_at_the_end = max(most_at_the_end, live.restart())
    optimizer.step()
    gradients = _local_bytes(weight.grad for weight in engine.parameters if weight.grad is not None)
    moments = (each for of_one in optimizer.state.values() for each in of_one.values() if each.ndim)
    weights = _local_bytes(weight.detach() for weight in engine.parameters)
    return CountedStates(weights, gradients, _local_bytes(moments), most - gradients, most_at_the_end - gradients)


def count_batch(
    module: FlowModule,
    role: str,
    packed: PackedBatch,
    media: PackedMedia,
    *,
    sharded: bool,
    recompute: Recompute,
    tensor: int = 1,
) -> CountedBatch:
    """What forward and backward of one batch keep, in mixed precision.

    Args:
        module: not built.
        role: whose half computes.
        packed: a microbatch, for the backbone.
        media: what it reads, or an encoder batch for the encoder.
        sharded: weights are gathered in bfloat16; else they are float32, and copies of them are left out.
        recompute: what of a block is computed again.
        tensor: ranks that share every layer.
    """
    if tensor == 1:
        return _count_batch(_built(module, sharded), role, packed, media, recompute)
    with _fake_ranks(tensor):
        built = _built(module, sharded)
        halves = {path: built.get_submodule(path) for path in built.halves[role]}
        divide_layers(halves, built.tensor_plan(role, tensor), DeviceMesh("cpu", torch.arange(tensor)))
        return _count_batch(built, role, packed, media, recompute)


def _built(module: FlowModule, sharded: bool) -> FlowModule:
    """The module on the meta device, with weights in the type in which they are computed with or kept."""
    former = torch.get_default_dtype()
    torch.set_default_dtype(COMPUTING if sharded else torch.float32)
    try:
        return copy_on_meta(module)
    finally:
        torch.set_default_dtype(former)


def _count_batch(
    built: FlowModule, role: str, packed: PackedBatch, media: PackedMedia, recompute: Recompute
) -> CountedBatch:
    for block in (block for path in built.halves[role] for block in repeated_blocks(built.get_submodule(path))):
        recompute_in_backward(block, recompute)
    live = LiveBytes(map(local_part, [*built.parameters(), *built.buffers()]))
    autocast = EmulatedAutocast(live)
    # Of weights, vectors alone get gradients: those of matrices are counted with the layout, where they are summed.
    half = half_parameters(built, role)
    reached: list[Tensor] = [weight for weight in half if weight.requires_grad and weight.ndim == 1]
    media = media.with_patches(media.pixels.to("meta", next(half.dtype for half in built.parameters())))
    with MetaTensorMode(), autocast, built.logging_into(MetricAccumulator()):
        if role == ENCODER:
            with live:
                output = built.encode(media)
        else:
            with torch.no_grad():
                features = built.encode(media)
            rows = features if isinstance(features, tuple) else (features,)
            trains = half_trains(built, ENCODER)
            leaves = tuple(row.detach().requires_grad_(trains and row.is_floating_point()) for row in rows)
            reached += [row for row in leaves if row.requires_grad]
            with live:
                output = built.backbone_step(packed, as_features(media.modality, leaves), "train")[0]
    outputs = [each for each in (output if isinstance(output, tuple) else (output,)) if each.requires_grad]
    saved = live.now
    edges, gradients = [get_gradient_edge(each) for each in outputs], [torch.empty_like(each) for each in outputs]
    del output, outputs
    with MetaTensorMode(), autocast, live:
        torch.autograd.backward(edges, gradients, inputs=[get_gradient_edge(each) for each in reached])
    return CountedBatch(saved, live.most, autocast.copied_bytes)


def _local_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(local_part(each).nbytes for each in tensors)


def _touch(block: nn.Module, rows: Tensor) -> Tensor:
    """Uses every weight of the block once, as its hooks have left it, and keeps nothing of it."""
    within = [part for part in experts_of([block]) if part is not block]
    for part in within:
        rows = part(rows)
    divided = {id(weight) for part in within for weight in part.parameters()}
    return rows + _sums(weight for weight in block.parameters() if id(weight) not in divided)


def _sums(weights: Iterable[Tensor]) -> Tensor:
    """The sum of all numbers that this rank has of some weights."""
    parts = (weight.to_local() if isinstance(weight, DTensor) else weight for weight in weights)
    return torch.stack([part.sum() for part in parts]).sum()


def _nothing(_: object) -> None:
    """Does nothing."""


@contextmanager
def _fake_ranks(ranks: int) -> Iterator[Groups]:
    """Inside, this process is the first of so many ranks, whose collectives do nothing."""
    dist.init_process_group("fake", rank=0, world_size=ranks)
    alone = CrossGroup(HashStore(), 0, 1, timedelta(seconds=1))
    world = dist.group.WORLD
    assert world is not None
    try:
        yield Groups(alone, alone, world, 0, ranks, None, JobKey(b"nobody else is here"), iter(()))
    finally:
        dist.destroy_process_group()
