"""What planning knows of one role before it chooses a layout, and the families of layouts that it chooses from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from flowtrain_lightning.allocator.description import Half, ModuleDescription
from flowtrain_lightning.allocator.devices import Cluster
from flowtrain_lightning.allocator.efficiency import Efficiency, FloatArray, assumed_efficiency
from flowtrain_lightning.allocator.flops import attended_pairs, forward_work, model_flops
from flowtrain_lightning.allocator.layout import Layout, Sharding
from flowtrain_lightning.allocator.precision import PRECISIONS, Precision
from flowtrain_lightning.allocator.workload import RoleLoad, Workload, role_loads

Recompute = Literal["none", "selective", "full"]
"""What the backward computes again: nothing, what costs no matrix product, or every layer."""

DIVIDED: Mapping[Sharding, tuple[str, ...]] = {
    "replicate": (),
    "zero1": ("states",),
    "zero2": ("states", "gradients"),
    "zero3": ("states", "gradients", "weights"),
    "fsdp": ("states", "gradients", "weights"),
}
"""What the ranks that hold the same weights divide among them (ZeRO, arXiv 1910.02054, section 5)."""

_LOADS_OF_A_RANK = 16


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
    """

    data: FloatArray
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    shard: Sharding = "replicate"
    recompute: Recompute = "none"

    @property
    def replica(self) -> int:
        """Devices of one copy of the role."""
        return self.tensor * self.pipeline * self.context

    @property
    def holders(self) -> FloatArray:
        """``[layouts]`` ranks that hold the same weights, whole or shared: those of data and of context."""
        return self.data * self.context

    @property
    def sharded(self) -> bool:
        """Whether weights are gathered for every forward and backward."""
        return "weights" in DIVIDED[self.shard]

    def kept_share(self, what: str) -> FloatArray:
        """``[layouts]`` share that a rank keeps of ``"weights"``, ``"gradients"`` or ``"states"``."""
        return 1 / self.holders if what in DIVIDED[self.shard] else np.ones_like(self.data)

    def layout(self, number: int) -> Layout:
        """The layout with the ``number``-th data degree."""
        return Layout(int(self.data[number]), self.tensor, self.pipeline, self.context, self.shard)


def family_of(layout: Layout, recompute: Recompute = "none") -> Family:
    """A single layout as a family."""
    data = np.array([float(layout.data)])
    return Family(data, layout.tensor, layout.pipeline, layout.context, layout.shard, recompute)


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
        """``[items of a step]`` work of each sample or media relative to the mean one, falling."""
        lengths = np.sort(self.load.lengths)[::-1]
        distinct, inverse = np.unique(lengths, return_inverse=True)
        if len(distinct) > 256:
            picked = np.linspace(0, len(distinct) - 1, 256).round().astype(np.int64)
            few = [forward_work(self.half, distinct[one : one + 1]).total for one in picked]
            costs = np.interp(distinct, distinct[picked], few)
        else:
            costs = np.array([forward_work(self.half, distinct[one : one + 1]).total for one in range(len(distinct))])
        costs = costs[inverse]
        count = max(1, round(self.load.items))
        drawn = costs[np.arange(count) * len(costs) // count]
        relative: FloatArray = drawn / drawn.mean()
        return relative

    def unevenness(self, data: FloatArray) -> FloatArray:
        """Work of the busiest data-parallel rank over the mean one, at best: samples and media cannot be cut.

        With the items sorted by falling work, k + 1 of the first k · ranks + 1 share a rank (the pigeonhole bound).
        """
        costs = self._costliest_first
        mean = len(costs) / data
        busiest = np.ones_like(data)
        for k in range(_LOADS_OF_A_RANK):
            place = (k * data).astype(np.int64)
            there = np.where(place < len(costs), costs[np.minimum(place, len(costs) - 1)], 0.0)
            busiest = np.maximum(busiest, (k + 1) * there / mean)
        return busiest


def role_problems(
    module: ModuleDescription,
    workload: Workload,
    cluster: Cluster,
    precision: str = "bf16-mixed",
    efficiencies: Mapping[str, Efficiency] | None = None,
) -> dict[str, RoleProblem]:
    """Role -> what is known of it, for all roles of a module.

    Args:
        module: what trains.
        workload: what a step asks.
        cluster: where.
        precision: a key of `PRECISIONS`.
        efficiencies: role -> shares that were measured; those of other roles are assumed.
    """
    loads, measured = role_loads(module, workload), efficiencies or {}
    assumed = assumed_efficiency(cluster.device)
    return {
        role: RoleProblem(
            role=role,
            half=half,
            load=loads[role],
            receives_gradient=module.receives_gradient(role),
            cluster=cluster,
            precision=PRECISIONS[precision],
            efficiency=measured.get(role, assumed),
        )
        for role, half in module.roles.items()
    }
