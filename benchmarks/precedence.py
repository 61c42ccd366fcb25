"""Lets many ranks that mostly sleep share few cores as if each had one of its own."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import lightning as L


def take_precedence() -> bool:
    """Runs all threads of this process ahead of all that is no rank; what it forks from now on comes after ranks.

    A rank that wakes up then finds a core, unless other ranks are on all of them; its loader's workers take what is
    left, beside other programs. Needs the right to real-time priorities (root, as a rule).

    Returns:
        whether the system allowed it; nothing has changed if not.
    """
    try:
        _schedule(os.SCHED_RR, os.sched_get_priority_min(os.SCHED_RR))
    except PermissionError:
        return False
    os.register_at_fork(after_in_child=_give_way)
    return True


class Precedence(L.Callback):
    """Takes precedence while training goes on: how long starting takes is not measured, and others have the cores."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """All threads of the runtime are there."""
        take_precedence()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """What this process may start next is measured from its own beginning of training on."""
        _schedule(os.SCHED_OTHER, 0)


def may_take_precedence() -> bool:
    """Whether ``take_precedence`` would be allowed."""
    former = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(os.sched_get_priority_min(os.SCHED_RR)))
    except PermissionError:
        return False
    os.sched_setscheduler(0, *former)
    return True


def _give_way() -> None:
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def _schedule(policy: int, priority: int) -> None:
    """Of all threads of this process."""
    for thread in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):  # it has ended
            os.sched_setscheduler(int(thread.name), policy, os.sched_param(priority))
