"""Throughput matching: one layout per role so that the slowest role is as fast as can be, with scipy's MILP solver."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array, hstack

from flowtrain_lightning.allocator.candidates import Candidate, CandidateTable
from flowtrain_lightning.allocator.flops import FloatArray
from flowtrain_lightning.allocator.silenced import silenced_output

TIE = 0.005
"""Times that differ by less are taken as equal: the models of time know no better."""

_FEW = 256
"""Candidates of all roles together that the solver takes as they are."""


class SolverError(RuntimeError):
    """The solver stopped without an answer."""


def match_throughputs(tables: Mapping[str, CandidateTable], devices: int) -> dict[str, Candidate] | None:
    """One layout for every role, on devices of its own.

    After FlowTrain (arXiv 2606.23087): maximise the rate of the slowest role, then waste as little as that allows,
    first in devices, then in idle time, where half a percent of rate does not count. Every role works on every step,
    so a role's rate is one over its time of a step, and the job's rate is the least of them, with several encoders too.
    (FlowTrain adds up the rates of encoders, which holds where a sample needs only one of them.)

    Args:
        tables: role -> its candidates.
        devices: how many there are.

    Returns:
        Role -> its candidate, or None where no choice fits.

    Raises:
        SolverError: the solver failed.
    """
    roles = {role: table.select(table.devices <= devices).fastest_by_devices for role, table in tables.items()}
    if any(not len(table) for table in roles.values()):
        return None
    least = sum(float(table.devices[0]) for table in roles.values())
    if least > devices:
        return None
    slowest = _fastest_of_the_slowest(_narrowed(list(roles.values()), devices), devices)
    return {role: table.candidate(_leanest(table, slowest)) for role, table in roles.items()}


def _narrowed(tables: list[CandidateTable], devices: int) -> list[CandidateTable]:
    """The tables without what can be no part of a best choice.

    What is slower than all roles can be together is not needed, nor what then leaves too few devices for the others.
    With more devices a candidate is faster, so halving finds the least seconds for which the devices are enough.
    """
    if sum(map(len, tables)) <= _FEW:
        return tables
    steps = np.unique(np.concatenate([table.seconds for table in tables]))
    low, high = 0, len(steps) - 1
    while low < high:
        middle = (low + high) // 2
        if sum(_devices_within(table, float(steps[middle])) for table in tables) <= devices:
            high = middle
        else:
            low = middle + 1
    tables = [table.select(table.seconds <= steps[high] * (1 + 1e-9)) for table in tables]
    least = sum(float(table.devices[0]) for table in tables)
    return [table.select(table.devices <= devices - least + table.devices[0]) for table in tables]


def _devices_within(table: CandidateTable, seconds: float) -> float:
    """The fewest devices on which a role takes no longer; inf where it always does."""
    return float(table.devices.min(initial=np.inf, where=table.seconds <= seconds))


def _fastest_of_the_slowest(tables: list[CandidateTable], devices: int) -> float:
    """The least seconds of a step that all roles can keep on all devices together.

    Variables: whether each candidate is chosen, and the rate G of the slowest role. Maximise G subject to one
    candidate a role, G no more than each role's rate, and no more devices than there are.
    """
    scale = min(float(table.seconds.min()) for table in tables)
    sizes = [len(table) for table in tables]
    chosen, total = np.concatenate([np.full(size, role) for role, size in enumerate(sizes)]), sum(sizes)
    rates = np.concatenate([scale / table.seconds for table in tables])
    counts = np.concatenate([table.devices for table in tables])
    columns, ones = np.arange(total), np.ones(total)
    roles = len(tables)
    one_each = csr_array((ones, (chosen, columns)), shape=(roles, total + 1))
    of_slowest = hstack([csr_array((rates, (chosen, columns)), shape=(roles, total)), -np.ones((roles, 1))])
    budget = csr_array((counts, (np.zeros(total, dtype=int), columns)), shape=(1, total + 1))
    with silenced_output():
        answer = milp(
            np.append(np.zeros(total), -1.0),
            integrality=np.append(ones, 0.0),
            bounds=Bounds(0.0, 1.0),
            constraints=[
                LinearConstraint(one_each, 1.0, 1.0),
                LinearConstraint(of_slowest, 0.0, np.inf),
                LinearConstraint(budget, 0.0, devices),
            ],
            options={"mip_rel_gap": 0.0},
        )
    if answer.x is None:
        raise SolverError(f"The solver found no allocation: {answer.message}")
    picked = [np.flatnonzero(chosen == role)[np.argmax(answer.x[:total][chosen == role])] for role in range(roles)]
    return scale / float(rates[picked].min())


def _leanest(table: CandidateTable, slowest: float) -> int:
    """Of the candidates that keep up, the one with the fewest devices, then the one that idles least."""
    keeps_up: FloatArray = np.where(table.seconds <= slowest * (1 + TIE), table.devices, np.inf)
    return int(np.lexsort((-table.seconds, keeps_up))[0])
