"""The ranks of a run as one of them sees them: which role each plays, how it is reached, who watches over whom."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from pathlib import Path

from lightning.pytorch.utilities import rank_zero_info

from flowtrain_lightning.allocator import Allocation
from flowtrain_lightning.packing.stage_schedule import StageSchedule
from flowtrain_lightning.parallel.ranks.connecting import connect_groups
from flowtrain_lightning.parallel.ranks.cross_group import AgreedError
from flowtrain_lightning.parallel.ranks.groups import default_groups, parts_of_groups
from flowtrain_lightning.parallel.ranks.job_store import node_names
from flowtrain_lightning.pool import (
    Mesh,
    address_of,
    address_towards,
    blame_fault,
    describe_ways,
    first_fault,
    interface_of,
)
from flowtrain_lightning.runtime.health import HealthMonitor
from flowtrain_lightning.runtime.open_files import allow_open_files

_INTERFACE = "GLOO_SOCKET_IFNAME"
_CAUSE_SECONDS = 3.0  # in which the rank to blame says why, which this one can only do less well


class Job:
    """One rank's place in a run, from the first connection until it leaves.

    Args:
        rank: global rank.
        allocation: which ranks play which role.
        health: watches over this process and the others.
        backend: of this rank's default group.
        hang_timeout: seconds without progress of any rank after which all end.
        timeout: the same until every rank has begun its first step.
        fault_folder: where ``fault-rank<r>.txt`` is written.
        nodes: how many the ranks run on; with several, ``MASTER_ADDR`` names that of rank 0.

    Attributes:
        labels: what each rank is, for messages and pictures: ``"backbone 0"``, ``"backbone 1, stage 1"``,
            ``"encoder 1"`` or both; with several nodes followed by the name of its own.
        groups: the process groups; they stay after ``leave``, for what the user does after ``fit``.
    """

    def __init__(
        self,
        rank: int,
        allocation: Allocation,
        health: HealthMonitor,
        *,
        backend: str,
        hang_timeout: float,
        timeout: timedelta,
        fault_folder: Path,
        nodes: int = 1,
    ) -> None:
        self.rank = rank
        self.allocation = allocation
        ranks = allocation.size
        allow_open_files(rank, ranks)
        self.labels = [_label(allocation, number) for number in range(ranks)]
        self._health = health
        health.name_ranks(self.labels)
        address = _reachable_address() if nodes > 1 else None
        if nodes == 1:
            _stay_on_this_node()
        worlds = default_groups(allocation)
        seconds = timeout.total_seconds()
        timeout_of_sums = collective_timeout(hang_timeout, timeout)
        self.groups = connect_groups(rank, worlds, backend, timeout_of_sums, parts_of_groups(allocation))
        if nodes > 1:
            self.labels = [f"{label} on {name}" for label, name in zip(self.labels, node_names(ranks), strict=True)]
        store, secret = self.groups.new_store(), self.groups.key.derive("pool").hex()
        self._mesh: Mesh | None = Mesh.connect(store, rank, ranks, self.labels, seconds, address, secret=secret)
        if ranks > 1:
            rank_zero_info(f"flowtrain: pool: {describe_ways(self._mesh.locations)}.")
        self.groups.cross.page = self._mesh.page
        self._mesh.page.enter("start up", -1)
        health.join(self._mesh, hang_timeout, seconds, fault_folder)
        atexit.register(self._tell_at_exit)

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles of this rank."""
        return tuple(role for role in self.allocation.roles if self.rank in self.allocation.ranks[role])

    @property
    def stages(self) -> dict[str, tuple[int, StageSchedule]]:
        """Role of this rank that is in stages -> the stage that it holds, and all of them."""
        layouts = {role: self.allocation.layouts[role] for role in self.roles}
        staged = ((role, layout.stages) for role, layout in layouts.items() if layout.pipeline > 1)
        return {role: (self.allocation.stage_of(role, self.rank), pipeline) for role, pipeline in staged}

    def is_first(self, role: str) -> bool:
        """Whether this rank is the first that computes the same of ``role``: it speaks for those beside it."""
        stage = self.allocation.stage_of(role, self.rank)
        return any(self.rank == ranks[0] for ranks in self.allocation.members_in_stage(role, stage))

    def is_first_tensor_rank(self, role: str) -> bool:
        """Whether this rank of ``role`` is the first of those that compute the same layers on the same tokens."""
        within = self.allocation.rank_within(role, self.rank)
        return within is not None and within % self.allocation.layouts[role].tensor == 0

    @property
    def mesh(self) -> Mesh:
        """Connects this rank with the others, until it leaves."""
        assert self._mesh is not None, "this rank has left the job"
        return self._mesh

    def during(self, phase: str) -> AbstractContextManager[None]:
        """Inside, the other ranks see this one in ``phase``."""
        return nullcontext() if self._mesh is None else self._mesh.page.during(phase)

    def ask_to_stop(self) -> None:
        """Leaves a mark that all ranks learn of in the same step's report. May be called in a signal handler."""
        if self._mesh is not None:
            self._mesh.page.sigterm = True

    def tell(self, exception: BaseException) -> None:
        """Tells the other ranks why this one fails, unless it only does so because one of them failed."""
        if self._mesh is None:
            return
        interrupted = isinstance(exception, KeyboardInterrupt)
        with _ignore_sigchld():
            lines = traceback.format_exception_only(exception) if interrupted else traceback.format_exception(exception)
            try:
                if isinstance(exception, AgreedError) and exception.rank != self.rank:
                    blame_fault(self._mesh.board, self.rank, exception.rank, _CAUSE_SECONDS)
                elif isinstance(exception, RuntimeError):  # so a collective fails when a peer has gone
                    first_fault(self._mesh.board, self.rank)
            finally:  # a signal's handler may have raised meanwhile
                self._mesh.page.fail("".join(lines))  # in vain where the page blames another rank by now

    def leave(self) -> None:
        """Says goodbye to the other ranks. A second call does nothing."""
        if self._mesh is None:
            return
        self._health.leave()
        atexit.unregister(self._tell_at_exit)
        self._mesh.close()
        self._mesh = None
        self.groups.cross.page = None

    def _tell_at_exit(self) -> None:
        # For ways past `tell` and `leave`: an exception in a callback's `on_exception`, say, ends Lightning's clean-up.
        self.tell(getattr(sys, "last_value", None) or RuntimeError("The process ended before the run did."))
        self._health.leave()  # it says what there is to say before the interpreter ends its thread


def collective_timeout(hang_timeout: float, timeout: timedelta) -> timedelta:
    """When collectives give up: later than the health monitor, which knows who is to blame."""
    return 2 * max(timedelta(seconds=hang_timeout), timeout)


@contextmanager
def _ignore_sigchld() -> Iterator[None]:
    """Inside, no child's end raises: PyTorch's loaders do so in a signal's handler, for each worker that has died."""
    if threading.current_thread() is not threading.main_thread():  # no other thread runs handlers
        yield
        return
    former, is_ignored = None, False
    while not is_ignored:
        with suppress(RuntimeError):  # of a child whose end was noticed just now
            former, is_ignored = signal.signal(signal.SIGCHLD, signal.SIG_DFL), True
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, former or signal.SIG_DFL)


def _reachable_address() -> str:
    """This rank's address for ranks of other nodes: that of gloo's interface, which is named here if nobody has.

    By itself gloo takes the address that the node's own name stands for, which often is one that no other node reaches.
    """
    named = os.environ.get(_INTERFACE, "").split(",")[0]
    address = address_of(named) or address_towards(os.environ["MASTER_ADDR"])
    interface = interface_of(address)
    if interface is not None:
        os.environ.setdefault(_INTERFACE, interface)
    return address


def _stay_on_this_node() -> None:
    """Lets gloo listen where no other machine reaches it, unless an interface is named."""
    interface = interface_of("127.0.0.1")
    if interface is not None:
        os.environ.setdefault(_INTERFACE, interface)


def _label(allocation: Allocation, rank: int) -> str:
    found = []
    for role in allocation.roles:
        if (within := allocation.rank_within(role, rank)) is not None:
            staged = allocation.layouts[role].pipeline > 1
            found.append(f"{role} {within}" + (f", stage {allocation.stage_of(role, rank)}" if staged else ""))
    return " and ".join(found)
