"""Connects ranks of different hosts over TCP, three connections for each two of them, before any of them sends.

Control records, status pages and the bytes of entries have a connection each: a large entry on its way over a slow
network then delays no heartbeat, and each connection is used by one thread.
"""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING
from weakref import WeakSet

from flowtrain_lightning.pool.between_hosts.authentication import (
    AuthenticationError,
    Claim,
    Responder,
    authenticate_initiator,
)
from flowtrain_lightning.pool.between_hosts.location import own_location
from flowtrain_lightning.pool.pool_errors import PeerFailed, PoolError

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

UNREACHABLE_SECONDS = 10.0
"""How long a host may be silent before its ranks count as lost. A kernel answers for processes that are stopped."""

_LOOK_SECONDS = 0.05
_AUTHENTICATION_SECONDS = 10.0  # of one connection
_MOST_STRANGERS = 512  # connections that have not proved anything yet; a rank does so at once


class Purpose(IntEnum):
    """What each connection between two ranks of different hosts carries."""

    RECORDS = 0
    PAGES = 1
    ENTRIES = 2


@dataclass(frozen=True)
class RemoteConnection:
    """A connected rank of another host.

    Its sockets are non-blocking.

    Attributes:
        records: carries control records.
        pages: carries status pages.
        entries: carries the bytes of entries.
    """

    records: socket.socket
    pages: socket.socket
    entries: socket.socket


_inheritable: WeakSet[socket.socket] = WeakSet()


def _close_in_child() -> None:
    """A fork that outlived this process would hold its connections open, and others could not see that it died."""
    for connection in list(_inheritable):
        connection.close()


os.register_at_fork(after_in_child=_close_in_child)


class RemoteRendezvous:
    """Tells the ranks where each of them runs, and connects this one with those of other hosts; used once.

    Args:
        store: where the ranks tell each other how they are reached.
        rank: the calling rank.
        labels: one per rank, for messages.
        address: IP address at which ranks of other hosts reach this one.
        location: equal on ranks that share memory; None finds out.
        timeout: seconds for all of it.
        secret: of the job. Whoever knows it can join.

    Attributes:
        locations: of every rank.
        peers: ranks of other locations.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        labels: Sequence[str],
        address: str,
        location: str | None,
        timeout: float,
        secret: str,
    ) -> None:
        self._store = store
        self._rank = rank
        self._labels = labels
        self._timeout = timeout
        self._secret = secret
        self._deadline = time.monotonic() + timeout
        self._sockets: dict[tuple[int, int], socket.socket] = {}
        try:
            self._listener = socket.create_server((address, 0), backlog=socket.SOMAXCONN)  # also for strangers
        except OSError as error:
            raise PoolError(
                f"{self._who(rank)} cannot be reached at {address} ({error}); expected an IPv4 address of this host."
            ) from error
        try:
            _, port = self._listener.getsockname()
            store.set(_host_key(rank), "\n".join((location or own_location(), address, str(port))))
            hosts = [self._ask(_host_key(peer)).split("\n") for peer in range(len(labels))]
        except BaseException:
            self._listener.close()
            raise
        self.locations = tuple(location for location, _, _ in hosts)
        self._addresses = [(host, int(port)) for _, host, port in hosts]
        self.peers = {peer for peer in range(len(labels)) if self.locations[peer] != self.locations[rank]}

    def connect(self, watched: dict[int, int]) -> dict[int, RemoteConnection]:
        """Connect to the peers below this rank, and wait for those above.

        Args:
            watched: descriptors that tell of the end of ranks which are connected already, and these ranks.

        Raises:
            PeerFailed: when a peer ends meanwhile.
            PoolError: when a peer does not come in time.
        """
        try:
            for peer in sorted(self.peers):
                if peer < self._rank:
                    for purpose in Purpose:
                        self._sockets[peer, purpose] = self._connect(peer, purpose)
            self._accept_all(watched | {each.fileno(): peer for (peer, _), each in self._sockets.items()})
            for connection in self._sockets.values():
                _prepare(connection)
            return {
                peer: RemoteConnection(*(self._sockets[peer, purpose] for purpose in Purpose))
                for peer in sorted(self.peers)
            }
        except BaseException:
            for connection in self._sockets.values():
                connection.close()
            raise

    def close(self) -> None:
        """Listen no more."""
        self._listener.close()

    def _ask(self, key: str) -> str:
        """What another rank has left in the store, or will."""
        try:
            while not self._store.check([key]):
                if time.monotonic() >= self._deadline:
                    ranks = range(len(self._labels))
                    raise self._missing([rank for rank in ranks if not self._store.check([_host_key(rank)])])
                time.sleep(_LOOK_SECONDS)
            return str(self._store.get(key).decode())
        except PoolError:
            raise
        except RuntimeError as error:  # from the store itself
            raise PoolError(
                f"{self._who(self._rank)} lost the store through which the ranks find each other. Did the rank that "
                "keeps it, rank 0 as a rule, meet an error? See its output."
            ) from error

    def _connect(self, peer: int, purpose: Purpose) -> socket.socket:
        host, port = self._addresses[peer]
        who = self._who(peer)
        try:
            connection = socket.create_connection((host, port), max(self._deadline - time.monotonic(), 0.001))
        except ConnectionRefusedError as error:
            raise PeerFailed(f"{who} ended during start-up. See its output.", peer) from error
        except OSError as error:
            raise PoolError(
                f"{who} cannot be reached at {host}:{port} ({error}). Does a firewall stand between the hosts, or is "
                "it the address of another network?"
            ) from error
        claim = Claim(self._rank, peer, len(self._labels), purpose)
        try:
            authenticate_initiator(connection, claim, self._secret, self._deadline)
        except AuthenticationError as error:
            connection.close()
            raise PeerFailed(f"{who} did not answer at {host}:{port} during start-up: {error}.", peer) from error
        return connection

    def _accept_all(self, watched: dict[int, int]) -> None:
        """Let in the peers above this rank, and notice when a rank that is connected ends meanwhile."""
        expected = {(peer, purpose) for peer in self.peers if peer > self._rank for purpose in Purpose}
        self._listener.setblocking(False)
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        for descriptor in watched:
            poll.register(descriptor, select.POLLRDHUP)
        strangers: dict[int, Responder] = {}  # by descriptor, in the order in which they came
        try:
            while not expected <= self._sockets.keys():
                if time.monotonic() >= self._deadline:
                    raise self._missing(sorted({peer for peer, _ in expected - self._sockets.keys()}))
                for descriptor, _ in poll.poll(_LOOK_SECONDS * 1000):
                    if descriptor in watched:
                        peer = watched[descriptor]
                        raise PeerFailed(f"{self._who(peer)} ended during start-up. See its output.", peer)
                    if descriptor == self._listener.fileno():
                        self._accept(strangers, poll)
                for descriptor, stranger in list(strangers.items()):
                    if self._is_decided(stranger, expected):
                        poll.unregister(descriptor)
                        del strangers[descriptor]
        finally:
            for stranger in strangers.values():
                stranger.connection.close()

    def _accept(self, strangers: dict[int, Responder], poll: select.poll) -> None:
        """Take in all who have connected; where they are too many, those go that have said nothing for longest."""
        until = min(self._deadline, time.monotonic() + _AUTHENTICATION_SECONDS)
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # nobody is left, or the next one has gone again
                return
            strangers[connection.fileno()] = Responder(connection, self._secret, until)
            poll.register(connection, select.POLLIN)
            if len(strangers) > _MOST_STRANGERS:
                oldest = next(iter(strangers))
                poll.unregister(oldest)
                strangers.pop(oldest).connection.close()

    def _is_decided(self, stranger: Responder, expected: set[tuple[int, Purpose]]) -> bool:
        """Keep a connection whose other end has proved itself, close one that failed; False while neither is known.

        Raises:
            PoolError: it belongs to the job, but is not one of those that are to come.
        """
        try:
            claim = stranger.advance()
        except AuthenticationError:
            stranger.connection.close()  # no business of ours, and no reason to end the job
            return True
        if claim is None:
            return False
        key = (claim.initiator, claim.purpose)
        is_for_us = (claim.responder, claim.ranks) == (self._rank, len(self._labels))
        if not is_for_us or key not in expected - self._sockets.keys():
            stranger.connection.close()
            raise PoolError(
                f"A process introduced itself as rank {claim.initiator} of {claim.ranks}; expected one of "
                f"{len(self._labels)} ranks that has not come yet. Is another run using the same store?"
            )
        self._sockets[key] = stranger.connection
        return True

    def _missing(self, ranks: Sequence[int]) -> PoolError:
        missing = ", ".join(f"{rank} ({self._labels[rank]})" for rank in ranks)
        return PoolError(
            f"{self._who(self._rank)} waited {self._timeout:g} s for these ranks to start, in vain: {missing}. "
            "Did they meet an error? See their output."
        )

    def _who(self, rank: int) -> str:
        return f"Rank {rank} ({self._labels[rank]})"


def _host_key(rank: int) -> str:
    return f"mesh/host/{rank}"


def _prepare(connection: socket.socket) -> None:
    """Send at once, never wait, and notice when the other host is gone though nothing is sent."""
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 2)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 9)  # later than where pages come
    _inheritable.add(connection)
