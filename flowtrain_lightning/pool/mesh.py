"""Every rank connected with every other one: control records, entries of other hosts, and who is still there."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Sequence
from contextlib import suppress

from flowtrain_lightning.pool.alarm import Alarm
from flowtrain_lightning.pool.between_hosts.elsewhere import Elsewhere
from flowtrain_lightning.pool.board import StatusBoard
from flowtrain_lightning.pool.errors import PoolError
from flowtrain_lightning.pool.faults import blame_fault
from flowtrain_lightning.pool.inbox import ORDERED_STORES, Inbox, Slot, inbox_bytes
from flowtrain_lightning.pool.liveness import PAGE_BYTES, State, StatusPage
from flowtrain_lightning.pool.meeting import Met, meet
from flowtrain_lightning.pool.record import Kind, Numbered, Record, encode_record
from flowtrain_lightning.pool.store import Store
from flowtrain_lightning.pool.stream import Stream
from flowtrain_lightning.pool.turns import RecordOrder

_LOOK_SECONDS = 0.25  # how often a rank reads the others' pages, and its sockets though its inbox is never empty
_PAGE_SECONDS = 0.2  # how long a closed connection waits for its process to be gone or to say why
_FAR_PAGE_SECONDS = 1.0  # the same where it, or who is to blame, runs on another host
_GOODBYE_SECONDS = 2.0  # how long closing waits for peers to read what is still queued
_LAST_WORD_SECONDS = 0.3  # how long closing after a fault waits for other hosts to learn of it


class Mesh:
    """Connections to all other ranks. Used by one thread; only `abort` may be called by others.

    Small records to a rank of this machine go through its inbox; others, and those that find no place there, through
    its socket. A record's place among all that one rank has sent to another puts both ways in order again.

    Build it with `Mesh.connect`.

    Attributes:
        rank: the calling rank.
        ranks: how many there are.
        labels: one per rank, for messages.
        page: the calling rank's status page.
        board: the pages of all ranks.
        elsewhere: the ranks of other hosts, whose pages are copies.
        locations: where each rank runs, equal on ranks that share memory.
        links: how many links were made on it.
        early: records of links that are still to be made here.
    """

    def __init__(self, rank: int, labels: Sequence[str], page: StatusPage, bell: int, met: Met) -> None:
        self.rank = rank
        self.ranks = len(labels)
        self.labels = tuple(labels)
        self.page = page
        self.locations = met.locations or ("here",) * self.ranks
        self._inbox = Inbox(page.memory, PAGE_BYTES, self.ranks)
        self._turns = RecordOrder(self.ranks)
        self._sent = [0] * self.ranks
        self._next_look = 0.0
        self.links = 0
        self.early: list[Record] = []
        self._alarm = Alarm(bell)
        self.elsewhere = Elsewhere(page, labels, met.elsewhere, self._alarm.ring, self._alarm.abort)
        pages: dict[int, StatusPage] = {rank: page, **self.elsewhere.copies}
        processes: dict[int, int] = {peer: copy.ended for peer, copy in self.elsewhere.copies.items()}
        sockets = {peer: connection.records for peer, connection in met.elsewhere.items()}
        self._slots: dict[int, Slot] = {}
        for peer, connection in met.here.items():
            pages[peer] = StatusPage.attach(peer, connection.page, inbox_bytes(self.ranks))
            processes[peer] = connection.process
            sockets[peer] = connection.socket
            self._slots[peer] = Slot(pages[peer].memory, PAGE_BYTES, self.ranks, rank, connection.bell)
        self.board = StatusBoard(
            [pages[peer] for peer in range(self.ranks)], [processes.get(peer) for peer in range(self.ranks)]
        )
        self._streams = {peer: Stream(connection, peer) for peer, connection in sorted(sockets.items())}
        self._stream_of = {stream.descriptor: stream for stream in self._streams.values()}
        self._process_of = {process: peer for peer, process in processes.items()}
        self._epoll = select.epoll()
        for descriptor in (bell, *self._stream_of, *self._process_of):
            self._epoll.register(descriptor, select.EPOLLIN)

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
    ) -> Mesh:
        """Meet the other ranks. Every rank calls it once; with one rank the store is not used.

        Args:
            store: a ``torch.distributed`` store with keys of this mesh alone (a ``PrefixStore``).
            rank: the calling rank.
            ranks: how many there are.
            labels: what each rank is, for messages: for example ``"backbone 0"``.
            timeout: seconds until all must have come.
            address: IP address at which ranks of other hosts reach this one (see `address_towards`); given by all ranks
                or by none. Without it all ranks run on this machine, and no port is opened.
            location: equal on ranks that share memory; None finds out. To force another way is for tests.

        Raises:
            PeerFailed: when a peer ends meanwhile.
            PoolError: when a peer does not come in time, or belongs to another user.
        """
        if not 0 <= rank < ranks or len(labels) != ranks:
            raise PoolError(f"Rank {rank} of {ranks} with {len(labels)} labels was given; expected one label per rank.")
        page, descriptor = StatusPage.create(rank, labels[rank], inbox_bytes(ranks))
        bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        try:
            met = meet(store, rank, labels, descriptor, bell, timeout, address, location)
        except BaseException:
            os.close(bell)
            raise
        finally:
            os.close(descriptor)
        return cls(rank, labels, page, bell, met)

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
        if small and not stream.queued and peer in self._slots and self._slots[peer].put(message):
            return
        stream.send(message, record.descriptors)
        stream.watch(self._epoll)

    def receive(self, timeout: float = 0.0) -> list[Record]:
        """What has arrived; waits up to ``timeout`` seconds for something.

        Raises:
            PeerFailed: when a peer died or failed, or `abort` was called. From then on at every call.
            PoolError: when a peer sent what is no valid record.
        """
        self._alarm.check()
        now = time.monotonic()
        if now < self._next_look:
            records = self._take()
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
        self._alarm.abort(sentence, rank)

    def close(self, goodbye: bool = True) -> None:
        """Leave. A second call does nothing.

        Args:
            goodbye: tell the others that this is no death, after what is still queued for them. Without it they
                take the end of this process for a fault; so they do when this rank failed or knows of a fault.
        """
        if self._epoll.closed:
            return
        in_order = goodbye and not self._alarm.raised and self.page.state is not State.FAILED
        if in_order:
            self._say_goodbye()
        self.elsewhere.close(_GOODBYE_SECONDS if in_order else _LAST_WORD_SECONDS)
        self._epoll.close()
        for peer, stream in self._streams.items():
            stream.close()
            if peer in self._slots:
                self._slots[peer].close()
        self._alarm.close()
        for record in self.early:
            for descriptor in record.descriptors:
                os.close(descriptor)
        self.early.clear()
        self.board.close()

    def _say_goodbye(self) -> None:
        self.page.finish()
        for peer, stream in self._streams.items():
            self._sent[peer] += 1
            stream.send(encode_record(Record(Kind.GOODBYE, self.rank), self._sent[peer]))
            stream.watch(self._epoll)
        deadline = time.monotonic() + _GOODBYE_SECONDS
        with suppress(PoolError):  # whoever fails now is no concern of a rank that has done its work
            while any(stream.queued for stream in self._streams.values()) and time.monotonic() < deadline:
                self._read(0.05)

    def _take(self) -> list[Record]:
        """What has arrived without a socket of this thread."""
        records = self._in_order(self._inbox.take())
        arrived = self.elsewhere.arrived
        while arrived:
            records.append(arrived.popleft())
        return records

    def _read(self, timeout: float) -> list[Record]:
        """What inbox and sockets hold; waits up to ``timeout`` seconds until one of them holds something."""
        records: list[Record] = []
        if timeout > 0:
            self._inbox.fall_asleep()
            records = self._take()
        events = self._epoll.poll(0 if records else timeout)
        if timeout > 0:
            self._inbox.wake_up()
        for descriptor, event in events:
            stream = self._stream_of.get(descriptor)
            if stream is not None:
                if event & select.EPOLLOUT:
                    stream.flush()
                    stream.watch(self._epoll)
                if event & ~select.EPOLLOUT:
                    self._read_stream(stream, records)
            elif descriptor == self._alarm.bell:
                os.eventfd_read(descriptor)
                self._alarm.check()
            elif descriptor in self._process_of:  # else its peer has left earlier in this round
                self._ended(descriptor)
        return records + self._take()

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
        """The records whose turn it is; see `RecordOrder.take`."""
        records = self._turns.take(found) if found else []
        while self._turns.goodbyes:
            self._forget(self._turns.goodbyes.pop())
        return records

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
        patience = _FAR_PAGE_SECONDS if self.elsewhere.copies else _PAGE_SECONDS
        blamed, sentence = blame_fault(self.board, self.rank, peer, patience)
        self.elsewhere.tell()  # before this process ends and its own end is taken for the fault
        self._alarm.abort(sentence, blamed)
        self._alarm.check()

    def _forget(self, peer: int) -> None:
        """``peer`` has left in good order."""
        stream = self._streams.pop(peer)
        del self._stream_of[stream.descriptor]
        self._epoll.unregister(stream.descriptor)
        self._turns.forget(peer)
        stream.close()
        slot = self._slots.pop(peer, None)
        if slot is not None:
            slot.close()
