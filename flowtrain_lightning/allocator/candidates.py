"""The layouts that a role may have: those that divide it evenly, keep to nodes and fit into memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from flowtrain_lightning.allocator.devices import Cluster
from flowtrain_lightning.allocator.flops import FloatArray, IntArray
from flowtrain_lightning.allocator.memory_use import USABLE, MemoryUse, memory_use
from flowtrain_lightning.allocator.role_layout import Layout, Offload, Recompute, Sharding
from flowtrain_lightning.allocator.role_problem import Family, RoleProblem, family_of
from flowtrain_lightning.allocator.role_time import RoleTime, batches, role_time
from flowtrain_lightning.packing.stage_schedule import Cut

SPREAD = 1.25
"""Tokens of the largest microbatch over those of the mean one: they are alike in cost, and so differ in tokens."""

LONG_SHARE = 1024
"""Tokens of a mean sample that each context rank should have; below, kernels are too short to share."""


@dataclass(frozen=True)
class SearchSpace:
    """The layouts that may be used at all, for instance because a runtime knows no others.

    Attributes:
        tensor: tensor degrees; those that do not divide a node are left out.
        pipeline: pipeline degrees.
        context: context degrees of the backbone; no media item of an encoder is shared among ranks.
        shard: how weights may be held.
        recompute: what backwards may compute again.
        expert: data ranks among which a mixture's experts may be divided.
        shard_nodes: nodes over which fully sharded weights may be there once between them (HSDP), besides all.
        offload: what of roles with a backward lies in the host's memory; with activations nothing is computed again.
    """

    tensor: Sequence[int] = (1, 2, 4, 8)
    pipeline: Sequence[int] = (1, 2, 4, 8, 16)
    context: Sequence[int] = (1, 2, 4, 8)
    shard: Sequence[Sharding] = ("replicate", "zero1", "zero2", "fsdp")
    recompute: Sequence[Recompute] = ("none", "selective", "full")
    expert: Sequence[int] = (1, 4, 8, 16)
    shard_nodes: Sequence[int] = (1, 2, 4, 8, 16)
    offload: Offload = "none"


WHOLE_COPIES = SearchSpace(tensor=(1,), pipeline=(1,), context=(1,), shard=("replicate",), expert=(1,))
"""Layouts in which every rank of a role holds all of its half."""


@dataclass(frozen=True)
class Evaluation:
    """Times and bytes of a family of layouts.

    Attributes:
        family: the layouts.
        time: of a step, by purpose.
        memory: of a device, by purpose.
    """

    family: Family
    time: RoleTime
    memory: MemoryUse


def usable_bytes(cluster: Cluster) -> float:
    """Bytes of a device that a plan may use."""
    return USABLE * cluster.device.memory


def evaluate(problem: RoleProblem, family: Family) -> Evaluation:
    """Times and bytes of a family: where batches may be too few to fill its stages, bytes are those of the fewest."""
    time, load = role_time(problem, family), problem.load
    fewest, tokens = time.microbatches, time.tokens
    if family.pipeline > 1 and not load.fills_stages:
        fewest, tokens = batches(problem, replace(family, pipeline=1))
    largest = np.minimum(load.budget, np.maximum(SPREAD * tokens, load.lengths.max()))
    return Evaluation(family, time, memory_use(problem, family, largest, fewest))


@dataclass(frozen=True)
class Candidate:
    """One layout of one role, with what it costs.

    Attributes:
        role: whose.
        layout: the layout.
        recompute: what the backward computes again.
        seconds: time of the role's part of a step.
        bytes: memory of a device.
        batch_seconds: time of one microbatch or encoder batch, forward and backward.
        offload: what lies in the host's memory.
        activation_bytes: that a rank may keep for backwards; None for no limit.
    """

    role: str
    layout: Layout
    recompute: Recompute
    seconds: float
    bytes: float
    batch_seconds: float
    offload: Offload = "none"
    activation_bytes: float | None = None

    @property
    def devices(self) -> int:
        """The number that it needs."""
        return self.layout.ranks

    def details(self, problem: RoleProblem) -> Evaluation:
        """Its times and bytes by purpose."""
        return evaluate(problem, family_of(self.layout, self.recompute, self.offload, self.activation_bytes))


@dataclass(frozen=True)
class CandidateTable:
    """Candidates of one role as columns, an entry for each.

    Attributes:
        role: whose.
        families: what ``family`` numbers.
        family: ``[candidates]`` the family of each.
        degree: ``[candidates]`` which of the family's data degrees it has, as an index.
        devices: ``[candidates]`` devices.
        seconds: ``[candidates]`` time of the role's part of a step.
        bytes: ``[candidates]`` memory of a device.
        batch_seconds: ``[candidates]`` time of one microbatch or encoder batch, forward and backward.
    """

    role: str
    families: tuple[Family, ...]
    family: IntArray
    degree: IntArray
    devices: FloatArray
    seconds: FloatArray
    bytes: FloatArray
    batch_seconds: FloatArray

    def __len__(self) -> int:
        return len(self.family)

    def candidate(self, index: int) -> Candidate:
        """The candidate of one entry."""
        family = self.families[self.family[index]]
        return Candidate(
            self.role,
            family.layout(int(self.degree[index])),
            family.recompute,
            float(self.seconds[index]),
            float(self.bytes[index]),
            float(self.batch_seconds[index]),
            family.offload,
        )

    def select(self, chosen: IntArray | NDArray[np.bool_]) -> CandidateTable:
        """The table of some of the candidates, by index or by a mask."""
        columns = ("family", "degree", "devices", "seconds", "bytes", "batch_seconds")
        return CandidateTable(self.role, self.families, *(getattr(self, name)[chosen] for name in columns))

    def slowed_by(self, seconds: float) -> CandidateTable:
        """The table with every candidate slower by ``seconds``."""
        return replace(self, seconds=self.seconds + seconds)

    def of_families(self, wanted: Callable[[Family], bool]) -> CandidateTable:
        """The table of those whose family is wanted."""
        mask = np.array([wanted(family) for family in self.families], dtype=bool)
        return self.select(mask[self.family]) if len(mask) else self

    def of_layouts(self, wanted: Callable[[Layout], bool]) -> CandidateTable:
        """The table of those whose kind of layout is wanted, asked with the most data ranks that a family has."""
        mask = np.array([wanted(layout) for layout in self._largest], dtype=bool)
        return self.select(mask[self.family]) if len(mask) else self

    @cached_property
    def _largest(self) -> tuple[Layout, ...]:
        """Family by family the layout with the most data ranks: plans of every placement ask for them anew."""
        return tuple(family.layout(-1) for family in self.families)

    def on(self, devices: float) -> CandidateTable:
        """The table of those that have so many devices."""
        return self.select(self.devices == devices)

    @cached_property
    def fastest_by_devices(self) -> CandidateTable:
        """The Pareto front of devices and time: no candidate is slower than another one with as few devices.

        Rising in devices.
        """
        order = np.lexsort((self.bytes, self.seconds, self.devices))
        sorted_seconds = self.seconds[order]
        best_before = np.minimum.accumulate(np.concatenate([[np.inf], sorted_seconds[:-1]]))
        return self.select(order[sorted_seconds < best_before * (1 - 1e-12)])

    def fastest_by_memory(self, among: IntArray) -> IntArray:
        """The Pareto front of memory and time among candidates, the fastest first; takes and gives ``[n]`` indices."""
        order = among[np.lexsort((self.bytes[among], self.seconds[among]))]
        lightest_before = np.minimum.accumulate(np.concatenate([[np.inf], self.bytes[order][:-1]]))
        front: IntArray = order[self.bytes[order] < lightest_before]
        return front


def candidates(
    problem: RoleProblem,
    space: SearchSpace,
    as_backbone: bool = False,
    considered: Callable[[Family], Family | None] = lambda family: family,
) -> CandidateTable:
    """All layouts of a role that keep to the rules and fit into a device.

    Args:
        problem: the role.
        space: which layouts may be used at all.
        as_backbone: see `families_of`.
        considered: family -> what is looked at of it, or None; what else there is costs no time.
    """
    limit = usable_bytes(problem.cluster)
    families: list[Family] = []
    columns = []
    for family in filter(None, map(considered, families_of(problem, space, as_backbone))):
        evaluated = evaluate(problem, family)
        time, total = evaluated.time, evaluated.memory.total
        computing = time.forward + time.backward
        fits = np.flatnonzero((total <= limit) & (time.exchange <= computing))
        if not len(fits):
            continue
        number = np.full(len(fits), len(families))
        families.append(family)
        devices = family.data[fits] * family.replica
        columns.append((number, fits, devices, time.total[fits], total[fits], time.batch[fits]))
    if not families:
        none, numbers = np.empty(0), np.empty(0, dtype=np.int64)
        return CandidateTable(problem.role, (), numbers, numbers, none, none, none, none)
    joined = (np.concatenate(parts) for parts in zip(*columns, strict=True))
    return CandidateTable(problem.role, tuple(families), *joined)


def families_of(problem: RoleProblem, space: SearchSpace, as_backbone: bool = False) -> Iterator[Family]:
    """The families of a role that divide its heads and layers, keep tensor ranks in a node, and have data to work on.

    Args:
        problem: the role.
        space: which layouts may be used at all.
        as_backbone: an encoder may have a pipeline, for one layout of everything.
    """
    cluster = problem.cluster
    has_backward = problem.half.trains or problem.receives_gradient
    offload: Offload = space.offload if has_backward else "none"
    pipelines = space.pipeline if problem.is_trunk or as_backbone else (1,)
    contexts = space.context if problem.is_trunk else (1,)
    for tensor, pipeline, context in product(space.tensor, pipelines, contexts):
        if why_undividable(problem, tensor, pipeline, context) is not None:
            continue
        if tensor * context > cluster.per_node and tensor < cluster.per_node:
            continue  # Sequences are shared between nodes only where layers already fill one.
        if context > 1 and not _worth_sharing(problem.load.lengths, context):
            continue
        data = data_degrees(problem, tensor * pipeline * context)
        for shard, recompute in product(space.shard, space.recompute):
            if pipeline > 1 and shard == "zero2":
                continue  # Stages would scatter for every microbatch, and hold their weights whole for it.
            if recompute != "none" and (not has_backward or offload in ("activations", "all")):
                continue
            every = Family(data, tensor, pipeline, context, shard, recompute, offload=offload)
            both = pipeline > 1 and problem.is_trunk  # others have no head
            cuts = [replace(every, cut=cut) for cut in get_args(Cut)] if both else [every]
            for family in (each for one in cuts for each in (one, *_in_groups(one, cluster, space.shard_nodes))):
                degrees = family.data[family.data * context > 1] if shard != "replicate" else family.data
                kept = replace(family, data=degrees)
                if len(degrees):
                    yield from _with_experts_divided(problem, kept, space.expert)


def why_undividable(problem: RoleProblem, tensor: int, pipeline: int, context: int, expert: int = 1) -> str | None:
    """Why a role's heads, layers or nodes cannot be shared by such degrees, as a sentence; None where they can."""
    role, layers, depth = problem.role, problem.half.layers, problem.half.depth
    per_node = problem.cluster.per_node
    if per_node % tensor:
        return f"Tensor ranks share a node, but {tensor} do not divide its {per_node} devices."
    for part in () if problem.half.perceptrons_only else layers:
        for what, count in (
            ("attention heads", part.heads),
            ("key-value heads", part.key_value_heads),
            ("feed-forward width", part.feed_forward if part.experts is None else tensor),
        ):
            if count % tensor:
                return f"The {role}'s {what}, {count}, cannot be divided among {tensor} tensor ranks."
        if part.experts is not None and part.experts.count % (tensor * expert):
            ranks = f"{expert} expert x {tensor} tensor ranks"
            return f"The {role}'s experts, {part.experts.count}, cannot be divided among {ranks}."
    if depth < pipeline:
        return f"The {role}'s {depth} layers cannot be divided among {pipeline} pipeline stages."
    if context > 1 and not problem.is_trunk:
        return f"The {role} has context {context}, but no media item is shared among ranks."
    reasons = (why_heads_cannot_be_shared(role, part.heads, tensor, context) for part in layers)
    return next(filter(None, reasons), None)


def why_heads_cannot_be_shared(role: str, heads: int, tensor: int, context: int) -> str | None:
    """Why context ranks cannot share attention, as a sentence; None where they can.

    They trade tokens for heads around it (`flowtrain_lightning.parallel.context_parallel`), of those that a tensor rank
    has. Key heads never stand in the way: where there are too few for all ranks they are repeated.
    """
    if context == 1 or heads % (tensor * context) == 0:
        return None
    degrees = f"{tensor} tensor x {context} context ranks" if tensor > 1 else f"{context} context ranks"
    possible = [degree for degree in range(2, heads // tensor + 1) if heads % (tensor * degree) == 0]
    below, above = ([d for d in possible if d < context], [d for d in possible if d > context])
    near = [*below[-1:], *above[:1]]
    advice = f"take a context degree of {' or '.join(map(str, near))}" if near else "leave the context degree out"
    return f"The {role}'s attention heads, {heads}, cannot be shared by {degrees}: each computes whole heads; {advice}."


def _with_experts_divided(problem: RoleProblem, family: Family, degrees: Sequence[int]) -> Iterator[Family]:
    """The family with every number of ranks among which its mixture's experts may be divided."""
    mixtures = [part.experts.count for part in problem.half.layers if part.experts is not None]
    of_group = None if family.group is None else family.group // family.context  # context ranks divide no experts
    for degree in degrees:
        if degree == 1:
            yield family
            continue
        possible = family.data % degree == 0
        whole = all(count % (degree * family.tensor) == 0 for count in mixtures)
        fits = whole and (of_group is None or of_group % degree == 0)
        if mixtures and fits and possible.any():
            yield replace(family, data=family.data[possible], expert=degree)


def _worth_sharing(lengths: IntArray, context: int) -> bool:
    """Whether samples are so long that each of ``context`` ranks has work: most of them, or the longest one."""
    each = LONG_SHARE * context
    return bool(lengths.mean() >= each or lengths.max() >= 8 * each)


def _in_groups(family: Family, cluster: Cluster, nodes: Sequence[int]) -> Iterator[Family]:
    """The family with its weights sharded over so many nodes and replicated across them (HSDP)."""
    if not family.sharded:
        return
    for count in nodes:
        group = count * cluster.per_node // family.tensor
        if group < 2:
            continue  # Tensor ranks fill the nodes: a rank alone would share its weights with nobody.
        fits = (family.holders % group == 0) & (family.holders > group) & (group % family.context == 0)
        if fits.any():
            yield replace(family, data=family.data[fits], group=group)


def data_degrees(problem: RoleProblem, replica: int) -> FloatArray:
    """``[degrees]`` for replicas of so many devices: each has at least one sample or media item of a step.

    Of several nodes a role has whole ones, or a power of two of one's devices, or it leaves so many to other roles.
    """
    cluster = problem.cluster
    most = min(cluster.devices // replica, max(1, int(problem.load.items)))
    degrees: FloatArray = np.arange(1.0, most + 1)
    if cluster.devices <= cluster.per_node:
        return degrees
    taken = degrees * replica
    parts = 2.0 ** np.arange(np.log2(cluster.per_node))
    neat = (taken % cluster.per_node == 0) | np.isin(taken, parts) | np.isin(cluster.devices - taken, parts)
    return np.asarray(degrees[neat])
