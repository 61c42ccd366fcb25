"""Connects ranks of different hosts over ZeroMQ, three connections for each two of them, before any of them sends.

Control records, status pages and the bytes of entries have a connection each: a large entry on its way over a slow
network then delays no heartbeat.
"""

from __future__ import annotations

import resource
import select
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import zmq
from torch.distributed import DistError  # type: ignore[attr-defined]

from flowtrain_lightning.pool.between_hosts.connections import (
    ConnectionEvents,
    Listener,
    RemoteConnections,
    close_sockets,
    identity,
)
from flowtrain_lightning.pool.between_hosts.curve import admit, curve_key
from flowtrain_lightning.pool.between_hosts.hosts_thread import UNREACHABLE_SECONDS
from flowtrain_lightning.pool.between_hosts.location import own_location
from flowtrain_lightning.pool.between_hosts.peer_messages import MAX_MESSAGE_BYTES, Purpose
from flowtrain_lightning.pool.control_records import ControlRecord, Kind, decode_record, encode_record
from flowtrain_lightning.pool.pool_errors import PeerFailed, PoolError

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

_LOOK_SECONDS = 0.05
_HANDSHAKE_SECONDS = 10.0  # of one connection, after which a silent stranger is closed out
_NEVER_MILLISECONDS = 2**31 - 1  # 25 days
_WITH_LIMIT = (True, False)  # which listener: for pages, whose connections tell of a lost host, and for all others


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
        self._deadline = time.monotonic() + timeout
        self._keys = [curve_key(secret, peer, len(labels)) for peer in range(len(labels))]
        self._ends: dict[int, int] = {}
        self._heard: set[tuple[int, Purpose]] = set()
        self._early: list[list[zmq.Frame]] = []
        self._is_used = False
        try:
            self._listeners = tuple(Listener(address) for _ in _WITH_LIMIT)
        except OSError as error:
            raise PoolError(
                f"{self._who(rank)} cannot be reached at {address} ({error}); expected an IPv4 address of this host."
            ) from error
        self._limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (self._limits[1], self._limits[1]))  # a crowd of strangers may come
        self._router = self._make_router()
        self._events = ConnectionEvents.of(self._router)
        self._authenticator = admit(self._router, self._keys[rank], frozenset(key.public for key in self._keys))
        try:
            own = (location or own_location(), address, *(str(listener.port) for listener in self._listeners))
            store.set(_host_key(rank), "\n".join(own))
            hosts = [self._ask(_host_key(peer)).split("\n") for peer in range(len(labels))]
        except BaseException:
            self.close()
            raise
        self.locations = tuple(host[0] for host in hosts)
        self._endpoints = [[f"tcp://{host[1]}:{port}" for port in host[2:]] for host in hosts]
        self.peers = {peer for peer in range(len(labels)) if self.locations[peer] != self.locations[rank]}

    def connect(self, watched: dict[int, int]) -> RemoteConnections | None:
        """Connect to the peers below this rank, and wait for those above.

        Args:
            watched: descriptors that tell of the end of ranks which are connected already, and these ranks.

        Returns:
            The connections; None where no rank runs elsewhere.

        Raises:
            PeerFailed: when a peer ends meanwhile.
            PoolError: when a peer does not come in time.
        """
        if not self.peers:
            return None
        for listener, with_limit in zip(self._listeners, _WITH_LIMIT, strict=True):
            _limit(self._router, with_limit)
            listener.bind(self._router)  # not before: each stranger who is let in takes a descriptor
        for peer in sorted(self.peers):
            if peer < self._rank:
                self._connect(peer)
        self._meet_all(watched)
        for listener in self._listeners:
            listener.shut()
        self._is_used = True
        return RemoteConnections(self._rank, self._router, self._events, self._listeners, self._ends, self._early)

    def close(self) -> None:
        """Admit nobody any more, and close what nobody uses."""
        self._authenticator.stop()
        resource.setrlimit(resource.RLIMIT_NOFILE, self._limits)
        if not self._is_used:
            close_sockets(self._router, self._events, self._listeners)

    def _make_router(self) -> zmq.Socket[bytes]:
        router: zmq.Socket[bytes] = zmq.Context().socket(zmq.ROUTER)
        options = {
            zmq.ROUTER_MANDATORY: 1,  # an error where a connection has ended
            zmq.MAXMSGSIZE: MAX_MESSAGE_BYTES,
            zmq.HANDSHAKE_IVL: int(_HANDSHAKE_SECONDS * 1000),
            # What was on its way would be lost, so a connection that ends is the end. To forbid it altogether (-1)
            # would let ZeroMQ wait for ever when both ends close at once.
            zmq.RECONNECT_IVL: _NEVER_MILLISECONDS,
            zmq.TCP_KEEPALIVE: 1,
            zmq.TCP_KEEPALIVE_IDLE: 2,
            zmq.TCP_KEEPALIVE_INTVL: 2,
            zmq.TCP_KEEPALIVE_CNT: 9,  # later than where pages come
        }
        for option, value in options.items():
            router.setsockopt(option, value)
        return router

    def _ask(self, key: str) -> str:
        """Reads what another rank has left in the store, or will."""
        try:
            while not self._store.check([key]):
                if time.monotonic() >= self._deadline:
                    ranks = range(len(self._labels))
                    raise self._missing([rank for rank in ranks if not self._store.check([_host_key(rank)])])
                time.sleep(_LOOK_SECONDS)
            return str(self._store.get(key).decode())
        except DistError as error:  # from the store itself; one that does not believe a value says so by another
            raise PoolError(
                f"{self._who(self._rank)} lost the store through which the ranks find each other. Did the rank that "
                "keeps it, rank 0 as a rule, meet an error? See its output."
            ) from error

    def _connect(self, peer: int) -> None:
        """Begin to connect to ``peer``, and send it the first word on each connection."""
        router = self._router
        router.curve_server = False
        router.setsockopt(zmq.HANDSHAKE_IVL, 0)  # the peer may have a crowd of strangers to answer first
        router.curve_publickey, router.curve_secretkey = self._keys[self._rank]
        router.curve_serverkey = self._keys[peer].public
        for purpose in Purpose:
            is_limited = purpose is Purpose.PAGES
            _limit(router, is_limited)
            router.setsockopt(zmq.ROUTING_ID, identity(self._rank, purpose))
            router.setsockopt(zmq.CONNECT_ROUTING_ID, identity(peer, purpose))
            router.connect(self._endpoints[peer][_WITH_LIMIT.index(is_limited)])
            self._say_hello(identity(peer, purpose))

    def _say_hello(self, name: bytes) -> None:
        record = ControlRecord(Kind.HELLO, self._rank, number=len(self._labels))
        try:
            self._router.send_multipart([name, encode_record(record)])
        except zmq.ZMQError as error:  # its connection has ended
            raise self._ended(int(name.decode().partition("/")[0])) from error

    def _meet_all(self, watched: dict[int, int]) -> None:
        """Hear from all peers on all connections, and notice when a rank ends meanwhile."""
        expected = {(peer, purpose) for peer in self.peers for purpose in Purpose}
        remote, local = zmq.Poller(), select.poll()
        for each in (self._router, self._events.socket):
            remote.register(each, zmq.POLLIN)
        for descriptor in watched:
            local.register(descriptor, select.POLLRDHUP)
        while self._heard != expected:
            if time.monotonic() >= self._deadline:
                raise self._missing(sorted({peer for peer, _ in expected - self._heard}))
            for descriptor, _ in local.poll(0):
                raise self._ended(watched[descriptor])
            if self._router in dict(remote.poll(round(_LOOK_SECONDS * 1000))):
                self._hear()
            self._notice_ends()

    def _hear(self) -> None:
        """Take in the first word of a connection, and answer it if the other end has begun; keep what comes later.

        Raises:
            PoolError: it belongs to the job, but is not one of those that are to come.
        """
        whole = self._router.recv_multipart(copy=False)
        name, message = whole[:2]
        rank, _, purpose = name.bytes.decode().partition("/")
        peer, end = int(rank), (int(rank), Purpose(purpose))
        if end in self._heard:
            self._early.append(whole)
            return
        record = decode_record(message.bytes, peer)
        if peer not in self.peers or record.kind is not Kind.HELLO:
            raise PoolError(
                f"A process introduced itself as rank {peer} of {record.number}; expected one of {len(self._labels)} "
                "ranks that has not come yet. Is another run using the same store?"
            )
        self._heard.add(end)
        self._find_end(int(message.get(zmq.SRCFD)), peer)
        if peer > self._rank:
            self._say_hello(name.bytes)

    def _find_end(self, descriptor: int, peer: int) -> None:
        """Learn that the connection which has this descriptor now is one of ``peer``.

        A number alone says nothing: that of a stranger who has gone may be a peer's by now, while his end is still to
        be read. All that happened before the peer's word came can be read by now, and is read first. Should the peer
        have ended meanwhile and its number be a stranger's by now, then the stranger's end, in a few seconds, tells so.
        """
        self._notice_ends()
        former = self._ends.get(descriptor)
        if former is not None:
            raise self._ended(former)
        if descriptor not in self._events.open:
            raise self._ended(peer)
        self._ends[descriptor] = peer

    def _notice_ends(self) -> None:
        for event in self._events.take():
            if event.kind == zmq.EVENT_DISCONNECTED and event.descriptor in self._ends:
                raise self._ended(self._ends[event.descriptor])
            endpoint, below = event.endpoint, (peer for peer in self.peers if peer < self._rank)
            peer = next((peer for peer in below if endpoint in self._endpoints[peer]), None)
            if peer is None:
                continue  # of a stranger: no business of ours, and no reason to end the job
            if event.kind == zmq.EVENT_CLOSED:
                raise PeerFailed(
                    f"{self._who(peer)} ended during start-up, or cannot be reached at {endpoint}. See its output. If "
                    "there is none: does a firewall stand between the hosts, or is it the address of another network?",
                    peer,
                )
            if event.kind == zmq.EVENT_DISCONNECTED:
                raise PeerFailed(
                    f"{self._who(peer)} did not answer at {endpoint} during start-up as one that knows this job's "
                    "secret does. See its output.",
                    peer,
                )

    def _ended(self, peer: int) -> PeerFailed:
        return PeerFailed(f"{self._who(peer)} ended during start-up. See its output.", peer)

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


def _limit(router: zmq.Socket[bytes], is_limited: bool) -> None:
    """Whether connections that are made from now on end when the other host has not confirmed anything for a while."""
    router.setsockopt(zmq.TCP_MAXRT, int(UNREACHABLE_SECONDS * 1000) if is_limited else 0)
