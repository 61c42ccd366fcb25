"""Values logged outside of steps: rank 0's on every rank, and a word to those that log alone."""

from __future__ import annotations

import time
from numbers import Real
from typing import Any

from torch import Tensor

from flowtrain_lightning.parallel.ranks.cross_group import WAITS_FOR_ALL, WAITS_FOR_RANK
from flowtrain_lightning.pool import State, Status
from flowtrain_lightning.runtime.job import Job

_PATIENCE_SECONDS = 5.0  # until a rank that stands in another collective is not just about to leave it


class EpochMetricSync:
    """Agrees with the other ranks on what is logged outside of steps. Every rank logs the same names in turn.

    Args:
        job: the calling rank's.
    """

    def __init__(self, job: Job) -> None:
        self._cross, self._logging = job.groups.cross, job.groups.logging
        self._board, self._page = job.mesh.board, job.mesh.page
        self._labels = job.labels
        worlds = job.allocation.ranks.values()
        self._peers = {rank for ranks in worlds if job.rank in ranks for rank in ranks}

    def agree(self, name: str, value: Any) -> float:
        """The value that rank 0 logs, on every rank. Every rank calls it.

        Raises:
            TypeError: the value is no single number.
            ValueError: rank 0 logs another name, or another rank has gone on without logging.
        """
        if not isinstance(value, Real | Tensor) or (isinstance(value, Tensor) and value.numel() != 1):
            raise TypeError(
                f"log({name!r}, ...) takes a number or a tensor of one element under flowtrain, but got "
                f"{type(value).__name__}. Log a metric's value (`metric.compute()`), not the object."
            )
        self._meet(name)
        first_name, first_value = self._cross.broadcast_message((name, float(value)), 0)
        if first_name != name:
            raise ValueError(
                f"log({name!r}, ...) was called on rank {self._cross.rank} while rank 0 calls "
                f"log({first_name!r}, ...). Outside of microbatches all ranks must log the same names in the same "
                "order; names that exist on one half only belong into `loss`. Of what each rank has of its own, such "
                "as norms of gradients, gather that of all ranks first: self.all_gather(value)."
            )
        return float(first_value)

    def _meet(self, name: str) -> None:
        """Waits until all ranks log; raises where one of them cannot come any more."""
        self._logging.look = lambda: self._look(name, since)
        since: dict[int, tuple[int, float]] = {}
        with self._page.during(f"{WAITS_FOR_ALL} to log {name!r}"):
            self._logging.barrier()

    def _look(self, name: str, since: dict[int, tuple[int, float]]) -> None:
        own, now = self._board[self._cross.rank], time.monotonic()
        for rank in (rank for rank in range(self._cross.ranks) if rank != own.rank):
            other = self._board[rank]
            progress, moment = since.setdefault(rank, (other.progress, now))
            if progress != other.progress:
                since[rank] = (other.progress, moment := now)
            in_cross = other.phase == WAITS_FOR_ALL or other.phase.startswith(WAITS_FOR_RANK)
            stands_elsewhere = in_cross or (rank in self._peers and other.in_collective)
            has_gone = other.begun > own.begun or other.state is State.FINISHED
            if has_gone or (stands_elsewhere and now - moment > _PATIENCE_SECONDS):
                self._refuse(name, other)

    def _refuse(self, name: str, other: Status) -> None:
        own = self._cross.rank
        raise ValueError(
            f"log({name!r}, ...) was called on rank {own} ({self._labels[own]}), but rank {other.rank} ({other.label}) "
            f"has gone on without it, to phase {other.phase!r} of step {other.step}. Outside of microbatches call it "
            "on every rank; or, where rank 0 alone shall log, with rank_zero_only=True."
        )
