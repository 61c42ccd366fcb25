"""Who is alive and what it does: the pages of all ranks, beside their processes."""

from __future__ import annotations

import os
import select
import signal
from contextlib import suppress

from flowtrain_lightning.pool.liveness import Status, StatusPage


class StatusBoard:
    """The pages of all ranks, and whether their processes live. Safe to use from several threads.

    Args:
        pages: one per rank, the own one among them.
        processes: for each rank a ``pidfd``, or what can be read like one when a rank of another host is lost; None for
            the own process.
    """

    def __init__(self, pages: list[StatusPage], processes: list[int | None]) -> None:
        self.pages = pages
        self.processes = processes

    def __len__(self) -> int:
        return len(self.pages)

    def __getitem__(self, rank: int) -> Status:
        return self.pages[rank].read()

    def died(self, rank: int) -> bool:
        """Whether the process of ``rank`` is gone. It cannot be taken for a later process of the same number."""
        process = self.processes[rank]
        if process is None:
            return False
        poll = select.poll()
        poll.register(process, select.POLLIN)
        return bool(poll.poll(0))

    def stopped(self, rank: int) -> bool:
        """Whether the process of ``rank`` lives but is stopped; on another host: lives but is silent."""
        return self.pages[rank].stopped() and not self.died(rank)

    def kill(self, rank: int) -> None:
        """End the process of a peer at once; nothing happens when it is gone already, or runs on another host."""
        process = self.processes[rank]
        if process is not None and not self.died(rank):
            with suppress(OSError):
                signal.pidfd_send_signal(process, signal.SIGKILL)

    def close(self) -> None:
        """Let go of the processes; the pages can still be read."""
        for rank, process in enumerate(self.processes):
            if process is not None:
                self.processes[rank] = None
                os.close(process)
