"""Every rank connected with every other one: control records, entries of other hosts, and who is still there."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from flowtrain_lightning.pool.between_hosts.network import RemoteHosts
from flowtrain_lightning.pool.control_records import (
    ORDERED_STORES,
    ControlRecord,
    Inbox,
    InboxWriter,
    Kind,
    encode_record,
    inbox_bytes,
)
from flowtrain_lightning.pool.pool_errors import PoolError
from flowtrain_lightning.pool.rendezvous import RankConnections, connect_ranks
from flowtrain_lightning.pool.socket_stream import SocketStream, close_descriptors
from flowtrain_lightning.pool.status_board import StatusBoard, WakeEvent, blame_fault
from flowtrain_lightning.pool.status_page import PAGE_BYTES, State, StatusPage

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

_LOOK_SECONDS = 0.25  # how often a rank reads the others' pages, and its sockets though its inbox is never empty
_PAGE_SECONDS = 0.2  # how long a closed connection waits for its process to be gone or to say why
_REMOTE_PAGE_SECONDS = 1.0  # how long where it, or who is to blame, runs on another host
_GOODBYE_SECONDS = 2.0  # how long closing waits for peers to read what is still queued
_LAST_WORD_SECONDS = 0.3  # how long a rank that knows of a fault waits for other hosts to learn of it
_NOTHING_MORE = 1 << 64  # above all sequence numbers


class Mesh:
    """Connections to all other ranks. Used by one thread; only `abort` may be called by others.

    Small records to a rank of this host go through its inbox; others, and those for which the inbox is full, through
    its socket; those to ranks of other hosts over the network. Each record has a sequence number, which puts the ways
    in order again.

    Build it with `Mesh.connect`.

    Attributes:
        rank: the calling rank.
        ranks: how many there are.
        labels: one per rank, for messages.
        page: the calling rank's status page.
        board: the pages of all ranks.
        locations: where each rank runs, equal on ranks that share memory.
        remote: the ranks of other hosts.
        peers: all other ranks but those that have left in good order.
        link: number of the link whose records are received; see `begin_link`.
    """

    def __init__(
        self, rank: int, labels: Sequence[str], page: StatusPage, wake_event: int, connections: RankConnections
    ) -> None:
        self.rank = rank
        self.ranks = len(labels)
        self.labels = tuple(labels)
        self.page = page
        self.locations = connections.locations or ("here",) * self.ranks
        self.link = 0
        self._wake = WakeEvent(wake_event)
        self.remote = RemoteHosts(page, labels, connections.remote, self._wake.set, self._wake.abort)
        pages: dict[int, StatusPage] = {rank: page, **self.remote.pages}
        processes = {peer: remote.ended for peer, remote in self.remote.pages.items()}
        sockets = {}
        self._inbox = Inbox(page.memory, PAGE_BYTES, self.ranks)
        self._writers: dict[int, InboxWriter] = {}
        for peer, connection in connections.local.items():
            pages[peer] = StatusPage.attach(peer, connection.page, inbox_bytes(self.ranks))
            processes[peer] = connection.process
            sockets[peer] = connection.socket
            if ORDERED_STORES:
                memory = pages[peer].memory
                self._writers[peer] = InboxWriter(memory, PAGE_BYTES, self.ranks, rank, connection.wake_event)
            else:
                os.close(connection.wake_event)
        everyone = range(self.ranks)
        self.board = StatusBoard([pages[each] for each in everyone], [processes.get(each) for each in everyone])
        self.peers = {*sockets, *self.remote.pages}
        self._streams = {peer: SocketStream(connection, peer) for peer, connection in sorted(sockets.items())}
        self._stream_of = {stream.descriptor: stream for stream in self._streams.values()}
        self._process_of = {process: peer for peer, process in processes.items()}
        self._epoll = select.epoll()
        for descriptor in (wake_event, *self._stream_of, *self._process_of):
            self._epoll.register(descriptor, select.EPOLLIN)
        self._sent = [0] * self.ranks  # sequence number of the last record to each peer
        self._received = [0] * self.ranks
        self._held: dict[
            tuple[int, int], ControlRecord
        ] = {}  # by sender and sequence number: came before those it follows
        self._early: list[ControlRecord] = []  # of links that are still to begin here
        self._ready: list[ControlRecord] = []  # of this link, which came before it began
        self._next_look = 0.0

    @classmethod
    def connect(
        cls,
        store: Store,
        rank: int,
        ranks: int,
        labels: Sequence[str],
        timeout: float = 60.0,
        address: str | None = None,
        location: str | None = None,
        secret: str | None = None,
    ) -> Mesh:
        """Connect with the other ranks. Every rank calls it once.

        Args:
            store: a ``torch.distributed`` store with keys of this mesh alone (a ``PrefixStore``); not used by one rank.
            rank: the calling rank.
            ranks: how many there are.
            labels: what each rank is, for messages: for example ``"backbone 0"``.
            timeout: seconds until all must have come.
            address: IP address at which ranks of other hosts reach this one (see `address_towards`); None on all ranks
                where they run on one host, which then opens no port.
            location: equal on ranks that share memory; None finds out. To force another one is for tests.
            secret: that all ranks know and nobody else; where there is an address, they know each other by it.

        Raises:
            PeerFailed: when a peer ends meanwhile.
            PoolError: when a peer does not come in time, or belongs to another user.
        """
        if not 0 <= rank < ranks or len(labels) != ranks:
            raise PoolError(f"Rank {rank} of {ranks} with {len(labels)} labels was given; expected one label per rank.")
        page, descriptor = StatusPage.create(rank, labels[rank], inbox_bytes(ranks))
        wake_event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        try:
            connections = connect_ranks(store, rank, labels, descriptor, wake_event, timeout, address, location, secret)
        except BaseException:
            os.close(wake_event)
            raise
        finally:
            os.close(descriptor)
        return cls(rank, labels, page, wake_event, connections)

    def begin_link(self) -> int:
        """Begin the next link, of one pool say, and end the former one.

        Ranks do not begin a link at the same moment: records of a link that has not begun here yet are kept for it, and
        those of one that has ended are dropped.

        Returns:
            Its number, equal on all ranks, which its records carry.
        """
        self.link += 1
        waiting, self._ready, self._early = self._ready + self._early, [], []
        for record in waiting:
            self._sort(record, self._ready)
        return self.link

    def send(self, peer: int, record: ControlRecord) -> None:
        """Send a record, or queue it where the peer has too much to read already. Never waits.

        The queue is as long as the caller makes it: the pool's entries, and so its memory, bound what it sends.

        Raises:
            PoolError: when the peer has left in good order.
        """
        sequence = self._sent[peer] = self._sent[peer] + 1
        message = encode_record(record, sequence)
        writer = self._writers.get(peer)
        if writer is None or record.payload or record.descriptors or not writer.put(message):
            self._send_outside(peer, message, record.descriptors)

    def receive(self, timeout: float = 0.0) -> list[ControlRecord]:
        """Reads what has arrived for the present link; waits up to ``timeout`` seconds for something.

        Without a timeout it looks into the inbox, and into sockets only now and then, since that is a system call.

        Raises:
            PeerFailed: when a peer died or failed, or `abort` was called. From then on at every call.
            PoolError: when a peer sent what is no valid record.
        """
        if self._wake.fault is not None:
            self._wake.check()
        records, self._ready = self._ready, []
        now = time.monotonic()
        deadline = now + timeout
        if now < self._next_look:
            found = self._inbox.take()
            if found or self.remote.records or self.remote.arrived:
                self._accept(found, records)
            if timeout <= 0 and ORDERED_STORES:
                return records
        while not records:
            if now >= self._next_look:
                self._next_look = now + _LOOK_SECONDS
                self._look()
            self._read(max(min(deadline - now, _LOOK_SECONDS), 0.0), records)
            if self._wake.fault is not None:
                self._wake.check()
            now = time.monotonic()
            if now >= deadline:
                break
        return records

    def has_left(self, peer: int) -> bool:
        """Whether ``peer`` has left in good order."""
        return peer != self.rank and peer not in self.peers

    def abort(self, sentence: str, rank: int | None = None) -> None:
        """Make `receive` raise `PeerFailed` with this sentence, which blames ``rank``. Safe to call from any thread."""
        self._wake.abort(sentence, rank)

    def close(self, goodbye: bool = True) -> None:
        """Leave. A second call does nothing.

        Args:
            goodbye: tell the others that this is no death, after what is still queued for them. Without it they
                take the end of this process for a fault; so they do when this rank failed or knows of a fault.
        """
        if self._epoll.closed:
            return
        in_order = goodbye and self._wake.fault is None and self.page.state is not State.FAILED
        if in_order:
            self._say_goodbye()
        self.remote.close(_GOODBYE_SECONDS if in_order else _LAST_WORD_SECONDS)
        self._epoll.close()
        for stream in self._streams.values():
            stream.close()
        for writer in self._writers.values():
            writer.close()
        self._wake.close()
        for record in self._early + self._ready:
            close_descriptors(record.descriptors)
        self.board.close()

    def _say_goodbye(self) -> None:
        self.page.finish()
        for peer in sorted(self.peers):
            self._sent[peer] += 1
            self._send_outside(peer, encode_record(ControlRecord(Kind.GOODBYE, self.rank), self._sent[peer]), ())
        deadline = time.monotonic() + _GOODBYE_SECONDS
        with suppress(PoolError):  # whoever fails now is no concern of a rank that has done its work
            while any(stream.queued for stream in self._streams.values()) and time.monotonic() < deadline:
                self._read(0.05, [])

    def _send_outside(self, peer: int, message: bytes, descriptors: tuple[int, ...]) -> None:
        """Send past the inbox."""
        if peer not in self.peers:
            raise PoolError(f"Rank {peer} ({self.labels[peer]}) has left; nothing can be sent to it any more.")
        if peer in self.remote.pages:
            self.remote.send_record(peer, message)
            return
        self._streams[peer].send(message, descriptors)
        self._streams[peer].watch(self._epoll)

    def _read(self, timeout: float, records: list[ControlRecord]) -> None:
        """Add what inbox and sockets hold; waits up to ``timeout`` seconds until one of them holds something."""
        if timeout > 0:
            self._inbox.fall_asleep()
            self._accept(self._inbox.take(), records)
        events = self._epoll.poll(0 if records else timeout)
        if timeout > 0:
            self._inbox.wake_up()
        for descriptor, event in events:
            if descriptor == self._wake.descriptor:
                os.eventfd_read(descriptor)
            elif descriptor in self._stream_of:
                self._read_stream(self._stream_of[descriptor], event, records)
            elif descriptor in self._process_of:  # else its peer has left earlier in this round
                self._process_ended(descriptor)
        self._accept(self._inbox.take(), records)

    def _read_stream(self, stream: SocketStream, event: int, records: list[ControlRecord]) -> None:
        if event & select.EPOLLOUT:
            stream.flush()
            stream.watch(self._epoll)
        if not event & ~select.EPOLLOUT:
            return
        found = stream.read()
        if found is not None:
            self._accept(found, records)
            return
        if self.board.pages[stream.peer].state is not State.FINISHED:
            self._blame(stream.peer)
        self._accept(self._inbox.take(), records)
        if stream.peer in self.peers:  # its goodbye may have been held until now
            self._forget(stream.peer)

    def _accept(self, found: list[ControlRecord], records: list[ControlRecord]) -> None:
        """Add to ``records`` those whose turn it is: of ``found``, of those that came too early, and from other hosts.

        Raises:
            PoolError: when a record came twice, or after a goodbye.
        """
        while self.remote.records:
            found.append(self.remote.records.popleft())
        for record in found:
            sender, sequence = record.sender, record.sequence
            if sequence == self._received[sender] + 1:
                self._received[sender] = sequence
                if record.link == self.link and record.kind is not Kind.GOODBYE:
                    records.append(record)
                else:
                    self._sort(record, records)
                if self._held and (sender, sequence + 1) in self._held:
                    found.append(self._held.pop((sender, sequence + 1)))
            elif sequence > self._received[sender]:
                self._held[sender, sequence] = record
            else:
                raise PoolError(f"A control record from rank {sender} was refused: it came twice, or after a goodbye.")
        while self.remote.arrived:
            self._sort(self.remote.arrived.popleft(), records)

    def _sort(self, record: ControlRecord, records: list[ControlRecord]) -> None:
        """Add a record to ``records``, or do with it what its link or kind demands."""
        if record.kind is Kind.GOODBYE:
            self._forget(record.sender)
        elif record.link == self.link:
            records.append(record)
        elif record.link > self.link:
            self._early.append(record)
        else:
            close_descriptors(record.descriptors)

    def _look(self) -> None:
        """Read the others' pages: a peer that failed may not have closed its connection yet."""
        for peer in self.peers:
            if self.board.pages[peer].state is State.FAILED:
                self._blame(peer)

    def _process_ended(self, process: int) -> None:
        """A peer's process is gone. Its connection may not tell so, when children of it have inherited that."""
        peer = self._process_of.pop(process)
        self._epoll.unregister(process)
        if peer in self.peers and self.board.pages[peer].state is not State.FINISHED:
            self._blame(peer)  # else what it sent before it left is still to be read

    def _blame(self, peer: int) -> None:
        seconds = _REMOTE_PAGE_SECONDS if self.remote.pages else _PAGE_SECONDS
        blamed, sentence = blame_fault(self.board, self.rank, peer, seconds)
        self.remote.send_status(_LAST_WORD_SECONDS)  # before this process ends and its own end is taken for the fault
        self._wake.abort(sentence, blamed)
        self._wake.check()

    def _forget(self, peer: int) -> None:
        """``peer`` has left in good order; nothing more is to come from it."""
        self._received[peer] = _NOTHING_MORE
        self._held = {key: record for key, record in self._held.items() if key[0] != peer}
        self.peers.remove(peer)
        stream = self._streams.pop(peer, None)
        if stream is not None:
            del self._stream_of[stream.descriptor]
            self._epoll.unregister(stream.descriptor)
            stream.close()
        writer = self._writers.pop(peer, None)
        if writer is not None:
            writer.close()
