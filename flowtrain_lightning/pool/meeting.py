"""How a rank meets all others at start: those of its machine over unix sockets, those of other hosts over TCP."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from flowtrain_lightning.pool.between_hosts.hosts import HostMeeting, RemoteConnection
from flowtrain_lightning.pool.rendezvous import Connection, Rendezvous
from flowtrain_lightning.pool.store import Store


@dataclass(frozen=True)
class Met:
    """All other ranks.

    Attributes:
        here: those that share this rank's location.
        elsewhere: all others.
        locations: of every rank; empty where all run here.
    """

    here: dict[int, Connection] = field(default_factory=dict)
    elsewhere: dict[int, RemoteConnection] = field(default_factory=dict)
    locations: tuple[str, ...] = ()


def meet(
    store: Store,
    rank: int,
    labels: Sequence[str],
    page: int,
    bell: int,
    timeout: float,
    address: str | None,
    location: str | None,
) -> Met:
    """Meet the other ranks; see `Mesh.connect`.

    Args:
        store: as there, like the arguments that are not named here.
        rank: the calling rank.
        labels: one per rank.
        page: descriptor of the calling rank's status page.
        bell: ``eventfd`` that wakes the calling rank.
        timeout: seconds.
        address: IP address of the calling rank, or None when all run here.
        location: where the calling rank runs; None finds out.
    """
    others = {peer for peer in range(len(labels)) if peer != rank}
    began = time.monotonic()
    if address is None:
        return Met(Rendezvous(store, rank, labels, others, page, bell, timeout, began).meet() if others else {})
    hosts = HostMeeting(store, rank, labels, address, location, timeout)
    try:
        near = others - hosts.elsewhere
        here = Rendezvous(store, rank, labels, near, page, bell, timeout, began).meet() if near else {}
    except BaseException:
        hosts.close()
        raise
    try:
        elsewhere = hosts.meet([(peer, connection.socket.fileno()) for peer, connection in here.items()])
    except BaseException:
        for connection in here.values():
            connection.socket.close()
            for descriptor in (connection.process, connection.page, connection.bell):
                os.close(descriptor)
        raise
    return Met(here, elsewhere, hosts.locations)
