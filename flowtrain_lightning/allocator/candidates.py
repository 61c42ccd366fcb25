"""The layouts that a role may have: those that divide it evenly, keep to nodes and fit into memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

import numpy as np
from numpy.typing import NDArray

from flowtrain_lightning.allocator.description import Layers
from flowtrain_lightning.allocator.devices import Cluster
from flowtrain_lightning.allocator.efficiency import FloatArray
from flowtrain_lightning.allocator.layout import Layout, Sharding
from flowtrain_lightning.allocator.memory import USABLE, MemoryUse, memory_use
from flowtrain_lightning.allocator.problem import Family, Recompute, RoleProblem, family_of
from flowtrain_lightning.allocator.roles import BACKBONE
from flowtrain_lightning.allocator.step_time import StepTime, step_time

SPREAD = 1.25
"""Tokens of the largest microbatch over those of the mean one: they are alike in cost, and so differ in tokens."""

ONE_BY_ONE = 1024
"""Up to so many devices every data degree is tried; above, those that fill whole nodes: fewer than 1 % are lost."""


@dataclass(frozen=True)
class Choices:
    """Which layouts may be used at all, for instance because a runtime knows no others.

    Attributes:
        tensor: tensor degrees; those that do not divide a node are left out.
        pipeline: pipeline degrees of the backbone. Encoders have none: they are shallow, and tensor ranks and
            sharding make them small enough.
        context: context degrees of the backbone; encoders share no picture among ranks.
        shard: how weights may be held.
        recompute: what backwards may compute again.
    """

    tensor: Sequence[int] = (1, 2, 4, 8)
    pipeline: Sequence[int] = (1, 2, 4, 8, 16)
    context: Sequence[int] = (1, 2, 4, 8)
    shard: Sequence[Sharding] = ("replicate", "zero1", "zero2", "fsdp")
    recompute: Sequence[Recompute] = ("none", "selective", "full")


WHOLE_COPIES = Choices(tensor=(1,), pipeline=(1,), context=(1,), shard=("replicate",))
"""Layouts in which every rank of a role holds all of its half."""


@dataclass(frozen=True)
class Evaluated:
    """A family with its times and bytes.

    Attributes:
        family: the layouts.
        time: of a step, by purpose.
        memory: of a device, by purpose.
    """

    family: Family
    time: StepTime
    memory: MemoryUse


def usable_bytes(cluster: Cluster) -> float:
    """Bytes of a device that a plan may use."""
    return USABLE * cluster.device.memory


def evaluate(problem: RoleProblem, family: Family) -> Evaluated:
    """Times and bytes of a family."""
    time, load = step_time(problem, family), problem.load
    largest = np.minimum(load.budget, np.maximum(SPREAD * time.tokens, load.lengths.max()))
    return Evaluated(family, time, memory_use(problem, family, largest, time.microbatches))


@dataclass(frozen=True)
class Candidate:
    """One layout of one role, with what it costs.

    Attributes:
        role: whose.
        layout: the layout.
        recompute: what the backward computes again.
        seconds: time of the role's part of a step.
        bytes: memory of a device.
    """

    role: str
    layout: Layout
    recompute: Recompute
    seconds: float
    bytes: float

    @property
    def devices(self) -> int:
        """How many it needs."""
        return self.layout.ranks

    def details(self, problem: RoleProblem) -> Evaluated:
        """Its times and bytes by purpose."""
        return evaluate(problem, family_of(self.layout, self.recompute))


@dataclass(frozen=True)
class Table:
    """Candidates of one role as columns, one row each.

    Attributes:
        role: whose.
        families: what ``family`` numbers.
        family: ``[candidates]`` the family of each.
        place: ``[candidates]`` its place among the family's data degrees.
        devices: ``[candidates]`` devices.
        seconds: ``[candidates]`` time of the role's part of a step.
        bytes: ``[candidates]`` memory of a device.
    """

    role: str
    families: tuple[Family, ...]
    family: NDArray[np.int64]
    place: NDArray[np.int64]
    devices: FloatArray
    seconds: FloatArray
    bytes: FloatArray

    def __len__(self) -> int:
        return len(self.family)

    def candidate(self, row: int) -> Candidate:
        """One row."""
        family = self.families[self.family[row]]
        return Candidate(
            self.role,
            family.layout(int(self.place[row])),
            family.recompute,
            float(self.seconds[row]),
            float(self.bytes[row]),
        )

    def select(self, rows: NDArray[np.int64] | NDArray[np.bool_]) -> Table:
        """Some of the rows."""
        columns = ("family", "place", "devices", "seconds", "bytes")
        return Table(self.role, self.families, *(getattr(self, name)[rows] for name in columns))

    def slowed_by(self, seconds: float) -> Table:
        """The same candidates, each slower by ``seconds``."""
        return replace(self, seconds=self.seconds + seconds)

    @cached_property
    def undominated(self) -> Table:
        """Without every row that another one beats: no more devices, and no slower. Rising in devices."""
        order = np.lexsort((self.bytes, self.seconds, self.devices))
        sorted_seconds = self.seconds[order]
        best_before = np.minimum.accumulate(np.concatenate([[np.inf], sorted_seconds[:-1]]))
        return self.select(order[sorted_seconds < best_before * (1 - 1e-12)])


def candidates(problem: RoleProblem, choices: Choices, as_backbone: bool = False) -> Table:
    """All layouts of a role that keep to the rules and fit into a device.

    Args:
        problem: the role.
        choices: which layouts may be used at all.
        as_backbone: see `families_of`.
    """
    limit = usable_bytes(problem.cluster)
    families: list[Family] = []
    columns = []
    for family in families_of(problem, choices, as_backbone):
        evaluated = evaluate(problem, family)
        time, total = evaluated.time, evaluated.memory.total
        fits = np.flatnonzero(total <= limit)
        if not len(fits):
            continue
        number = np.full(len(fits), len(families))
        families.append(family)
        devices = family.data[fits] * family.replica
        columns.append((number, fits, devices, time.total[fits], total[fits]))
    if not families:
        none = np.empty(0)
        return Table(problem.role, (), none.astype(np.int64), none.astype(np.int64), none, none, none)
    joined = (np.concatenate(parts) for parts in zip(*columns, strict=True))
    return Table(problem.role, tuple(families), *joined)


def families_of(problem: RoleProblem, choices: Choices, as_backbone: bool = False) -> Iterator[Family]:
    """The families of a role that divide its heads and layers, keep tensor ranks in a node, and have data to work on.

    Args:
        problem: the role.
        choices: which layouts may be used at all.
        as_backbone: an encoder may have a pipeline, for one layout of everything.
    """
    cluster, half = problem.cluster, problem.half
    backbone = as_backbone or problem.role == BACKBONE
    pipelines = choices.pipeline if backbone else (1,)
    contexts = choices.context if problem.role == BACKBONE else (1,)
    for tensor, pipeline, context in product(choices.tensor, pipelines, contexts):
        if not _divides(half.layers, tensor, cluster.per_node) or pipeline > half.depth:
            continue
        if tensor * context > cluster.per_node and tensor < cluster.per_node:
            continue  # Sequences are shared between nodes only where layers already fill one.
        data = data_degrees(problem, tensor * pipeline * context)
        if not len(data):
            continue
        for shard, recompute in product(choices.shard, choices.recompute):
            if pipeline > 1 and shard not in ("replicate", "zero1"):
                continue  # Stages would gather or scatter for every microbatch.
            if recompute != "none" and not (half.trains or problem.receives_gradient):
                continue
            degrees = data[data * context > 1] if shard != "replicate" else data
            if len(degrees):
                yield Family(degrees, tensor, pipeline, context, shard, recompute)


def data_degrees(problem: RoleProblem, replica: int) -> FloatArray:
    """Data degrees for replicas of so many devices: each has at least one sample or media of a step."""
    devices = problem.cluster.devices
    most = min(devices // replica, max(1, int(problem.load.items)))
    degrees: FloatArray = np.arange(1.0, most + 1)
    if devices <= ONE_BY_ONE:
        return degrees
    whole = (degrees * replica) % problem.cluster.per_node == 0
    return np.asarray(degrees[whole | (degrees * replica <= problem.cluster.per_node)])


def _divides(layers: tuple[Layers, ...], tensor: int, per_node: int) -> bool:
    """Whether so many tensor ranks can share every layer, inside a node."""
    if per_node % tensor:
        return False
    return all(part.heads % tensor == 0 and part.active_feed_forward % tensor == 0 for part in layers)
