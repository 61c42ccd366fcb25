"""The plan that gives every device one role: throughputs matched, and the step's beginning and end waited for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from flowtrain_lightning.allocator.candidates import Candidate, Table
from flowtrain_lightning.allocator.plan import Plan, Problems, make_plan
from flowtrain_lightning.allocator.problem import RoleProblem
from flowtrain_lightning.allocator.roles import BACKBONE
from flowtrain_lightning.allocator.solver import match_throughputs

_ROUNDS = 4


def separate_plan(problems: Problems, tables: Mapping[str, Table]) -> Plan | None:
    """The best plan with roles on devices of their own, or None where nothing fits.

    Throughputs are matched with the time that each role waits for the others added to its own. How long that is
    depends on the answer, so it is taken from the answer before, for a few rounds.
    """
    waits = dict.fromkeys(tables, 0.0)
    best: Plan | None = None
    for _ in range(_ROUNDS):
        waiting = {role: table.slowed_by(waits[role]) for role, table in tables.items()}
        slowed = match_throughputs(waiting, problems[BACKBONE].cluster.devices)
        if slowed is None:
            return best
        chosen = {role: replace(one, seconds=one.seconds - waits[role]) for role, one in slowed.items()}
        waits = waiting_seconds(problems, chosen)
        seconds = max(one.seconds + waits[role] for role, one in chosen.items())
        if best is None or seconds < best.seconds:
            slowest = max(one.seconds for one in chosen.values())
            best = make_plan("separate", problems, chosen, seconds=seconds, waiting=seconds - slowest)
    return best


def waiting_seconds(problems: Problems, chosen: Mapping[str, Candidate]) -> dict[str, float]:
    """Role -> seconds of a step in which it cannot but wait for others.

    With encoders that train, the backbone begins when the first encoder batch is there, and after its last microbatch
    an encoder still has one backward to do; an encoder waits for the gradients of the backbone's last microbatch.
    Frozen encoders work ahead into later steps, so that nobody waits.
    """
    training = {role: one for role, one in chosen.items() if role != BACKBONE and problems[role].half.trains}
    last = batch_seconds(problems[BACKBONE], chosen[BACKBONE])
    first = max((batch_seconds(problems[role], one) for role, one in training.items()), default=0.0)
    return {role: first if role == BACKBONE else last * (role in training) for role in chosen}


def batch_seconds(problem: RoleProblem, candidate: Candidate) -> float:
    """Seconds of one microbatch or encoder batch, forward and backward."""
    time = candidate.details(problem).time
    return float(((time.forward + time.backward + time.exchange) / time.microbatches)[0])
