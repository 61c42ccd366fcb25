"""The strategy's collectives: each spans all ranks of all roles, at step boundaries."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor

from flowtrain_lightning.allocator import Allocation
from flowtrain_lightning.compute.step_logging import StepLogging
from flowtrain_lightning.data import RankShard
from flowtrain_lightning.parallel.ranks.cross_group import CrossGroup
from flowtrain_lightning.placement.run_costs import rank_shard
from flowtrain_lightning.runtime.job import Job


class RoleCollectives(ParallelStrategy):
    """A rank's place among those of all roles, and what Lightning asks them to do together. Before that it is alone."""

    def __init__(self) -> None:
        super().__init__()
        self.num_nodes = 1
        self._job: Job | None = None

    @property
    def job(self) -> Job:
        """This rank's place among the others."""
        assert self._job is not None, "the job begins in setup_environment"
        return self._job

    @property
    def allocation(self) -> Allocation:
        """The ranks of each role."""
        return self.job.allocation

    @property
    def rank_shard(self) -> RankShard:
        """The part of every step that this rank's loaders load."""
        return rank_shard(self.allocation, self.global_rank, self.num_nodes)

    @property
    def node_shards(self) -> tuple[RankShard, ...]:
        """The parts of every step that the ranks of this node load."""
        of_node = self.allocation.size // self.num_nodes
        first = self.global_rank // of_node * of_node
        return tuple(rank_shard(self.allocation, rank, self.num_nodes) for rank in range(first, first + of_node))

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """For loaders that Lightning shards itself: by backbone data-parallel rank; encoder ranks repeat the first."""
        trunk = self.allocation.trunk
        member = self.allocation.member_of(trunk, self.global_rank)
        return {"num_replicas": self.allocation.layouts[trunk].data, "rank": member or 0}

    @property
    def is_distributed(self) -> bool:
        """Lightning asks for this name to switch ``sync_dist`` and its like on."""
        return True

    def barrier(self, name: str | None = None) -> None:
        """Waits for all ranks of all roles."""
        if self._job is not None:
            self._all_ranks("barrier").barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """The value of rank ``src`` on all ranks of all roles: what `parallel.messages` can send."""
        return obj if self._job is None else self._all_ranks("broadcast").broadcast_message(obj, src)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """The sum, mean, minimum or maximum over data-parallel ranks of the backbone, on every rank."""
        if not isinstance(tensor, Tensor) or self._job is None:
            return tensor
        operation = str(reduce_op).lower().rpartition(".")[2].replace("avg", "mean")
        members = [ranks[0] for ranks in self.allocation.members(self.allocation.trunk)]
        return self._all_ranks("reduce").reduce_over(members, tensor.detach().cpu(), operation).to(tensor.device)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all ranks (or any rank) say yes."""
        if self._job is None:
            return decision
        votes = int(self._all_ranks("reduce").all_reduce(torch.tensor([int(decision)], device="cpu")))
        return votes == self.world_size if all else votes > 0

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """``[ranks, ...]``: the tensors of all ranks of all roles."""
        if self._job is None:
            return tensor.unsqueeze(0)
        return torch.stack(self._all_ranks("all_gather").gather_messages(tensor.detach().cpu())).to(tensor.device)

    def _all_ranks(self, what: str) -> CrossGroup:
        """The group of all ranks, for a collective in which they meet.

        Raises:
            RuntimeError: they never will.
        """
        if isinstance(self._lightning_module, StepLogging):
            self._lightning_module.refuse_in_a_batch(what, self.world_size)
        return self.job.groups.cross
