"""All ranks of a job in one CPU group, for what spans roles at step boundaries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from flowtrain_lightning.parallel.ranks.job_secret import JobKey
from flowtrain_lightning.parallel.ranks.sealed_messages import broadcast_sealed, gather_sealed

WAITS_FOR_ALL = "wait for all ranks"
WAITS_FOR_RANK = "wait for a message from rank"
"""Phases of a rank that waits in a collective over all ranks."""

_LOOK = timedelta(seconds=1)

_REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda of_ranks: of_ranks.sum(0) / len(of_ranks),
    "sum": lambda of_ranks: of_ranks.sum(0),
    "min": lambda of_ranks: of_ranks.amin(0),
    "max": lambda of_ranks: of_ranks.amax(0),
}


class ShowsPhase(Protocol):
    """Shows other ranks what this one does."""

    def during(self, phase: str) -> AbstractContextManager[None]:
        """Inside, this rank is in ``phase``."""


class CrossGroup:
    """All ranks of the job, on CPU tensors over gloo.

    torch.distributed makes subgroups of the default group only, and the default group is a role; so this one is a
    ``ProcessGroupGloo`` of its own. Its collectives are counted, for the test that none runs inside a step.

    What ranks tell each other here as messages is sealed with the job's key; tensors are not. It may be used where
    Lightning makes a GPU the default device, as it does while a module is built.

    Args:
        store: where the ranks find each other.
        rank: the calling rank.
        ranks: how many there are.
        timeout: after which a collective gives up.
        key: of this group alone; a single rank needs none.

    Attributes:
        collectives: how many there were.
        page: shows the other ranks that this one waits; None before they can see it.
        look: called again and again while this rank waits; may raise.
    """

    def __init__(self, store: Store, rank: int, ranks: int, timeout: timedelta, key: JobKey | None = None) -> None:
        self._key = key
        self.rank = rank
        self.ranks = ranks
        self.collectives = 0
        self.page: ShowsPhase | None = None
        self.look: Callable[[], None] | None = None
        self._group: Any = dist.ProcessGroupGloo(store, rank, ranks, timeout) if ranks > 1 else None

    def all_reduce(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
        """Reduces a CPU tensor over all ranks, in place, and returns it."""
        options = dist.AllreduceOptions()
        options.reduceOp = op
        self._run(WAITS_FOR_ALL, lambda group: group.allreduce([tensor], options))
        return tensor

    def reduce_over(self, ranks: Sequence[int], tensor: Tensor, operation: str) -> Tensor:
        """The ``"sum"``, ``"mean"``, ``"min"`` or ``"max"`` of the CPU tensors of ``ranks``, on every rank."""
        of_ranks = torch.zeros((self.ranks, *tensor.shape), dtype=tensor.dtype, device="cpu")
        of_ranks[self.rank] = tensor
        return _REDUCTIONS[operation](self.all_reduce(of_ranks)[list(ranks)])

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """Overwrites a CPU tensor with that of ``source`` and returns it."""
        options = dist.BroadcastOptions()
        options.rootRank = source
        self._run(f"{WAITS_FOR_RANK} {source}", lambda group: group.broadcast([tensor], options))
        return tensor

    def broadcast_message(self, value: Any, source: int) -> Any:
        """The value that ``source`` passed, on every rank; see :func:`~.messages.encode_message` for what it may be."""
        if self._group is None:
            return value
        return broadcast_sealed(
            value, lambda tensor: self.broadcast(tensor, source), self.rank, source, self._message_key()
        )

    def gather_messages(self, value: Any) -> list[Any]:
        """The values of all ranks in rank order, on every rank."""
        if self._group is None:
            return [value]

        def gather(tensor: Tensor) -> list[Tensor]:
            gathered = [torch.empty_like(tensor) for _ in range(self.ranks)]
            self._run(WAITS_FOR_ALL, lambda group: group.allgather([gathered], [tensor]))
            return gathered

        return gather_sealed(value, gather, self.rank, self._message_key())

    def barrier(self) -> None:
        """Waits until every rank is here."""
        self.all_reduce(torch.zeros(1, device="cpu"))

    def _message_key(self) -> JobKey | None:
        """Of the next message alone: one that was overheard cannot be said again later."""
        return None if self._key is None else self._key.derive(f"message {self.collectives}")

    def _run(self, phase: str, start: Callable[[Any], Any]) -> None:
        """Starts a collective and waits for its end."""
        self.collectives += 1
        if self._group is None:
            return
        with nullcontext() if self.page is None else self.page.during(phase):
            work = start(self._group)
            while self.look is not None and not work.is_completed():
                try:
                    work.wait(_LOOK)
                except RuntimeError as error:
                    if "timed out" not in str(error):  # it has failed, or PyTorch tells here of a data worker's death
                        raise
                    self.look()
            work.wait()


class AgreedError(Exception):
    """An error of one rank, which ends all of them: they have agreed on it.

    Attributes:
        rank: on which it went wrong, the first of them where there are several.
    """

    rank: int
