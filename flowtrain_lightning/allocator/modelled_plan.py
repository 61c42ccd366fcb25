"""A plan by the models of time and memory: what chosen layouts take, and within which band a step is expected."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import exp, hypot, inf, lcm

from flowtrain_lightning.allocator.allocation import Allocation, Order
from flowtrain_lightning.allocator.candidates import Candidate, evaluate, why_undividable
from flowtrain_lightning.allocator.coefficients import FITTED_DEVICES, ROW_BAND, WIDENING, assumed_efficiency
from flowtrain_lightning.allocator.devices import Cluster, fewest_nodes
from flowtrain_lightning.allocator.digits import in_digits
from flowtrain_lightning.allocator.memory_use import kept_activations
from flowtrain_lightning.allocator.planner import PlanKind, Prediction
from flowtrain_lightning.allocator.rank_assignment import assign_ranks, largest_tensor_degree
from flowtrain_lightning.allocator.role_layout import Layout, PlanningError
from flowtrain_lightning.allocator.role_problem import Problems, RoleProblem, family_of

_OF_THE_STEP = ("an encoder",)
"""Causes that count in full wherever they are: that samples have pictures concerns loading and padding of all of it."""


@dataclass(frozen=True)
class Band:
    """Factors of a predicted time between which 80 % of measured ones lie.

    Attributes:
        low: at most 1.
        high: at least 1.
    """

    low: float
    high: float


@dataclass(frozen=True)
class ModelledPlan(Prediction):
    """A layout for every role, and what a step of it takes by the models of time and memory.

    Attributes:
        chosen: role -> its layout, encoders first, a generator last.
        devices: devices in use.
        waiting: of ``seconds``, those until the first features are there and after the last gradients.
        mfu: FLOPs that a step must spend over what the whole cluster could meanwhile.
        peak_bytes: memory of the fullest device.
        band: factors of ``seconds`` between which 80 % of measured steps are expected.
        held_up: how many times as long a step takes as on hosts that decode in no time.
        order: what decides in which order ranks work.
    """

    chosen: Mapping[str, Candidate]
    devices: int
    waiting: float
    mfu: float
    peak_bytes: float
    band: Band
    held_up: float = 1.0
    order: Order = "rules"

    @property
    def seconds_low(self) -> float:
        """The lower end of the band."""
        return self.seconds * self.band.low

    @property
    def seconds_high(self) -> float:
        """The upper end of the band."""
        return self.seconds * self.band.high

    def cells(self) -> dict[str, str]:
        """The band of the time, devices, utilization and memory."""
        return {
            "80 % band": f"{in_digits(self.seconds_low, 3)} to {in_digits(self.seconds_high, 3)}",
            "devices": str(self.devices),
            "MFU": f"{100 * self.mfu:.1f} %",
            "peak GB": f"{self.peak_bytes / 1e9:.1f}",
        }

    def slowed(self, times: float) -> ModelledPlan:
        """The plan if its steps took so many times as long."""
        return replace(
            self,
            seconds=self.seconds * times,
            samples_per_second=self.samples_per_second / times,
            idle={role: 1 - (1 - share) / times for role, share in self.idle.items()},
            waiting=self.waiting * times,
            mfu=self.mfu / times,
        )

    def nodes(self, per_node: int) -> int | None:
        """The fewest equal nodes of at most ``per_node`` devices that it starts on, tensor ranks on one; None: none."""
        return fewest_nodes(self.devices, per_node, lcm(*(one.layout.tensor for one in self.chosen.values())))

    def starts_on(self, cluster: Cluster) -> bool:
        """Whether it starts on as many devices of each node, of no more nodes than there are."""
        nodes = self.nodes(cluster.per_node)
        return nodes is not None and nodes <= -(-cluster.devices // cluster.per_node)

    def rented(self, per_node: int) -> float:
        """Devices that one pays for to start it: those of whole nodes, or within a node a power of two."""
        if self.devices <= per_node:
            return min(per_node, 1 << (self.devices - 1).bit_length())
        return per_node * (self.nodes(per_node) or inf)

    def is_laid_out_as(self, other: ModelledPlan) -> bool:
        """Whether both put the same layouts onto the same devices: uniform plans are colocated, too."""
        together = ("uniform", "colocated")
        if self.kind != other.kind and not (self.kind in together and other.kind in together):
            return False
        mine, others = (
            [(r, c.layout, c.recompute, c.offload, c.activation_bytes) for r, c in one.chosen.items()]
            for one in (self, other)
        )
        return mine == others and self.order == other.order

    def allocation(self, per_node: int) -> Allocation:
        """The plan's layouts put onto nodes of ``per_node`` devices, of which it may start on fewer each.

        Raises:
            AllocationError: of several nodes, the backbone is smaller than a group of tensor ranks, so that it cannot
                have rank 0.
        """
        layouts = {role: candidate.layout for role, candidate in self.chosen.items()}
        recompute = {role: candidate.recompute for role, candidate in self.chosen.items()}
        offload = {role: candidate.offload for role, candidate in self.chosen.items() if candidate.offload != "none"}
        nodes = self.nodes(per_node) or 1
        found = self._placed(layouts, per_node if nodes == 1 else self.devices // nodes)
        limit = self.chosen[Problems.trunk].activation_bytes
        return replace(found, recompute=recompute, offload=offload, order=self.order, activation_bytes=limit)

    def _placed(self, layouts: Mapping[str, Layout], per_node: int) -> Allocation:
        everyone = tuple(range(self.devices))
        trunk = Problems.trunk
        if self.kind == "separate":
            return Allocation("separate", layouts, assign_ranks(layouts, trunk, per_node))
        if self.kind == "mixed":
            alone = {trunk: layouts[trunk], "others": Layout(data=self.devices - layouts[trunk].ranks)}
            group = max(layout.ranks_of_shard_group for role, layout in layouts.items() if role != trunk)
            block = max(group, largest_tensor_degree(layouts))
            own = tuple(range(layouts[trunk].ranks))
            if per_node % block == 0:
                own = assign_ranks(alone, trunk, per_node, block)[trunk]
            return Allocation("mixed", layouts, dict.fromkeys(layouts, everyone) | {trunk: own})
        return Allocation("colocated", layouts, dict.fromkeys(layouts, everyone))


def given_plan(problems: Problems, allocation: Allocation) -> ModelledPlan:
    """The plan that an allocation is. It may need more memory than there is; see its ``peak_bytes``.

    Args:
        problems: role -> what is planned for.
        allocation: for all devices of the problems' cluster.

    Raises:
        PlanningError: it has other roles or devices, or its degrees do not divide heads, layers or nodes.
    """
    cluster = problems.cluster
    if set(allocation.layouts) != set(problems):
        raise PlanningError(
            f"The allocation has the roles {', '.join(allocation.layouts)}, but the module has {', '.join(problems)}."
        )
    if allocation.size != cluster.devices:
        raise PlanningError(
            f"The allocation is for {allocation.size} devices, but {cluster.devices} are planned for; give --devices "
            f"{allocation.size}."
        )
    chosen = {role: _candidate(problem, allocation) for role, problem in problems.items()}
    backbone = chosen[problems.trunk]
    encoding = sum(one.seconds for one in chosen.values()) - backbone.seconds
    if allocation.placement == "separate":
        found = side_by_side(problems, chosen)
    elif allocation.placement == "mixed":
        shared = encoding + backbone.seconds * backbone.devices / cluster.devices
        found = plan_from("mixed", problems, chosen, seconds=max(shared, backbone.seconds))
    else:
        found = plan_from("colocated", problems, chosen, seconds=encoding + backbone.seconds)
    return replace(found, order=allocation.order)


def side_by_side(problems: Problems, chosen: Mapping[str, Candidate]) -> ModelledPlan:
    """The plan of roles on devices of their own, in layouts that are given."""
    waits = waiting_seconds(problems, chosen)
    seconds = max(one.seconds + waits[role] for role, one in chosen.items())
    slowest = max(one.seconds for one in chosen.values())
    return plan_from("separate", problems, chosen, seconds=seconds, waiting=seconds - slowest)


def waiting_seconds(problems: Problems, chosen: Mapping[str, Candidate]) -> dict[str, float]:
    """Role -> seconds of a step in which it cannot but wait for others.

    With encoders that train, the backbone begins when the first encoder batch is there, and after its last microbatch
    an encoder still has one backward to do; an encoder waits for the gradients of the backbone's last microbatch.
    Frozen encoders work ahead into later steps, unless they are in stages, so that nobody waits. A batch goes through
    all stages. A generator waits for the first microbatch, and the backbone, with what is before it, for the
    generator's last batch.

    This is a closed form of the simulation in `flowtrain_lightning.packing` for a step of equal batches, of which an
    encoder keeps two or more: as long where the backbone has the most to do, and an upper bound elsewhere, since an
    encoder that waits may have backwards left to do.
    """
    stages = {role: one.layout.pipeline for role, one in chosen.items()}
    in_step = [role for role in problems.encoders if problems[role].half.trains or stages[role] > 1]
    behind = max((chosen[role].batch_seconds for role in problems.behind), default=0.0)
    last = chosen[problems.trunk].batch_seconds
    first = max((chosen[role].batch_seconds * stages[role] for role in in_step), default=0.0)
    waits = {role: (last + behind) * (role in in_step) for role in problems.encoders}
    found = {**waits, problems.trunk: first + behind, **dict.fromkeys(problems.behind, first + last)}
    return {role: found[role] for role in chosen}


def plan_from(
    kind: PlanKind, problems: Problems, chosen: Mapping[str, Candidate], *, seconds: float, waiting: float = 0.0
) -> ModelledPlan:
    """The plan of chosen layouts, with what follows from them and the time of a step."""
    cluster, separate = problems.cluster, kind == "separate"
    flops = sum(problem.model_flops for problem in problems.values())
    devices = [candidate.devices for candidate in chosen.values()]
    of_roles = {role: candidate.bytes for role, candidate in chosen.items()}
    return ModelledPlan(
        kind=kind,
        name=kind,
        seconds=seconds,
        samples_per_second=problems.load.items / seconds,
        idle={role: max(0.0, 1 - one.seconds / seconds) if separate else 0.0 for role, one in chosen.items()},
        chosen=chosen,
        devices=sum(devices) if separate else max(devices),
        waiting=waiting,
        mfu=flops / seconds / (cluster.devices * cluster.device.peak),
        peak_bytes=max(of_roles.values()) if separate else joint_bytes(problems, of_roles),
        band=step_band(problems, chosen, separate),
    )


def joint_bytes(problems: Problems, of_roles: Mapping[str, float]) -> float:
    """Bytes of several roles on one device: the overhead is there once."""
    overhead = problems.cluster.device.overhead
    return overhead + sum(each - overhead for each in of_roles.values())


def step_band(problems: Mapping[str, RoleProblem], chosen: Mapping[str, Candidate], separate: bool) -> Band:
    """The band of a plan's time of a step.

    It is that of the rows to which the model of time was fitted, held out, and wider by what no row covers; causes are
    taken to be independent, so that squares add up. A cause that is in one role counts by the role's share of the time,
    but pictures, which concern loading and padding of the whole step.

    Args:
        problems: role -> what is planned for.
        chosen: role -> its layout.
        separate: roles have devices of their own.
    """
    whole = sum(one.seconds for one in chosen.values())
    shares: dict[str, float] = {}
    for role, one in chosen.items():
        for cause in _uncovered(problems[role], one):
            shares[cause] = shares.get(cause, 0.0) + one.seconds / whole
            if cause in _OF_THE_STEP:
                shares[cause] = 1.0
    if separate:
        shares["roles on devices of their own"] = 1.0
    faster = hypot(*(share * WIDENING[cause][0] for cause, share in shares.items()))
    slower = hypot(*(share * WIDENING[cause][1] for cause, share in shares.items()))
    below, above = ROW_BAND
    return Band(exp(-hypot(above, faster)), exp(hypot(below, slower)))


def _uncovered(problem: RoleProblem, one: Candidate) -> Iterator[str]:
    """The keys of `WIDENING` that hold for a role in its layout; a profile's measurements cover code and device."""
    device = problem.cluster.device
    if problem.efficiency == assumed_efficiency(device):
        yield "another code base"
        if device.name not in FITTED_DEVICES:
            yield "another device"
        if problem.precision.multiplied < 2:
            yield "fp8"
        if problem.role != Problems.trunk:
            yield "an encoder"
        if any(part.experts is not None for part in problem.half.layers):
            yield "a mixture of experts"
    if one.layout.tensor * one.layout.context > 1:
        yield "tensor or context ranks"
    if one.layout.pipeline > 1:
        yield "a pipeline"


def _candidate(problem: RoleProblem, allocation: Allocation) -> Candidate:
    role = problem.role
    layout = allocation.layouts[role]
    recompute, offload = allocation.recompute.get(role, "none"), allocation.offload.get(role, "none")
    reason = why_undividable(problem, layout.tensor, layout.stages.runs, layout.context, layout.expert)
    if reason is not None:
        raise PlanningError(reason)
    family = family_of(layout, recompute, offload, allocation.activation_bytes)
    alone = kept_activations(problem, family) / layout.pipeline * problem.load.budget
    if alone > family.activation_bytes:
        raise PlanningError(
            f"The {role} keeps {alone / 1e9:,.3g} GB of a batch of {problem.load.budget:,.0f} tokens or patches, but "
            f"activation_bytes is {family.activation_bytes / 1e9:,.3g} GB: one batch alone finds no room. Raise it, or "
            "plan with a smaller budget."
        )
    found = evaluate(problem, family)
    time, memory = found.time, found.memory
    seconds, size, batch = (float(each[0]) for each in (time.total, memory.total, time.batch))
    return Candidate(role, layout, recompute, seconds, size, batch, offload, allocation.activation_bytes)
