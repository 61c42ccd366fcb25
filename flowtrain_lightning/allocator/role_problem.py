"""A role before its layout is chosen, and the families of layouts that it is chosen from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from flowtrain_lightning.allocator.coefficients import Efficiency, assumed_efficiency
from flowtrain_lightning.allocator.description import Half, ModuleDescription
from flowtrain_lightning.allocator.devices import Cluster
from flowtrain_lightning.allocator.flops import FloatArray, attended_pairs, forward_flops, model_flops
from flowtrain_lightning.allocator.role_layout import Layout, Offload, PlanningError, Recompute, Sharding
from flowtrain_lightning.allocator.workload import RoleLoad, Workload, filled_batches, role_loads
from flowtrain_lightning.packing.role_graph import BACKBONE
from flowtrain_lightning.packing.stage_schedule import Cut, Schedule


@dataclass(frozen=True)
class Precision:
    """Bytes per number, with AdamW as the optimizer, and what of them is kept in the host's memory.

    Attributes:
        name: what the user calls it.
        weights: of a weight that is kept.
        copies: of a weight's copy in the computing type, such as autocast makes; 0 where weights are computed with.
        gradients: of a gradient.
        states: of the optimizer: two moments, and a master weight where there is one.
        computing: of an activation, and of a weight that is sent.
        reduced: of a gradient while ranks sum it.
        products: of a number that layers' products multiply; None is ``computing``.
        frozen: of a weight that does not train, with its copies; None is as of one that does.
        host_states: the optimizer's states are in the host's memory, where it updates the weights.
    """

    name: str
    weights: int
    copies: int
    gradients: int
    states: int
    computing: int
    reduced: int = 4
    products: int | None = None
    frozen: int | None = None
    host_states: bool = False

    @property
    def multiplied(self) -> int:
        """Bytes of a number that layers' products multiply."""
        return self.computing if self.products is None else self.products

    @property
    def eager(self) -> bool:
        """Norms and rotations are not fused, as they are in Megatron-LM, whose gradients are wider than its weights."""
        return self.gradients <= self.weights

    @property
    def updated(self) -> int:
        """Bytes that the optimizer reads and writes to update a weight: weight and states twice, the gradient once."""
        return 2 * (self.weights + self.states) + self.gradients

    def with_optimizer(self, name: str) -> Precision:
        """The same with another optimizer.

        Args:
            name: one of `OPTIMIZERS`.

        Raises:
            PlanningError: there is none of that name.
        """
        if name not in OPTIMIZERS:
            raise PlanningError(f"There is no optimizer {name!r}; choose from {', '.join(OPTIMIZERS)}.")
        if name == "adamw-8bit":
            return replace(self, states=self.states - (8 if self.states >= 8 else 4) + 2)
        return replace(self, host_states=name == "adamw-offloaded")


OPTIMIZERS = ("adamw", "adamw-8bit", "adamw-offloaded")
"""AdamW with moments as wide as the precision says, in 8 bits (Dettmers et al., arXiv 2110.02861), or in the host's
memory."""

PRECISIONS: Mapping[str, Precision] = {
    one.name: one
    for one in (
        Precision("32-true", weights=4, copies=0, gradients=4, states=8, computing=4),
        Precision("bf16-mixed", weights=4, copies=2, gradients=4, states=8, computing=2),
        Precision("bf16-true", weights=2, copies=0, gradients=2, states=4, computing=2, reduced=2),
        Precision("bf16-master", weights=2, copies=0, gradients=4, states=12, computing=2),
        Precision("transformer-engine", weights=4, copies=2, gradients=4, states=8, computing=2, products=1),
    )
}
"""Lightning's name -> bytes. ``bf16-master`` is Megatron-LM's: bf16 weights, float32 gradients, masters and moments;
``transformer-engine`` multiplies in fp8, of which it keeps each weight twice, since products need it transposed too."""

DIVIDED: Mapping[Sharding, tuple[str, ...]] = {
    "replicate": (),
    "zero1": ("states",),
    "zero2": ("states", "gradients"),
    "zero3": ("states", "gradients", "weights"),
    "fsdp": ("states", "gradients", "weights"),
    "deepspeed-1": ("states",),
    "deepspeed-2": ("states", "gradients"),
    "deepspeed-3": ("states", "gradients", "weights"),
}
"""Memory that ranks with the same weights divide among them (ZeRO, arXiv 1910.02054, section 5)."""

_DRAWN_LENGTHS = 64
"""Lengths whose work is computed; that of others is read off between them."""

_ITEMS_OF_A_RANK = 16
"""So many of a rank's costliest items are looked at for the bound of `RoleProblem.unevenness`."""


@dataclass(frozen=True)
class Family:
    """Layouts that differ in their data degree only. All times and bytes are arrays over ``data``.

    Attributes:
        data: ``[layouts]`` data degrees.
        tensor: ranks that share every layer.
        pipeline: ranks that each hold some of the layers.
        context: ranks that share every sequence.
        shard: how the data-parallel ranks hold the weights.
        recompute: what the backward computes again.
        group: ranks that hold the weights once between them, where they are sharded in several groups (HSDP); None is
            all of them.
        expert: data ranks among which a mixture's experts are divided.
        offload: what lies in the host's memory, beside what the precision says of it.
        schedule: in which order stages work.
        activation_bytes: that a rank may keep for backwards.
        cut: how layers are divided among stages.
    """

    data: FloatArray
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    shard: Sharding = "replicate"
    recompute: Recompute = "none"
    group: int | None = None
    expert: int = 1
    offload: Offload = "none"
    schedule: Schedule = "1f1b"
    activation_bytes: float = math.inf
    cut: Cut = "time"

    @property
    def replica(self) -> int:
        """Devices of one copy of the role."""
        return self.tensor * self.pipeline * self.context

    @property
    def expert_ranks(self) -> int:
        """Ranks among which a mixture's experts are divided: data ranks, with all of their tensor ranks."""
        return self.expert * self.tensor

    @property
    def holders(self) -> FloatArray:
        """``[layouts]`` ranks that hold the same weights, whole or shared: those of data and of context."""
        return self.data * self.context

    @property
    def shards(self) -> FloatArray:
        """``[layouts]`` ranks that divide something among them, where the family divides anything."""
        if self.shard == "replicate":
            return np.ones_like(self.data)
        return self.holders if self.group is None else np.full_like(self.data, self.group)

    @property
    def copies(self) -> FloatArray:
        """``[layouts]`` times that the weights are there: whole, or sharded by a group."""
        return np.asarray(self.holders / self.shards)

    @property
    def sharded(self) -> bool:
        """Whether weights are gathered for every forward and backward."""
        return "weights" in DIVIDED[self.shard]

    def kept_share(self, what: str) -> FloatArray:
        """``[layouts]`` share that a rank keeps of ``"weights"``, ``"gradients"`` or ``"states"``."""
        return 1 / self.shards if what in DIVIDED[self.shard] else np.ones_like(self.data)

    @property
    def host_weights(self) -> bool:
        """Whether a rank's shares of weights, gradients and states are in the host's memory (FSDP2)."""
        return self.offload in ("weights", "all")

    def host_states(self, precision: Precision) -> bool:
        """Whether the optimizer's states are in the host's memory, where it updates the weights."""
        return precision.host_states or self.offload == "optimizer" or self.host_weights

    @property
    def host_activations(self) -> bool:
        """Whether what forwards keep for backwards is in the host's memory meanwhile."""
        return self.offload in ("activations", "all")

    def layout(self, number: int) -> Layout:
        """The layout with the ``number``-th data degree."""
        replicas = int(self.copies[number]) if self.group is not None else 1
        degrees = (int(self.data[number]), self.tensor, self.pipeline, self.context)
        return Layout(*degrees, self.shard, replicas, self.expert, schedule=self.schedule, cut=self.cut)


def family_of(
    layout: Layout, recompute: Recompute = "none", offload: Offload = "none", activation_bytes: float | None = None
) -> Family:
    """A single layout as a family; within a limit of bytes activations are on the host only where they find no room."""
    data = np.array([float(layout.data)])
    group = layout.data * layout.context // layout.replicas if layout.replicas > 1 else None
    degrees = (data, layout.tensor, layout.pipeline, layout.context)
    limit = math.inf if activation_bytes is None else activation_bytes
    offload = "none" if activation_bytes is not None and offload == "activations" else offload
    order = layout.schedule, limit, layout.cut
    return Family(*degrees, layout.shard, recompute, group, layout.expert, offload, *order)


@dataclass(frozen=True)
class RoleProblem:
    """One role: what it computes in a step, and on what.

    Attributes:
        role: its name.
        half: what it computes.
        load: its part of a step.
        receives_gradient: something before it trains, so that gradients must leave it.
        cluster: where it may run.
        precision: bytes per number.
        efficiency: shares of the device's peaks that it reaches.
    """

    role: str
    half: Half
    load: RoleLoad
    receives_gradient: bool
    cluster: Cluster
    precision: Precision
    efficiency: Efficiency

    @property
    def is_trunk(self) -> bool:
        """Whether it reads the tokens, and what roles that encode make of media."""
        return self.role == Problems.trunk

    @property
    def batches_in_flight(self) -> float:
        """Full batches whose activations may be kept at the same time, without a pipeline."""
        alone = self.load.batches_alone if self.cluster.devices == 1 else None
        return self.load.batches_shared + (self.load.batches_in_flight if alone is None else alone)

    @cached_property
    def model_flops(self) -> float:
        """FLOPs of a step, as MFU counts them."""
        drawn = model_flops(self.half, self.load.lengths, self.receives_gradient)
        return drawn * self.load.items / len(self.load.lengths)

    @cached_property
    def pairs_per_token(self) -> tuple[float, ...]:
        """For every part with layers the attended pairs of a mean token."""
        lengths = self.load.lengths + self.half.extra_tokens
        return tuple(attended_pairs(lengths, part.causal, part.window) / lengths.sum() for part in self.half.layers)

    @cached_property
    def _costliest_first(self) -> FloatArray:
        """``[items of a step]`` work of each sample or media item relative to the mean one, falling."""
        lengths = np.sort(self.load.lengths)[::-1]
        distinct, inverse = np.unique(lengths, return_inverse=True)
        picked = np.unique(np.linspace(0, len(distinct) - 1, _DRAWN_LENGTHS).round().astype(np.int64))
        few = [forward_flops(self.half, distinct[one : one + 1]).total for one in picked]
        costs = np.interp(distinct, distinct[picked], few)
        costs = costs[inverse]
        count = max(1, round(self.load.items))
        drawn = costs[np.arange(count) * len(costs) // count]
        relative: FloatArray = drawn / drawn.mean()
        return relative

    @cached_property
    def full_batches(self) -> float:
        """Forwards that the items of a step fill, as the packer counts them: within the budget, and no item is cut."""
        if self.load.forwards is not None:
            return float(self.load.forwards)
        return filled_batches(self.load.lengths, max(1, round(self.load.items)), self.load.budget)

    def unevenness(self, data: FloatArray) -> FloatArray:
        """Work of the busiest data rank over the mean one, ``[layouts]`` as ``data``: samples and media are not cut.

        With the items sorted by falling work, k + 1 of the first k · ranks + 1 share a rank (the pigeonhole bound).
        """
        return self._unevenness_by_degree[data.astype(np.int64) - 1]

    @cached_property
    def _unevenness_by_degree(self) -> FloatArray:
        costs, data = self._costliest_first, np.arange(1.0, self.cluster.devices + 1)
        mean = len(costs) / data
        busiest = np.ones_like(data)
        for k in range(_ITEMS_OF_A_RANK):
            item = (k * data).astype(np.int64)
            least = np.where(item < len(costs), costs[np.minimum(item, len(costs) - 1)], 0.0)
            busiest = np.maximum(busiest, (k + 1) * least / mean)
        return busiest


class Problems(dict[str, RoleProblem]):
    """Role -> what is known of it: of encoders first, then of the trunk, which they feed and which owns the samples."""

    trunk = BACKBONE
    """The trunk's name."""

    @property
    def of_trunk(self) -> RoleProblem:
        """What is known of the trunk."""
        return self[self.trunk]

    @property
    def cluster(self) -> Cluster:
        """The devices for all roles."""
        return self.of_trunk.cluster

    @property
    def load(self) -> RoleLoad:
        """What a step asks of the trunk, by all samples and tokens of it."""
        return self.of_trunk.load

    @property
    def encoders(self) -> tuple[str, ...]:
        """The roles that feed the trunk."""
        names = tuple(self)
        return names[: names.index(self.trunk)]

    @property
    def behind(self) -> tuple[str, ...]:
        """The roles that read rows of the trunk's outputs: one that generates, or none."""
        names = tuple(self)
        return names[names.index(self.trunk) + 1 :]

    def on(self, cluster: Cluster) -> Problems:
        """The same on other devices."""
        return Problems((role, replace(one, cluster=cluster)) for role, one in self.items())


def role_problems(
    module: ModuleDescription,
    workload: Workload,
    cluster: Cluster,
    precision: str | Precision = "bf16-mixed",
    efficiencies: Mapping[str, Efficiency] | None = None,
) -> Problems:
    """What is known of all roles of a module.

    A projector that trains behind a frozen tower is the backbone's, as it is in training.

    Args:
        module: what trains.
        workload: what a step asks.
        cluster: where.
        precision: a key of `PRECISIONS`, or one that was changed.
        efficiencies: role -> shares that were measured; those of other roles are assumed.

    Raises:
        PlanningError: a precision that is unknown or that the device does not have, or data without lengths for one of
            the module's modalities.
    """
    if isinstance(precision, str):
        if precision not in PRECISIONS:
            raise PlanningError(f"There is no precision {precision!r}; choose from {', '.join(PRECISIONS)}.")
        precision = PRECISIONS[precision]
    if precision.multiplied < 2 and cluster.device.peak_float8 is None:
        raise PlanningError(f"{cluster.device.name} has no fp8 products; choose precision 'bf16-mixed'.")
    module = module.with_projectors_apart(workload.encoder_tokens)
    loads, measured = role_loads(module, workload), efficiencies or {}
    assumed = assumed_efficiency(cluster.device)
    return Problems(
        (
            role,
            RoleProblem(
                role=role,
                half=half,
                load=loads[role],
                receives_gradient=module.receives_gradient(role),
                cluster=cluster,
                precision=precision,
                efficiency=measured.get(role, assumed),
            ),
        )
        for role, half in module.roles.items()
    )
