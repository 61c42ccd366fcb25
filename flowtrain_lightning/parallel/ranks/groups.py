"""Process groups: one world per role, and one explicit CPU group for what spans roles at step boundaries.

Each role is a default group of its own (DeepSpeed ZeRO-3 and Lightning's per-step broadcast reach no further than
the default group); where roles share ranks there is one default group of all ranks, and a role that has only some of
them is a part of it. Collectives over all roles go through ``Groups.cross`` only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from flowtrain_lightning.allocator import Allocation
from flowtrain_lightning.parallel.ranks.cross_group import CrossGroup
from flowtrain_lightning.parallel.ranks.job_secret import JobKey
from flowtrain_lightning.parallel.ranks.sealed_messages import gather_over
from flowtrain_lightning.ports import shut_at_the_end


@dataclass(frozen=True)
class PartOfGroup:
    """Some ranks of a default group, all those of a role.

    Attributes:
        ranks: their numbers within the default group.
        cpu: the group of them on CPU; on other ranks what torch.distributed gives in its place.
    """

    ranks: tuple[int, ...]
    cpu: Any


@dataclass(frozen=True)
class Groups:
    """The groups of one rank.

    Attributes:
        cross: all ranks, on CPU.
        logging: a second group of all ranks, in which those wait that log outside of steps. A rank that logs alone
            waits there, and takes no part in another collective by mistake.
        role: the default group: the ranks of this one's role, or all where roles share ranks.
        role_rank: this rank within its default group.
        role_ranks: size of its default group.
        role_cpu: the ranks of the default group, on CPU; None is the default group itself.
        key: of these groups, for what their ranks say to each other.
    """

    cross: CrossGroup
    logging: CrossGroup
    role: dist.ProcessGroup
    role_rank: int
    role_ranks: int
    role_cpu: dist.ProcessGroup | None
    key: JobKey
    _stores: Iterator[Store]
    _parts: Mapping[str, PartOfGroup] = field(default_factory=dict)
    _of_roles: dict[tuple[str, int], Any] = field(default_factory=dict)

    def of_role(self, role: str, stages: int = 1) -> dist.ProcessGroup | None:
        """A group for the collectives of one role alone, of its ranks in the default group.

        Where ranks have both roles, each role sums gradients when it is done: in one group for both, ranks would have
        to be done in one order. Every rank of the default group asks for the same roles in the same order.

        Args:
            role: which one.
            stages: of the role; the group is of this rank's stage.
        """
        if self.role_ranks == 1:
            return None
        if (role, stages) not in self._of_roles:
            ranks = self.ranks_of(role)
            count = len(ranks) // stages
            with shut_at_the_end():
                for each in (ranks[first : first + count] for first in range(0, len(ranks), count)):
                    group = dist.new_group(each)
                    if self.role_rank in each or (role, stages) not in self._of_roles:
                        self._of_roles[role, stages] = group
        found: dist.ProcessGroup = self._of_roles[role, stages]
        return found

    def between_steps(self, role: str, stages: int = 1) -> dist.ProcessGroup | None:
        """The group of a stage of a role for what its ranks send when no step runs; None is the default group."""
        whole = stages == 1 and len(self.ranks_of(role)) == self.role_ranks
        return None if whole else self.of_role(role, stages)

    def ranks_of(self, role: str) -> list[int]:
        """The ranks of a role, numbered within the default group."""
        return list(self._parts[role].ranks if role in self._parts else range(self.role_ranks))

    def new_store(self) -> Store:
        """An empty key-value store, the same on all ranks if they ask equally often."""
        return next(self._stores)

    def sum_over_role(self, role: str, tensor: Tensor) -> Tensor:
        """Sums a CPU tensor over the ranks of this rank's ``role``, in place, and returns it."""
        if len(self.ranks_of(role)) > 1:
            dist.all_reduce(tensor, group=self._cpu_of(role))
        return tensor

    def gather_over_role(self, role: str, value: Any) -> list[Any]:
        """The values of the ranks of this rank's ``role`` in rank order; see :func:`gather_over`."""
        return gather_over(self._cpu_of(role), len(self.ranks_of(role)), value, key=self.key.derive(f"role {role}"))

    def _cpu_of(self, role: str) -> dist.ProcessGroup | None:
        return self._parts[role].cpu if role in self._parts else self.role_cpu


def collective_backend(device_type: str, rank: int, allocation: Allocation, ranks_per_device: int) -> str:
    """Returns the backend of a rank's default group.

    NCCL refuses two ranks of one group on the same GPU, so each group is looked at by itself: with an encoder rank and
    a backbone rank on every GPU, each role has its GPUs for itself.

    Args:
        device_type: on what the ranks compute.
        rank: global rank.
        allocation: which ranks play which role.
        ranks_per_device: consecutive ranks that share a device.
    """
    world = next(ranks for ranks in default_groups(allocation) if rank in ranks)
    alone = len({each // ranks_per_device for each in world}) == len(world)
    return "nccl" if device_type == "cuda" and alone else "gloo"


def default_groups(allocation: Allocation) -> tuple[tuple[int, ...], ...]:
    """The global ranks of every default group: a role, or where roles share ranks all of them."""
    if allocation.placement == "separate":
        return tuple(allocation.ranks[role] for role in allocation.roles)
    return (tuple(range(allocation.size)),)


def parts_of_groups(allocation: Allocation) -> dict[str, tuple[int, ...]]:
    """Role -> its global ranks, of the roles that have only some of the ranks of their default group."""
    if allocation.placement != "mixed":
        return {}
    return {role: ranks for role, ranks in allocation.ranks.items() if len(ranks) < allocation.size}
