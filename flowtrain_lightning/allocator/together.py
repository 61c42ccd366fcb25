"""The plans in which all devices have all roles: one layout for everything, or one for each role."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from itertools import product

import numpy as np

from flowtrain_lightning.allocator.candidates import Choices, Table, candidates, usable_bytes
from flowtrain_lightning.allocator.flops import IntArray
from flowtrain_lightning.allocator.plan import Plan, PlanName, Problems, joint_bytes, make_plan
from flowtrain_lightning.allocator.roles import BACKBONE

Groups = Mapping[Hashable, IntArray]


def colocated_plan(problems: Problems, tables: Mapping[str, Table]) -> Plan | None:
    """The best plan with all roles on the same devices, each in its own layout, one after the other."""
    groups = {role: _grouped(table, [(count,) for count in table.devices]) for role, table in tables.items()}
    return _best("colocated", problems, tables, groups)


def uniform_plan(problems: Problems, choices: Choices) -> Plan | None:
    """The best plan with one layout: degrees and sharding are the same, and a pipeline runs through all halves."""
    tables = {role: candidates(problem, choices, as_backbone=True) for role, problem in problems.items()}
    groups = {}
    for role, table in tables.items():
        families = [table.families[number] for number in table.family]
        shapes = [(one.tensor, one.pipeline, one.context, one.shard) for one in families]
        keys = [(*shape, count) for shape, count in zip(shapes, table.devices, strict=True)]
        groups[role] = _grouped(table, keys)
    return _best("uniform", problems, tables, groups)


def quick_or_light(table: Table, rows: IntArray) -> IntArray:
    """Of some rows those that none of them beats in both time and memory, the quickest first."""
    order = rows[np.lexsort((table.bytes[rows], table.seconds[rows]))]
    lightest = np.minimum.accumulate(np.concatenate([[np.inf], table.bytes[order][:-1]]))
    kept: IntArray = order[table.bytes[order] < lightest]
    return kept


def _grouped(table: Table, keys: Iterable[Hashable]) -> Groups:
    rows: dict[Hashable, list[int]] = {}
    for row, key in enumerate(keys):
        rows.setdefault(key, []).append(row)
    return {key: np.array(found) for key, found in rows.items()}


def _best(name: PlanName, problems: Problems, tables: Mapping[str, Table], groups: Mapping[str, Groups]) -> Plan | None:
    """The quickest choice of one row a role, all of the same group, that fits; groups in the order of their bounds."""
    limit = usable_bytes(problems[BACKBONE].cluster)
    shared = set.intersection(*(set(of_role) for of_role in groups.values()))
    bound = {
        key: sum(float(table.seconds[groups[role][key]].min()) for role, table in tables.items()) for key in shared
    }
    seconds, best = np.inf, None
    for key in sorted(shared, key=lambda key: (bound[key], str(key))):
        if bound[key] >= seconds:
            break
        kept = [quick_or_light(table, groups[role][key]) for role, table in tables.items()]
        for rows in product(*kept):
            chosen = {role: table.candidate(int(row)) for (role, table), row in zip(tables.items(), rows, strict=True)}
            total = sum(candidate.seconds for candidate in chosen.values())
            fits = joint_bytes(problems, {role: one.bytes for role, one in chosen.items()}) <= limit
            if fits and total < seconds:
                seconds, best = total, chosen
    return None if best is None else make_plan(name, problems, best, seconds=seconds)
