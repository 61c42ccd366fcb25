"""Process groups: one world per role, and one explicit CPU group for what spans roles at step boundaries.

Each role is a default group of its own (DeepSpeed ZeRO-3 and Lightning's per-step broadcast reach no further than
the default group); where roles share ranks there is one default group of all ranks, and a role that has only some of
them is a part of it. Collectives over all roles go through ``Groups.cross`` only.
"""

from __future__ import annotations

import atexit
import itertools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from flowtrain_lightning.allocator import ROLES, Allocation
from flowtrain_lightning.parallel.job_secret import JobKey
from flowtrain_lightning.parallel.job_store import node_names, readable_rendezvous_errors, root_store
from flowtrain_lightning.parallel.keyed_store import KeyedStore
from flowtrain_lightning.parallel.messages import MAX_MESSAGE_BYTES, decode_message, encode_message
from flowtrain_lightning.ports import shut_at_the_end

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

    What ranks tell each other here as messages is sealed with the job's key; tensors are not.

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
        of_ranks = torch.zeros((self.ranks, *tensor.shape), dtype=tensor.dtype)
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
        key = self._message_key()
        message = _seal(value, source, key) if self.rank == source else b""
        size = int(self.broadcast(torch.tensor([len(message)]), source))
        _refuse_long(size)
        message_bytes = self.broadcast(_as_tensor(message, size), source)
        return value if self.rank == source else _open(message_bytes, source, key)

    def gather_messages(self, value: Any) -> list[Any]:
        """The values of all ranks in rank order, on every rank."""
        if self._group is None:
            return [value]

        def gather(tensor: Tensor) -> list[Tensor]:
            gathered = [torch.empty_like(tensor) for _ in range(self.ranks)]
            self._run(WAITS_FOR_ALL, lambda group: group.allgather([gathered], [tensor]))
            return gathered

        return _gather_messages(value, gather, self.rank, self._message_key())

    def barrier(self) -> None:
        """Waits until every rank is here."""
        self.all_reduce(torch.zeros(1))

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
    _of_roles: dict[str, dist.ProcessGroup] = field(default_factory=dict)

    def of_role(self, role: str) -> dist.ProcessGroup | None:
        """A group for the collectives of one role alone, of its ranks in the default group.

        Where ranks have both roles, each role sums gradients when it is done: in one group for both, ranks would have
        to be done in one order. Every rank of the default group asks for the same roles in the same order.
        """
        if self.role_ranks == 1:
            return None
        if role not in self._of_roles:
            with shut_at_the_end():
                self._of_roles[role] = dist.new_group(self.ranks_of(role))
        return self._of_roles[role]

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


def gather_over(
    group: dist.ProcessGroup | None,
    ranks: int,
    value: Any,
    device: torch.device | None = None,
    key: JobKey | None = None,
) -> list[Any]:
    """The values of all ranks of a group of torch.distributed, in rank order.

    Args:
        group: None is the default group.
        ranks: its size.
        value: this rank's; see :func:`~.messages.encode_message` for what it may be.
        device: on whose tensors the group works; None is the CPU.
        key: with which the values are sealed; None believes whoever is in the group.
    """
    if ranks == 1:
        return [value]

    def gather(tensor: Tensor) -> list[Tensor]:
        own = tensor.to(device)
        gathered = [torch.empty_like(own) for _ in range(ranks)]
        dist.all_gather(gathered, own, group=group)
        return [of_rank.cpu() for of_rank in gathered]

    return _gather_messages(value, gather, dist.get_rank(group), key)


def _gather_messages(value: Any, gather: Callable[[Tensor], list[Tensor]], rank: int, key: JobKey | None) -> list[Any]:
    message = _seal(value, rank, key)
    sizes = [int(size) for size in gather(torch.tensor([len(message)]))]
    _refuse_long(max(sizes))
    padded = gather(_as_tensor(message, max(sizes)))
    found = (tensor[:size] for tensor, size in zip(padded, sizes, strict=True))
    return [_open(tensor, source, key) for source, tensor in enumerate(found)]


def _seal(value: Any, source: int, key: JobKey | None) -> bytes:
    message = encode_message(value)
    return message if key is None else key.seal(message, _context(source))


def _open(tensor: Tensor, source: int, key: JobKey | None) -> Any:
    message = tensor.numpy().tobytes()
    return decode_message(message if key is None else key.open(message, _context(source)))


def _context(source: int) -> str:
    return f"a message from rank {source} of a group"


def _as_tensor(message: bytes, size: int) -> Tensor:
    """``[size]`` uint8, which begins with ``message``."""
    tensor = torch.zeros(size, dtype=torch.uint8)
    if message:
        tensor[: len(message)] = torch.frombuffer(bytearray(message), dtype=torch.uint8)
    return tensor


def _refuse_long(size: int) -> None:
    if not 0 <= size <= MAX_MESSAGE_BYTES:
        raise ValueError(f"Another rank announced a message of {size:,} bytes; {MAX_MESSAGE_BYTES:,} are the most.")


def collective_backend(device_type: str, rank: int, allocation: Allocation, ranks_per_device: int) -> str:
    """Which backend the default group of a rank has.

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
        return tuple(allocation.ranks[role] for role in ROLES)
    return (tuple(range(allocation.size)),)


def parts_of_groups(allocation: Allocation) -> dict[str, tuple[int, ...]]:
    """Role -> its global ranks, of the roles that have only some of the ranks of their default group."""
    if allocation.placement != "mixed":
        return {}
    return {role: ranks for role, ranks in allocation.ranks.items() if len(ranks) < allocation.size}


_connected: tuple[Any, Groups] | None = None
_connected_process = 0  # the process that `_connected` is of: the threads behind its groups do not outlive a fork
_connections = 0


def connect_groups(
    rank: int,
    worlds: tuple[tuple[int, ...], ...],
    backend: str,
    timeout: timedelta,
    parts: Mapping[str, tuple[int, ...]] | None = None,
) -> Groups:
    """Connects this process, or returns the groups of an earlier ``fit`` of the same layout, if they are still there.

    Args:
        rank: global rank.
        worlds: the global ranks of every default group; together they hold each rank once.
        backend: of the default groups, for example ``"nccl"`` or ``"gloo"``.
        timeout: after which a blocked collective raises.
        parts: role -> its global ranks, of the roles that have only some of the ranks of their default group.

    Raises:
        RuntimeError: the others do not come in time, torch.distributed is in use already, or was so when this process
            was forked.
    """
    global _connected, _connected_process, _connections
    if _connected is not None and _connected_process != os.getpid():
        raise RuntimeError(
            f"This process was forked from process {_connected_process} while that was in a flowtrain run, and the "
            "threads of its process groups did not come along. Start it as a process of its own (multiprocessing's "
            '"spawn"), or fork before `fit`.'
        )
    parts = dict(parts or {})
    key = (rank, worlds, backend, timeout, parts)
    if _connected is not None and _connected[0] == key and _connected[1].role is dist.group.WORLD:
        return _connected[1]
    disconnect_groups()
    if dist.is_initialized():
        raise RuntimeError(
            "torch.distributed is already initialised in this process, by code outside flowtrain. Each role needs a "
            "default group of its own: destroy the group before `fit` (torch.distributed.destroy_process_group())."
        )
    ranks = sum(map(len, worlds))
    _connections += 1
    root = root_store(rank, ranks, timeout)
    with readable_rendezvous_errors(rank, ranks, timeout, root):
        node_names(ranks)  # gloo keeps a descriptor for each stranger who connects: it listens when all are there
        with shut_at_the_end():
            groups = _connect(rank, worlds, parts, backend, timeout, root, f"flowtrain/{_connections}")
    _connected, _connected_process = (key, groups), os.getpid()
    return groups


def _connect(
    rank: int,
    worlds: tuple[tuple[int, ...], ...],
    parts: Mapping[str, tuple[int, ...]],
    backend: str,
    timeout: timedelta,
    root: KeyedStore,
    prefix: str,
) -> Groups:
    store, key = PrefixStore(prefix, root), root.key.derive(prefix)
    number, world = next((n, world) for n, world in enumerate(worlds) if rank in world)
    role_rank = world.index(rank)
    dist.init_process_group(
        backend,
        # Threads of NCCL ask the store again and again, also while Python cannot answer: it gets the one beneath.
        store=PrefixStore(f"world/{number}", store if backend == "gloo" else PrefixStore(prefix, root.inner)),
        rank=role_rank,
        world_size=len(world),
        timeout=timeout,
    )
    assert dist.group.WORLD is not None
    ranks = sum(map(len, worlds))
    within = {
        role: tuple(world.index(each) for each in of_role) for role, of_role in parts.items() if of_role[0] in world
    }
    groups = Groups(
        cross=CrossGroup(PrefixStore("cross", store), rank, ranks, timeout, key.derive("cross")),
        logging=CrossGroup(PrefixStore("logging", store), rank, ranks, timeout, key.derive("logging")),
        role=dist.group.WORLD,
        role_rank=role_rank,
        role_ranks=len(world),
        role_cpu=None if backend == "gloo" else dist.new_group(backend="gloo"),
        key=key,
        _stores=(PrefixStore(f"store/{number}", store) for number in itertools.count()),
        _parts={role: PartOfGroup(own, dist.new_group(list(own), backend="gloo")) for role, own in within.items()},
    )
    # Whoever was first at a peer's port is its peer for gloo: all show that they know the key, before any tensor goes.
    groups.cross.gather_messages(None)
    groups.logging.gather_messages(None)
    gather_over(groups.role_cpu, groups.role_ranks, None, key=key.derive("role"))
    for role, part in within.items():
        if role_rank in part:
            groups.gather_over_role(role, None)
    return groups


@atexit.register
def disconnect_groups() -> None:
    """Leaves all groups; also at exit. A fork leaves those of its parent alone, and all leave those of others alone."""
    global _connected
    if _connected is None or _connected_process != os.getpid():
        return
    role, _connected = _connected[1].role, None
    if role is dist.group.WORLD:
        dist.destroy_process_group()
    # gloo's threads may still drop finished work; the interpreter must not end under their feet.
    time.sleep(0.1)
