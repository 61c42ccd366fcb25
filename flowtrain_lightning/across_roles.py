"""What a strategy asks of all ranks of all roles, at step boundaries, where Lightning has one group of all ranks."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor

from flowtrain_lightning.allocator import Allocation
from flowtrain_lightning.allocator.roles import BACKBONE
from flowtrain_lightning.runtime.job import Job


class AcrossRoles(ParallelStrategy):
    """A strategy whose roles are process groups of their own; one more group, of the job, spans them."""

    _job: Job | None = None

    @property
    def job(self) -> Job:
        """This rank's place among the others."""
        assert self._job is not None, "the job begins in setup_environment"
        return self._job

    @property
    def allocation(self) -> Allocation:
        """Which ranks play which role."""
        return self.job.allocation

    def barrier(self, name: str | None = None) -> None:
        """Waits for all ranks of all roles."""
        if self._job is not None:
            self._job.groups.cross.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """The object of rank ``src`` on all ranks of all roles."""
        return obj if self._job is None else self._job.groups.cross.broadcast_object(obj, src)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """The sum, mean, minimum or maximum over the backbone ranks, whose results count; every rank gets it."""
        if not isinstance(tensor, Tensor) or self._job is None:
            return tensor
        operation = str(reduce_op).lower().rpartition(".")[2].replace("avg", "mean")
        backbones = self.allocation.ranks[BACKBONE]
        return self._job.groups.cross.reduce_over(backbones, tensor.detach().cpu(), operation).to(tensor.device)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all ranks (or any rank) say yes."""
        if self._job is None:
            return decision
        votes = int(self._job.groups.cross.all_reduce(torch.tensor([int(decision)])))
        return votes == self.world_size if all else votes > 0

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """``[ranks, ...]``: the tensors of all ranks of all roles."""
        if self._job is None:
            return tensor.unsqueeze(0)
        return torch.stack(self._job.groups.cross.gather_objects(tensor.detach().cpu())).to(tensor.device)
