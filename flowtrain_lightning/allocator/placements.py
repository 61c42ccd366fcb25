"""The best plan of every kind by modelled costs: uniform, colocated, separate and mixed."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product

import numpy as np

from flowtrain_lightning.allocator.candidates import (
    Candidate,
    CandidateTable,
    usable_bytes,
)
from flowtrain_lightning.allocator.flops import FloatArray, IntArray
from flowtrain_lightning.allocator.modelled_plan import (
    ModelledPlan,
    joint_bytes,
    plan_from,
    side_by_side,
    waiting_seconds,
)
from flowtrain_lightning.allocator.planner import PlanKind
from flowtrain_lightning.allocator.role_problem import Problems
from flowtrain_lightning.allocator.solver import match_throughputs

Tables = Mapping[str, CandidateTable]
"""Role -> its candidates."""

_NEAR = 0.03
"""Share by which a plan with memory to spare may be slower than one without: so close, times are not told apart."""

_TO_SPARE = 0.12
"""Share of the usable memory that one would rather not plan for; more than that to spare is worth no time."""

_ROUNDS = 4
"""Rounds in which separate roles' waiting and their layouts are matched to each other."""


def colocated_plan(problems: Problems, tables: Tables) -> ModelledPlan | None:
    """The best plan with all roles on the same devices, each in its own layout, one after the other."""
    groups = {role: _grouped([(count,) for count in table.devices]) for role, table in tables.items()}
    return _best_together("colocated", problems, tables, groups)


def uniform_plan(problems: Problems, tables: Tables) -> ModelledPlan | None:
    """The best plan with one layout: degrees and sharding are equal, and a pipeline runs through all halves."""
    groups = {}
    for role, table in tables.items():
        families = [table.families[number] for number in table.family]
        shapes = [(one.tensor, one.pipeline, one.context, one.shard, one.group or 0) for one in families]
        groups[role] = _grouped([(*shape, count) for shape, count in zip(shapes, table.devices, strict=True)])
    return _best_together("uniform", problems, tables, groups)


def separate_plans(problems: Problems, tables: Tables) -> tuple[ModelledPlan | None, ModelledPlan | None]:
    """The best plans with roles on devices of their own: on all devices, and on no more than are of use.

    Throughputs are matched with the time that each role waits for the others added to its own. How long that is
    depends on the answer, so it is taken from the answer before, for a few rounds. What this leaves over goes to one
    of the roles in the first plan, even if that gains nothing; in the second, where else nodes would not be equal, what
    it leaves over of its last node. None stands for what does not fit.
    """
    waits, former = dict.fromkeys(tables, 0.0), None
    fronts = {role: table.fastest_by_devices for role, table in tables.items()}  # which waiting as long leaves as it is
    full: list[ModelledPlan] = []
    lean: list[ModelledPlan] = []
    per_node = problems.cluster.per_node
    for _ in range(_ROUNDS):
        waiting = {role: front.slowed_by(waits[role]) for role, front in fronts.items()}
        slowed = match_throughputs(waiting, problems.cluster.devices)
        if slowed is None:
            break
        chosen = {role: replace(one, seconds=one.seconds - waits[role]) for role, one in slowed.items()}
        if chosen == former:
            break
        for one in (chosen, *_beside(problems, tables, chosen)):
            lean.append(side_by_side(problems, one))
            if not lean[-1].starts_on(problems.cluster):
                lean[-1:] = _on(-(-lean[-1].devices // per_node) * per_node, problems, tables, one)
            full += _on(problems.cluster.devices, problems, tables, one)
        waits, former = waiting_seconds(problems, chosen), chosen
    starting = ([plan for plan in plans if plan.starts_on(problems.cluster)] for plans in (full, lean))
    fastest = (min(plans, key=lambda plan: plan.seconds, default=None) for plans in starting)
    return next(fastest), next(fastest)


def least_seconds(problems: Problems, tables: Tables, kind: PlanKind) -> float:
    """Seconds of a step below which no colocated or separate plan can be; inf where none fits.

    Separate roles wait for each other beside that, and other encoders than one take devices, too.
    """
    if any(not len(table) for table in tables.values()):
        return np.inf
    if kind != "separate":
        return sum(float(table.seconds.min()) for table in tables.values())
    fronts = {role: table.fastest_by_devices for role, table in tables.items()}
    trunk, least = fronts.pop(problems.trunk), 0.0
    for front in fronts.values():
        fitting = np.searchsorted(trunk.devices, problems.cluster.devices - front.devices, side="right")
        both = np.maximum(front.seconds, trunk.seconds[fitting - 1])
        least = max(least, float(both[fitting > 0].min(initial=np.inf)))
    return least


def _beside(problems: Problems, tables: Tables, chosen: Mapping[str, Candidate]) -> Iterator[dict[str, Candidate]]:
    """Choices like this one in which one encoder has a few devices more or fewer, and the backbone the rest.

    Matching throughputs takes the waits of another choice for its own, and so may miss the best one by a step.
    """
    trunk, devices = problems.trunk, problems.cluster.devices
    backbone = tables[trunk].fastest_by_devices
    for role, one in chosen.items():
        if role == trunk:
            continue
        front = tables[role].fastest_by_devices
        taken = sum(other.devices for name, other in chosen.items() if name not in (role, trunk))
        at = int(np.searchsorted(front.devices, one.devices))
        for number in (at - 1, at + 1):
            if not 0 <= number < len(front):
                continue
            fitting = int(np.searchsorted(backbone.devices, devices - taken - front.devices[number], side="right"))
            if fitting > 0:
                yield {**chosen, role: front.candidate(number), trunk: backbone.candidate(fitting - 1)}


def _on(devices: int, problems: Problems, tables: Tables, chosen: Mapping[str, Candidate]) -> Iterator[ModelledPlan]:
    """Plans like the chosen one in which one role has what that leaves over of so many devices too."""
    left = devices - sum(one.devices for one in chosen.values())
    for role, one in chosen.items():
        larger = tables[role].on(one.devices + left)
        if len(larger):
            yield side_by_side(problems, {**chosen, role: larger.candidate(int(larger.seconds.argmin()))})


def mixed_plan(problems: Problems, tables: Tables) -> ModelledPlan | None:
    """The best plan with the backbone on some devices and encoders on all, or None where sharing gains nothing.

    Were all N devices free for the encoders, they would take s seconds. B of them are busy with the backbone for t
    seconds, so that with work dealt to fit all are done after s + t · B / N.
    """
    if problems.behind:
        return None  # what is behind the backbone runs in the other placements
    cluster, backbone = problems.cluster, tables[problems.trunk]
    encoders = {role: tables[role] for role in problems.encoders}
    everywhere = [table.fastest_by_memory(_in_several_groups(table, cluster.devices)) for table in encoders.values()]
    seconds, best = np.inf, None
    for picked in product(*everywhere):
        named = _picked(encoders, picked)
        found = _backbone_beside(problems, backbone, named)
        if found is not None and found[0] < seconds:
            seconds, best = found[0], {**named, problems.trunk: found[1]}
    return None if best is None else plan_from("mixed", problems, best, seconds=seconds)


def _grouped(keys: Iterable[Hashable]) -> dict[Hashable, IntArray]:
    """Key -> the indices at which it stands."""
    found: dict[Hashable, list[int]] = {}
    for index, key in enumerate(keys):
        found.setdefault(key, []).append(index)
    return {key: np.array(indices) for key, indices in found.items()}


def _best_together(
    kind: PlanKind, problems: Problems, tables: Tables, groups: Mapping[str, Mapping[Hashable, IntArray]]
) -> ModelledPlan | None:
    """A choice of one candidate a role, all of one group, that fits; groups are tried in the order of their bounds.

    Of those that are nearly as fast as the fastest one, it is one with memory to spare.
    """
    limit = usable_bytes(problems.cluster)
    shared = set.intersection(*(set(of_role) for of_role in groups.values()))
    bound = {
        key: sum(float(table.seconds[groups[role][key]].min()) for role, table in tables.items()) for key in shared
    }
    fitting: list[tuple[float, float, list[int]]] = []
    fastest, overhead = np.inf, problems.cluster.device.overhead
    for key in sorted(shared, key=lambda key: (bound[key], str(key))):
        if bound[key] > fastest * (1 + _NEAR):
            break
        fronts = {role: table.fastest_by_memory(groups[role][key]) for role, table in tables.items()}
        totals = _sums_of_each([tables[role].seconds[front] for role, front in fronts.items()])
        peaks = overhead + _sums_of_each([tables[role].bytes[front] - overhead for role, front in fronts.items()])
        fastest = min(fastest, float(totals.min(initial=np.inf, where=peaks <= limit)))
        for at in map(tuple, np.argwhere((peaks <= limit) & (totals <= fastest * (1 + _NEAR)))):
            picked = [int(front[place]) for front, place in zip(fronts.values(), at, strict=True)]
            fitting.append((float(totals[at]), float(peaks[at]), picked))
    if not fitting:
        return None
    near = (one for one in fitting if one[0] <= fastest * (1 + _NEAR))
    seconds, _, best = min(near, key=lambda one: (max(one[1], (1 - _TO_SPARE) * limit), one[0]))
    return plan_from(kind, problems, _picked(tables, best), seconds=seconds)


def _sums_of_each(columns: Sequence[FloatArray]) -> FloatArray:
    """``[of the first, of the second …]`` the sum of one number of each column, for every choice of these."""
    first, *others = columns
    for column in others:
        first = first[..., None] + column
    return first


def _picked(tables: Tables, indices: Iterable[int]) -> dict[str, Candidate]:
    return {role: table.candidate(int(index)) for (role, table), index in zip(tables.items(), indices, strict=True)}


def _in_several_groups(table: CandidateTable, devices: int) -> IntArray:
    """The candidates on so many devices of which only some need each other to compute."""
    everywhere = np.flatnonzero(table.devices == devices)
    return everywhere[[table.candidate(int(each)).layout.ranks_of_shard_group < devices for each in everywhere]]


def _backbone_beside(
    problems: Problems, backbone: CandidateTable, encoders: Mapping[str, Candidate]
) -> tuple[float, Candidate] | None:
    """The backbone's layout that goes best with encoders on all devices, and the seconds of a step."""
    cluster = problems.cluster
    encoding = sum(one.seconds for one in encoders.values())
    beside = joint_bytes(problems, {role: one.bytes for role, one in encoders.items()}) - cluster.device.overhead
    possible = (backbone.devices < cluster.devices) & (backbone.bytes + beside <= usable_bytes(cluster))
    for one in encoders.values():
        # Ranks that need each other to encode have the backbone on all of their devices or on none.
        possible &= backbone.devices % one.layout.ranks_of_shard_group == 0
    seconds = encoding + backbone.seconds * backbone.devices / cluster.devices
    seconds = np.where(possible & (seconds > backbone.seconds), seconds, np.inf)
    if not len(seconds) or not np.isfinite(seconds.min()):
        return None
    best = int(seconds.argmin())
    return float(seconds[best]), backbone.candidate(best)
