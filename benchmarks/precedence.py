"""Lets many ranks that mostly sleep share few cores as if each had one of its own."""

from __future__ import annotations

import os


def take_precedence() -> bool:
    """Runs this process ahead of all that is no rank; what it forks from now on comes after ranks.

    A rank that wakes up then finds a core, unless other ranks are on all of them; its loader's workers take what is
    left, beside other programs. Needs the right to real-time priorities (root, as a rule).

    Returns:
        whether the system allowed it; nothing has changed if not.
    """
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(os.sched_get_priority_min(os.SCHED_RR)))
    except PermissionError:
        return False
    os.register_at_fork(after_in_child=_give_way)
    return True


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
