"""Every process of a machine connected with every other one: control records, and who is still there."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from flowtrain_lightning.pool.errors import PeerFailed, PoolError
from flowtrain_lightning.pool.faults import fault_sentence, find_fault
from flowtrain_lightning.pool.inbox import ORDERED_STORES, Inbox, Slot, inbox_bytes
from flowtrain_lightning.pool.liveness import PAGE_BYTES, State, StatusBoard, StatusPage
from flowtrain_lightning.pool.record import Kind, Numbered, Record, encode_record
from flowtrain_lightning.pool.sockets import Connection, Rendezvous, Store
from flowtrain_lightning.pool.stream import Stream

_LOOK_SECONDS = 0.25  # how often a rank reads the others' pages, and its sockets though its inbox is never empty
_PAGE_SECONDS = 0.2  # how long a closed connection waits for its process to be gone or to say why
_GOODBYE_SECONDS = 2.0  # how long closing waits for peers to read what is still queued
_READABLE = select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR


class Mesh:
    """Connections to all other ranks of the machine. Used by one thread; only `abort` may be called by others.

    Small records go through the peer's inbox, all others, and those that find no place there, through its socket. A
    record's place among all that one rank has sent to another puts the two ways in order again.

    Build it with `Mesh.connect`.

    Attributes:
        rank: the calling rank.
        ranks: how many there are.
        labels: one per rank, for messages.
        page: the calling rank's status page.
        board: the pages of all ranks.
        links: how many links were made on it.
        early: records of links that are still to be made here.
    """

    def __init__(
        self, rank: int, labels: Sequence[str], page: StatusPage, bell: int, connections: dict[int, Connection]
    ) -> None:
        self.rank = rank
        self.ranks = len(labels)
        self.labels = tuple(labels)
        self.page = page
        self._inbox = Inbox(page.memory, PAGE_BYTES, self.ranks)
        self._slots: dict[int, Slot] = {}
        pages: list[StatusPage] = []
        for peer in range(self.ranks):
            connection = connections.get(peer)
            if connection is None:
                pages.append(page)
                continue
            pages.append(StatusPage.attach(peer, connection.page, inbox_bytes(self.ranks)))
            self._slots[peer] = Slot(pages[peer].memory, PAGE_BYTES, self.ranks, rank, connection.bell)
        processes = [connections[peer].process if peer in connections else None for peer in range(self.ranks)]
        self.board = StatusBoard(pages, processes)
        self._streams = {peer: Stream(connection.socket, peer) for peer, connection in connections.items()}
        self._sent = [0] * self.ranks
        self._received = [0] * self.ranks
        self._held: dict[int, dict[int, Record]] = {}  # peer -> place -> what came before its turn, by the other way
        self._blocked: set[int] = set()  # peers whose socket was full
        self._fault: tuple[str, int | None] | None = None
        self._next_look = 0.0
        self.links = 0
        self.early: list[Record] = []
        self._bell = bell
        self._bell_lock = threading.Lock()
        self._epoll = select.epoll()
        self._epoll.register(bell, select.EPOLLIN)
        self._stream_of = {stream.descriptor: stream for stream in self._streams.values()}
        self._process_of = {connection.process: peer for peer, connection in connections.items()}
        for descriptor in (*self._stream_of, *self._process_of):
            self._epoll.register(descriptor, select.EPOLLIN)

    @classmethod
    def connect(cls, store: Store, rank: int, ranks: int, labels: Sequence[str], timeout: float = 60.0) -> Mesh:
        """Meet the other ranks. Every rank calls it once; with one rank the store is not used.

        Args:
            store: a ``torch.distributed`` store with keys of this mesh alone (a ``PrefixStore``).
            rank: the calling rank.
            ranks: how many there are.
            labels: what each rank is, for messages: for example ``"backbone 0"``.
            timeout: seconds until all must have come.

        Raises:
            PeerFailed: when a peer ends meanwhile.
            PoolError: when a peer does not come in time, or belongs to another user.
        """
        if not 0 <= rank < ranks or len(labels) != ranks:
            raise PoolError(f"Rank {rank} of {ranks} with {len(labels)} labels was given; expected one label per rank.")
        page, descriptor = StatusPage.create(rank, labels[rank], inbox_bytes(ranks))
        bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        try:
            connections = Rendezvous(store, rank, labels, descriptor, bell, timeout).meet() if ranks > 1 else {}
        except BaseException:
            os.close(bell)
            raise
        finally:
            os.close(descriptor)
        return cls(rank, labels, page, bell, connections)

    def send(self, peer: int, record: Record) -> None:
        """Send a record, or queue it where the peer has too much to read already. Never waits.

        The queue is as long as the caller makes it: the pool's entries, and so its room, bound what it sends.

        Raises:
            PoolError: when the peer has left in good order.
        """
        stream = self._streams.get(peer)
        if stream is None:
            raise PoolError(f"Rank {peer} ({self.labels[peer]}) has left; nothing can be sent to it any more.")
        self._sent[peer] += 1
        message = encode_record(record, self._sent[peer])
        small = ORDERED_STORES and not record.payload and not record.descriptors
        if small and not stream.queued and self._slots[peer].put(message):
            return
        stream.send(message, record.descriptors)
        if stream.queued:
            self._watch(stream)

    def receive(self, timeout: float = 0.0) -> list[Record]:
        """What has arrived; waits up to ``timeout`` seconds for something.

        Raises:
            PeerFailed: when a peer died or failed, or `abort` was called. From then on at every call.
            PoolError: when a peer sent what is no valid record.
        """
        if self._fault is not None:
            self._raise_fault()
        now = time.monotonic()
        if now < self._next_look:
            records = self._in_order(self._inbox.take())
            if records:
                return records
        deadline = now + timeout
        while True:
            if now >= self._next_look:
                self._next_look = now + _LOOK_SECONDS
                self._look()
            records = self._read(max(min(deadline - now, _LOOK_SECONDS), 0.0))
            if records or not timeout:
                return records
            now = time.monotonic()
            if now >= deadline:
                return records

    def has_left(self, peer: int) -> bool:
        """Whether ``peer`` has left in good order."""
        return peer != self.rank and peer not in self._streams

    def abort(self, sentence: str, rank: int | None = None) -> None:
        """Make `receive` raise `PeerFailed`, now and from now on. Safe to call from any thread.

        Args:
            sentence: the error's text.
            rank: who is to blame.
        """
        with self._bell_lock:
            if self._fault is None:
                self._fault = (sentence, rank)
            if self._bell >= 0:
                os.eventfd_write(self._bell, 1)

    def close(self, goodbye: bool = True) -> None:
        """Leave. A second call does nothing.

        Args:
            goodbye: tell the others that this is no death, after what is still queued for them. Without it they
                take the end of this process for a fault; so they do when this rank failed or knows of a fault.
        """
        if self._epoll.closed:
            return
        if goodbye and self._fault is None and self.page.state is not State.FAILED:
            self.page.finish()
            for peer, stream in self._streams.items():
                self._sent[peer] += 1
                stream.send(encode_record(Record(Kind.GOODBYE, self.rank), self._sent[peer]))
                if stream.queued:
                    self._watch(stream)
            deadline = time.monotonic() + _GOODBYE_SECONDS
            with suppress(PoolError):  # whoever fails now is no concern of a rank that has done its work
                while any(stream.queued for stream in self._streams.values()) and time.monotonic() < deadline:
                    self._read(0.05)
        self._epoll.close()
        for peer, stream in self._streams.items():
            stream.close()
            self._slots[peer].close()
        with self._bell_lock:
            os.close(self._bell)
            self._bell = -1
        for record in self.early:
            for descriptor in record.descriptors:
                os.close(descriptor)
        self.early.clear()
        self.board.close()

    def _read(self, timeout: float) -> list[Record]:
        """What inbox and sockets hold; waits up to ``timeout`` seconds until one of them holds something."""
        records: list[Record] = []
        if timeout > 0:
            self._inbox.fall_asleep()
            records = self._in_order(self._inbox.take())
        events = self._epoll.poll(0 if records else timeout)
        if timeout > 0:
            self._inbox.wake_up()
        for descriptor, event in events:
            stream = self._stream_of.get(descriptor)
            if stream is not None:
                if event & select.EPOLLOUT:
                    stream.flush()
                    self._watch(stream)
                if event & _READABLE:
                    self._read_stream(stream, records)
            elif descriptor == self._bell:
                os.eventfd_read(descriptor)
                self._raise_fault()
            elif descriptor in self._process_of:  # else its peer has left earlier in this round
                self._ended(descriptor)
        records += self._in_order(self._inbox.take())
        return records

    def _read_stream(self, stream: Stream, records: list[Record]) -> None:
        found = stream.read()
        if found is not None:
            records += self._in_order(found)
            return
        if self.board.pages[stream.peer].state is not State.FINISHED:
            self._blame(stream.peer)
        records += self._in_order(self._inbox.take())
        self._forget(stream.peer)

    def _in_order(self, found: list[Numbered]) -> list[Record]:
        """The records whose turn it is, of those that came by one way and of those that were held back before."""
        records: list[Record] = []
        for place, record in found:
            peer = record.sender
            turn = self._received[peer] + 1
            if place < turn or peer not in self._streams:
                raise PoolError(f"A control record from rank {peer} was refused: it came twice, or after a goodbye.")
            if place > turn:
                self._held.setdefault(peer, {})[place] = record
                continue
            self._received[peer] = turn
            if record.kind is Kind.GOODBYE:
                self._forget(peer)
                continue
            records.append(record)
            if peer in self._held:
                waiting = self._held.pop(peer)
                records += self._in_order(sorted(waiting.items()))
        return records

    def _watch(self, stream: Stream) -> None:
        """Be told when a peer whose socket was full takes more."""
        if stream.queued == (stream.peer in self._blocked):
            return
        self._blocked ^= {stream.peer}
        self._epoll.modify(stream.descriptor, select.EPOLLIN | (select.EPOLLOUT if stream.queued else 0))

    def _look(self) -> None:
        """Read the others' pages: a peer that failed may not have closed its connection yet."""
        for peer in self._streams:
            if self.board.pages[peer].state is State.FAILED:
                self._blame(peer)

    def _ended(self, process: int) -> None:
        """A peer's process is gone. Its connection may not tell so, when children of it have inherited that."""
        peer = self._process_of.pop(process)
        self._epoll.unregister(process)
        if peer in self._streams and self.board.pages[peer].state is not State.FINISHED:
            self._blame(peer)  # else what it sent before it left is still to be read

    def _blame(self, peer: int) -> None:
        deadline = time.monotonic() + _PAGE_SECONDS
        found = find_fault(self.board, self.rank)
        while found is None and time.monotonic() < deadline:
            time.sleep(0.01)
            found = find_fault(self.board, self.rank)
        blamed, sentence = found or (peer, fault_sentence(self.board[peer], "closed its connection without a goodbye"))
        self.page.blame(blamed)
        self.abort(sentence, blamed)
        self._raise_fault()

    def _raise_fault(self) -> None:
        if self._fault is not None:
            raise PeerFailed(*self._fault)

    def _forget(self, peer: int) -> None:
        """``peer`` has left in good order."""
        stream = self._streams.pop(peer)
        del self._stream_of[stream.descriptor]
        self._epoll.unregister(stream.descriptor)
        self._blocked.discard(peer)
        self._held.pop(peer, None)
        stream.close()
        self._slots.pop(peer).close()
