"""Cuts a half into stages: each has some of the repeated blocks, the first what comes before them, the last the rest.

Names stay. What another stage holds has no memory here (meta device), as the halves of other roles have none.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from flowtrain_lightning.allocator import StageSchedule
from flowtrain_lightning.parallel.blocks import repeated_blocks
from flowtrain_lightning.parallel.halves import HalvedModule, role_of
from flowtrain_lightning.parallel.weight_marks import keeping_marks


@dataclass(frozen=True)
class StageCut:
    """The part of a half that one stage holds.

    Attributes:
        role: whose half it is.
        stage: which one.
        pipeline: all stages of the half.
        blocks: paths of all repeated blocks of the half, in order.
        chunks: the numbers of those of this stage: runs that are computed one by one.
        held: names of the parameters of the half that this stage holds.
        absent: names of parameters and buffers of the half that it does not hold.
        before: those parameters among them that are used before the blocks.
        ties: names of the parameters that the first and the last stage both hold.
    """

    role: str
    stage: int
    pipeline: StageSchedule
    blocks: tuple[str, ...]
    chunks: tuple[range, ...]
    held: frozenset[str]
    absent: frozenset[str]
    before: frozenset[str]
    ties: tuple[str, ...]

    @property
    def is_last(self) -> bool:
        """The stage has the last layers, in its last chunk."""
        return self.stage == self.pipeline.last

    @property
    def place(self) -> tuple[int, StageSchedule]:
        """The number of the stage, and all of them."""
        return self.stage, self.pipeline

    @property
    def stages(self) -> int:
        """How many there are."""
        return self.pipeline.stages

    def ends_in(self, chunk: int) -> bool:
        """Whether a chunk of this stage has the last blocks of the half."""
        return self.chunks[chunk].stop == len(self.blocks)

    def computes_elsewhere(self, path: str) -> bool:
        """Whether other stages hold all weights of a module of the half, of this path."""
        return not any(name.startswith(f"{path}.") for name in self.held)


def cut_half(module: HalvedModule, role: str, stage: int, pipeline: StageSchedule) -> StageCut:
    """Finds what one stage of a half holds.

    What was registered before the first block belongs to the first stage, as embeddings do, and what was registered
    behind it to the last, as the last norm and the head. A parameter that both use is on both. The blocks are divided
    so that no stage has more to do than it must: the last stage of the trunk has fewer of them, as its head counts too,
    by its weights. An encoder's merger computes fewer rows than its blocks, and does not count.

    Args:
        module: is built, if only without memory.
        role: whose half it is.
        stage: which one.
        pipeline: all stages of the half.

    Raises:
        ValueError: there are fewer blocks than chunks, or other stages than the first and the last share a weight.
    """
    blocks = _blocks(module, role)
    count, virtual, last = pipeline.runs, pipeline.chunks, pipeline.last
    if len(blocks) < count:
        several = f", with {virtual} runs of layers each" if virtual > 1 else ""
        raise ValueError(
            f"The {role} has pipeline {pipeline.stages}{several}, but {len(blocks)} repeated blocks: classes with "
            f"weights that a list of modules holds several times. Set pipeline to {max(len(blocks) // virtual, 1)} or "
            "less, or put its layers into one nn.ModuleList."
        )
    behind = _head_in_layers(module, role, blocks) if role == module.role_graph.trunk else 0.0
    bounds = [0, *itertools.accumulate(pipeline.layers(len(blocks), behind))]
    chunks = [range(*each) for each in itertools.pairwise(bounds)]
    stage_of_block = [pipeline.stage_of(each) for each, chunk in enumerate(chunks) for _ in chunk]
    holders: defaultdict[int, set[int]] = defaultdict(set)  # of each parameter, by identity, since names may share one
    names: dict[str, int] = {}
    first, seen = f"{blocks[0]}.", False
    for name, parameter in module.named_parameters(remove_duplicate=False):
        seen |= name.startswith(first)
        if role_of(name, module.halves) == role:
            number = _block_of(name, blocks)
            names[name] = id(parameter)
            holders[id(parameter)].add(stage_of_block[number] if number is not None else (last if seen else 0))
    absent = {name for name, key in names.items() if stage not in holders[key]}
    before = {name for name in absent if 0 in holders[names[name]] and _block_of(name, blocks) is None}
    known = {name for name, _ in module.named_parameters()}
    for name, _ in module.named_buffers():
        number = _block_of(name, blocks) if role_of(name, module.halves) == role else None
        if number is not None and stage_of_block[number] != stage:
            absent.add(name)
    both = {0, last} if last else {-1}  # none, where one stage has both ends
    ties = tuple(name for name, key in names.items() if name in known and both <= holders[key])
    for name, key in names.items():
        if len(holders[key]) > 1 and holders[key] != both:
            _refuse_shared(name, role, holders[key], last)
    own = tuple(chunks[pipeline.number(stage, chunk)] for chunk in range(virtual))
    held = frozenset(names.keys() - absent)
    return StageCut(role, stage, pipeline, blocks, own, held, frozenset(absent), frozenset(before & known), ties)


def drop_other_stages(module: HalvedModule, cut: StageCut) -> None:
    """Leaves what other stages hold without memory. Tied parameters stay tied."""
    assert isinstance(module, nn.Module)
    empty: dict[int, nn.Parameter] = {}
    with keeping_marks(module):
        for name, parameter in list(module.named_parameters(remove_duplicate=False)):
            if name in cut.absent and not parameter.is_meta:
                if id(parameter) not in empty:
                    without = torch.empty_like(parameter.data, device="meta")
                    empty[id(parameter)] = nn.Parameter(without, parameter.requires_grad)
                _set(module, name, empty[id(parameter)])
    for name, buffer in list(module.named_buffers()):
        if name in cut.absent:
            _set(module, name, buffer.to("meta"))


def _refuse_shared(name: str, role: str, stages: Collection[int], last: int) -> None:
    """Refuses a weight whose gradient several stages would have parts of, and nobody would sum."""
    *others, final = map(str, sorted(stages))
    summed = f"only what stages 0 and {last} share, as embedding and head do, is" if last else "none of these are"
    raise ValueError(
        f"The weight {name!r} is used in stages {', '.join(others)} and {final} of the {role}, and of the gradients of "
        f"several stages {summed} summed. Give each block a weight of its own, or set pipeline to 1."
    )


def _set(module: nn.Module, name: str, tensor: torch.Tensor) -> None:
    owner, _, own_name = name.rpartition(".")
    setattr(module.get_submodule(owner), own_name, tensor)


def _blocks(module: HalvedModule, role: str) -> tuple[str, ...]:
    """Paths of the repeated blocks of a half; where there are several kinds, of the one with the most weights."""
    assert isinstance(module, nn.Module)
    found = [block for path in module.halves[role] for block in repeated_blocks(module.get_submodule(path))]
    weights: defaultdict[type[nn.Module], int] = defaultdict(int)
    for block in found:
        weights[type(block)] += sum(parameter.numel() for parameter in block.parameters())
    most = max(weights, key=lambda kind: weights[kind], default=None)
    chosen = {id(block) for block in found if type(block) is most}
    return tuple(path for path, part in module.named_modules() if id(part) in chosen)


def _head_in_layers(module: HalvedModule, role: str, blocks: Sequence[str]) -> float:
    """Weights of a half that were registered behind its first block and are in none, over those of a block."""
    inside: dict[int, int] = {}
    behind: dict[int, int] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if role_of(name, module.halves) == role:
            if _block_of(name, blocks) is not None:
                inside[id(parameter)] = parameter.numel()
            elif inside:
                behind[id(parameter)] = parameter.numel()
    return StageSchedule.head_in_layers(sum(behind.values()), sum(inside.values()) / len(blocks))


def _block_of(name: str, blocks: Sequence[str]) -> int | None:
    """The number of the block that a parameter or buffer lies in, if it lies in one."""
    return next((number for number, path in enumerate(blocks) if name.startswith(f"{path}.")), None)
