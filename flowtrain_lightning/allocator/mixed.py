"""The plan in which some devices encode only, and the backbone's devices encode what those cannot."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

import numpy as np

from flowtrain_lightning.allocator.candidates import Candidate, Table, usable_bytes
from flowtrain_lightning.allocator.plan import Plan, Problems, joint_bytes, make_plan
from flowtrain_lightning.allocator.roles import BACKBONE
from flowtrain_lightning.allocator.together import quick_or_light


def mixed_plan(problems: Problems, tables: Mapping[str, Table]) -> Plan | None:
    """The best plan with the backbone on some devices and encoders on all, or None where sharing gains nothing.

    Were all N devices free for the encoders, they would take s seconds. B of them are busy with the backbone for t
    seconds, so that with work dealt to fit all are done after s + t · B / N.
    """
    cluster, backbone = problems[BACKBONE].cluster, tables[BACKBONE]
    encoders = {role: table for role, table in tables.items() if role != BACKBONE}
    everywhere = [
        quick_or_light(table, np.flatnonzero(table.devices == cluster.devices)) for table in encoders.values()
    ]
    seconds, best = np.inf, None
    for rows in product(*everywhere):
        named = {role: table.candidate(int(row)) for (role, table), row in zip(encoders.items(), rows, strict=True)}
        found = _with_backbone(problems, backbone, named)
        if found is not None and found[0] < seconds:
            seconds, best = found[0], {**named, BACKBONE: found[1]}
    return None if best is None else make_plan("mixed", problems, best, seconds=seconds)


def _with_backbone(
    problems: Problems, backbone: Table, encoders: Mapping[str, Candidate]
) -> tuple[float, Candidate] | None:
    """The backbone's layout that goes best with encoders on all devices, and the seconds of a step."""
    cluster = problems[BACKBONE].cluster
    encoding = sum(one.seconds for one in encoders.values())
    beside = joint_bytes(problems, {role: one.bytes for role, one in encoders.items()}) - cluster.device.overhead
    possible = (backbone.devices < cluster.devices) & (backbone.bytes + beside <= usable_bytes(cluster))
    for one in encoders.values():
        # A group of tensor ranks has the backbone on all of its devices or on none.
        possible &= backbone.devices % one.layout.tensor == 0
    seconds = encoding + backbone.seconds * backbone.devices / cluster.devices
    seconds = np.where(possible & (seconds > backbone.seconds), seconds, np.inf)
    if not len(seconds) or not np.isfinite(seconds.min()):
        return None
    row = int(seconds.argmin())
    return float(seconds[row]), backbone.candidate(row)
