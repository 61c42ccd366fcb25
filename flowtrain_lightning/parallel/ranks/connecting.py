"""Connects a process with the others of its job: its role's default group, and the groups of all ranks."""

from __future__ import annotations

import atexit
import itertools
import os
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from flowtrain_lightning.parallel.ranks.cross_group import CrossGroup
from flowtrain_lightning.parallel.ranks.groups import Groups, PartOfGroup
from flowtrain_lightning.parallel.ranks.job_store import node_names, readable_rendezvous_errors, root_store
from flowtrain_lightning.parallel.ranks.kept_meshes import forget_meshes
from flowtrain_lightning.parallel.ranks.keyed_store import KeyedStore
from flowtrain_lightning.parallel.ranks.sealed_messages import gather_over
from flowtrain_lightning.ports import shut_at_the_end

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
    if _connections:
        forget_meshes()
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
