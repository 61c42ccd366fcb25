"""Connects a rank with all others at start, when they have nothing but a store in common.

Ranks of one host connect over unix sockets and exchange descriptors of shared memory; ranks of different hosts connect
over ZeroMQ. The unix sockets have names in the abstract namespace: they are no files, and end with their processes.
Such a name can be seen by all users of the host, therefore both sides ask the kernel whose process the other one is.
"""

from __future__ import annotations

import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch.distributed import DistError  # type: ignore[attr-defined]

from flowtrain_lightning.pool.between_hosts.connections import RemoteConnections
from flowtrain_lightning.pool.between_hosts.remote_rendezvous import RemoteRendezvous
from flowtrain_lightning.pool.control_records import RECORD_BYTES, ControlRecord, Kind, decode_record, encode_record
from flowtrain_lightning.pool.pool_errors import PeerFailed, PoolError
from flowtrain_lightning.pool.socket_stream import close_descriptors, receive_bytes, send_bytes

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

_CREDENTIALS = struct.Struct("iII")  # pid, uid, gid
_LOOK_SECONDS = 0.02  # how often the store is asked for a name that it does not know yet


@dataclass(frozen=True)
class LocalConnection:
    """A connected rank of this host.

    Attributes:
        socket: non-blocking; a stream of records, so that one call reads all that have arrived.
        process: ``pidfd`` of the peer.
        page: descriptor of the peer's status page and inbox.
        wake_event: ``eventfd`` that wakes the peer.
    """

    socket: socket.socket
    process: int
    page: int
    wake_event: int

    def close(self) -> None:
        """Let go of socket and descriptors."""
        self.socket.close()
        close_descriptors((self.process, self.page, self.wake_event))


@dataclass(frozen=True)
class RankConnections:
    """Connections to all other ranks.

    Attributes:
        local: those that share this rank's location.
        remote: all others, if there are any.
        locations: of every rank; empty where all run here.
    """

    local: dict[int, LocalConnection] = field(default_factory=dict)
    remote: RemoteConnections | None = None
    locations: tuple[str, ...] = ()


def connect_ranks(
    store: Store,
    rank: int,
    labels: Sequence[str],
    page: int,
    wake_event: int,
    timeout: float,
    address: str | None = None,
    location: str | None = None,
    secret: str | None = None,
) -> RankConnections:
    """Connect with all other ranks, each of which calls it once; see `Mesh.connect`.

    Args:
        store: where the ranks tell each other how they are reached.
        rank: the calling rank.
        labels: one per rank, for messages.
        page: descriptor of the calling rank's status page and inbox.
        wake_event: ``eventfd`` that wakes the calling rank.
        timeout: seconds for all of it.
        address: IP address of the calling rank, or None when all run on this host.
        location: equal on ranks that share memory; None finds out.
        secret: of the job, by which ranks of different hosts know each other.

    Raises:
        PeerFailed: when a peer ends meanwhile.
        PoolError: when a peer does not come in time, or belongs to another user, or the store ends.
    """
    others = {peer for peer in range(len(labels)) if peer != rank}
    rendezvous = LocalRendezvous(store, rank, labels, (page, wake_event), timeout)
    if address is None:
        return RankConnections(rendezvous.connect(others))
    if secret is None:
        raise PoolError("An address was given but no secret; ranks of several hosts need one to know each other by.")
    remote = RemoteRendezvous(store, rank, labels, address, location, timeout, secret)
    try:
        local = rendezvous.connect(others - remote.peers)
        try:
            connected = remote.connect({connection.socket.fileno(): peer for peer, connection in local.items()})
        except BaseException:
            for connection in local.values():
                connection.close()
            raise
    finally:
        remote.close()
    return RankConnections(local, connected, remote.locations)


class _NoRank(Exception):
    """Whoever has connected says nothing that a rank says."""


class LocalRendezvous:
    """Connects ranks of one host; used once, at start.

    Args:
        store: where the ranks tell each other the names of their sockets.
        rank: the calling rank.
        labels: one per rank, for messages.
        descriptors: what every peer gets: of the status page and inbox, and of the wake event.
        timeout: seconds for all of it, from now on.
    """

    def __init__(
        self, store: Store, rank: int, labels: Sequence[str], descriptors: tuple[int, int], timeout: float
    ) -> None:
        self._store = store
        self._rank = rank
        self._labels = labels
        self._own = descriptors
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout
        self._peers: list[int] = []
        self._sockets: dict[int, socket.socket] = {}
        self._passed: dict[int, tuple[int, ...]] = {}  # page and wake event of each peer

    def connect(self, peers: Collection[int]) -> dict[int, LocalConnection]:
        """Connect to the peers below this rank, and wait for those above."""
        self._peers = sorted(peers)
        if not peers:
            return {}
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            name = f"flowtrain-{secrets.token_hex(16)}"
            listener.bind(f"\0{name}")
            listener.listen(len(self._labels))
            try:
                self._tell_name(name)
                for peer in self._peers:
                    if peer < self._rank:
                        self._connect(peer)
                self._exchange_hellos(listener)
                return {peer: self._connection(peer) for peer in sorted(self._sockets)}
            except BaseException:
                for connection in self._sockets.values():
                    connection.close()
                for descriptors in self._passed.values():
                    close_descriptors(descriptors)
                raise

    def _exchange_hellos(self, listener: socket.socket) -> None:
        """Hear from the ranks below, let in those above, and notice when any of them ends meanwhile."""
        poll = select.poll()
        poll.register(listener, select.POLLIN)
        peers = {connection.fileno(): peer for peer, connection in self._sockets.items()}
        strangers: dict[int, socket.socket] = {}  # have connected, and have not said yet who they are
        for descriptor in peers:
            poll.register(descriptor, select.POLLIN)
        try:
            while len(self._passed) < len(self._peers):
                for descriptor, _ in poll.poll(self._remaining() * 1000):
                    if descriptor == listener.fileno():
                        stranger = self._accept(listener)
                        if stranger is not None:
                            strangers[stranger.fileno()] = stranger
                            poll.register(stranger, select.POLLIN)
                        continue
                    if descriptor in strangers:
                        peer = self._meet(strangers.pop(descriptor))
                        if peer is None:
                            poll.unregister(descriptor)
                            continue
                        peers[descriptor] = peer
                    elif peers[descriptor] in self._passed:
                        raise self._ended(peers[descriptor])
                    else:
                        peer = peers[descriptor]
                        self._passed[peer] = self._hello(self._sockets[peer], peer)[1]
                    poll.register(descriptor, 0)  # from now on tell of its end only; what it sends is for later
        finally:
            for stranger in strangers.values():
                stranger.close()

    def _connect(self, peer: int) -> None:
        name = self._name_of(peer)
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._sockets[peer] = connection
        try:
            connection.connect(f"\0{name}")
        except OSError as error:
            raise self._ended(peer) from error
        if _credentials(connection)[1] != os.geteuid():
            raise PoolError(f"Rank {peer} ({self._labels[peer]}) runs as another user; start all ranks as one user.")
        self._say_hello(connection)

    def _tell_name(self, name: str) -> None:
        try:
            self._store.set(f"mesh/{self._rank}", name)
        except DistError as error:
            raise self._without_store() from error

    def _name_of(self, peer: int) -> str:
        """The name that ``peer`` gives to its socket; also notices when a connected rank ends meanwhile."""
        connected = {connection.fileno(): rank for rank, connection in self._sockets.items()}
        poll = select.poll()
        for descriptor in connected:
            poll.register(descriptor, 0)
        key = f"mesh/{peer}"
        try:
            while not self._store.check([key]):
                for descriptor, _ in poll.poll(min(self._remaining(), _LOOK_SECONDS) * 1000):
                    raise self._ended(connected[descriptor])
            return str(self._store.get(key).decode())
        except DistError as error:  # from the store itself; one that does not believe a value says so by another
            raise self._without_store() from error

    def _accept(self, listener: socket.socket) -> socket.socket | None:
        connection, _ = listener.accept()
        if _credentials(connection)[1] != os.geteuid():
            connection.close()  # another user's: no business of ours, and no reason to end the job
            return None
        return connection

    def _meet(self, connection: socket.socket) -> int | None:
        """The rank that speaks here; None, and the connection closed, where it is no rank."""
        try:
            peer, descriptors = self._hello(connection, None)
        except _NoRank:
            connection.close()
            return None
        except BaseException:
            connection.close()
            raise
        self._sockets[peer] = connection
        self._passed[peer] = descriptors
        self._say_hello(connection)
        return peer

    def _say_hello(self, connection: socket.socket) -> None:
        record = ControlRecord(Kind.HELLO, self._rank, number=len(self._labels))
        with suppress(BrokenPipeError, ConnectionResetError):  # it has ended; reading its answer will say so
            send_bytes(connection, encode_record(record), self._own)

    def _hello(self, connection: socket.socket, peer: int | None) -> tuple[int, tuple[int, ...]]:
        connection.settimeout(self._remaining())
        try:
            message, descriptors = receive_bytes(connection, RECORD_BYTES)
        except TimeoutError:
            raise self._missing() from None
        except ConnectionResetError:
            message, descriptors = b"", ()
        if not message:
            raise self._ended(peer)
        try:
            record = decode_record(message, peer)
        except PoolError as error:
            close_descriptors(descriptors)
            if peer is None:
                raise _NoRank from error
            raise
        is_expected = peer is not None or (record.sender in self._peers and record.sender not in self._sockets)
        is_hello = record.kind is Kind.HELLO and record.number == len(self._labels)
        if not is_expected or not is_hello or len(descriptors) != len(self._own):
            close_descriptors(descriptors)
            raise PoolError(
                f"A process introduced itself as rank {record.sender} of {record.number}; expected one of "
                f"{len(self._labels)} ranks that has not come yet. Is another run using the same store?"
            )
        return record.sender, descriptors

    def _connection(self, peer: int) -> LocalConnection:
        connection = self._sockets[peer]
        pid = _credentials(connection)[0]
        try:
            process = os.pidfd_open(pid)
        except OSError as error:
            raise self._ended(peer) from error
        connection.setblocking(False)
        return LocalConnection(connection, process, *self._passed[peer])

    def _remaining(self) -> float:
        remaining = self._deadline - time.monotonic()
        if remaining <= 0:
            raise self._missing()
        return remaining

    def _missing(self) -> PoolError:
        unheard = [rank for rank in self._peers if rank not in self._passed]
        try:
            absent = [rank for rank in unheard if not self._store.check([f"mesh/{rank}"])]
        except DistError:
            return self._without_store()
        missing = [f"{rank} ({self._labels[rank]})" for rank in absent or unheard]
        return PoolError(
            f"Rank {self._rank} ({self._labels[self._rank]}) waited {self._timeout:g} s for these ranks to start, in "
            f"vain: {', '.join(missing)}. Did they meet an error? See their output."
        )

    def _without_store(self) -> PoolError:
        return PoolError(
            f"Rank {self._rank} ({self._labels[self._rank]}) lost the store through which the ranks find each other "
            "before it had found all of them. Did the rank that keeps it, rank 0 as a rule, meet an error? See its "
            "output."
        )

    def _ended(self, peer: int | None) -> PeerFailed:
        who = "A rank" if peer is None else f"Rank {peer} ({self._labels[peer]})"
        return PeerFailed(f"{who} ended during start-up. See its output.", peer)


def _credentials(connection: socket.socket) -> tuple[int, int, int]:
    pid, uid, gid = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid, gid
