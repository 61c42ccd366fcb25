"""Every process of a machine connected with every other one: control records, and who is still there."""

from __future__ import annotations

import os
import select
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from flowtrain_lightning.pool.errors import PeerFailed, PoolError
from flowtrain_lightning.pool.faults import fault_sentence, find_fault
from flowtrain_lightning.pool.liveness import State, StatusBoard, StatusPage
from flowtrain_lightning.pool.record import Kind, Record, decode_record, encode_record
from flowtrain_lightning.pool.sockets import Connection, Rendezvous, Store, receive_message, send_message

_LOOK_SECONDS = 0.25  # how often a waiting rank reads the others' pages
_PAGE_SECONDS = 0.2  # how long a closed connection waits for its process to be gone or to say why
_GOODBYE_SECONDS = 2.0  # how long closing waits for peers to read what is still queued
_MESSAGES_AT_ONCE = 256  # from one peer, before the others get their turn


class Message(NamedTuple):
    """What a peer sent: a record, the bytes after it, and a descriptor that the receiver closes."""

    record: Record
    payload: bytes
    descriptor: int | None


class Mesh:
    """Connections to all other ranks of the machine. Used by one thread; only `abort` may be called by others.

    Build it with `Mesh.connect`.

    Attributes:
        rank: the calling rank.
        ranks: how many there are.
        labels: one per rank, for messages.
        page: the calling rank's status page.
        board: the pages of all ranks.
        links: how many links were made on it.
        early: messages of links that are still to be made here.
    """

    def __init__(self, rank: int, labels: Sequence[str], page: StatusPage, connections: dict[int, Connection]) -> None:
        self.rank = rank
        self.ranks = len(labels)
        self.labels = tuple(labels)
        self.page = page
        pages, processes = [], []
        for peer in range(self.ranks):
            connection = connections.get(peer)
            pages.append(page if connection is None else StatusPage.attach(peer, connection.page))
            processes.append(None if connection is None else connection.process)
        self.board = StatusBoard(pages, processes)
        self._sockets = {peer: connection.socket for peer, connection in connections.items()}
        self._outboxes: dict[int, deque[tuple[bytes, int | None]]] = {peer: deque() for peer in connections}
        self._blocked: set[int] = set()  # peers whose socket was full
        self._fault: tuple[str, int | None] | None = None
        self._next_look = 0.0
        self.links = 0
        self.early: list[Message] = []
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._wake_lock = threading.Lock()
        self._epoll = select.epoll()
        self._epoll.register(self._wake, select.EPOLLIN)
        self._peer_of = {connection.socket.fileno(): peer for peer, connection in connections.items()}
        self._process_of = {connection.process: peer for peer, connection in connections.items()}
        for descriptor in (*self._peer_of, *self._process_of):
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
        page, descriptor = StatusPage.create(rank, labels[rank])
        try:
            connections = Rendezvous(store, rank, labels, descriptor, timeout).meet() if ranks > 1 else {}
        finally:
            os.close(descriptor)
        return cls(rank, labels, page, connections)

    def send(self, peer: int, record: Record, payload: bytes = b"", descriptor: int | None = None) -> None:
        """Send a record, or queue it where the peer has too much to read already. Never waits.

        The queue is as long as the caller makes it: the pool's entries, and so its room, bound what it sends.

        Raises:
            PoolError: when the peer has left in good order.
        """
        connection = self._sockets.get(peer)
        if connection is None:
            raise PoolError(f"Rank {peer} ({self.labels[peer]}) has left; nothing can be sent to it any more.")
        outbox = self._outboxes[peer]
        outbox.append((encode_record(record, payload), descriptor))
        if len(outbox) == 1:
            self._flush(peer)

    def receive(self, timeout: float = 0.0) -> list[Message]:
        """What has arrived; waits up to ``timeout`` seconds for something.

        Raises:
            PeerFailed: when a peer died or failed, or `abort` was called. From then on at every call.
            PoolError: when a peer sent what is no valid record.
        """
        self._raise_fault()
        now = time.monotonic()
        deadline = now + timeout
        while True:
            if now >= self._next_look:
                self._next_look = now + _LOOK_SECONDS
                self._look()
            messages = self._read(max(min(deadline - now, _LOOK_SECONDS), 0.0))
            now = time.monotonic() if timeout else deadline
            if messages or now >= deadline:
                return messages

    def has_left(self, peer: int) -> bool:
        """Whether ``peer`` has left in good order."""
        return peer != self.rank and peer not in self._sockets

    def abort(self, sentence: str, rank: int | None = None) -> None:
        """Make `receive` raise `PeerFailed`, now and from now on. Safe to call from any thread.

        Args:
            sentence: the error's text.
            rank: who is to blame.
        """
        with self._wake_lock:
            if self._fault is None:
                self._fault = (sentence, rank)
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

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
            for peer in list(self._sockets):
                self.send(peer, Record(Kind.GOODBYE, self.rank))
            deadline = time.monotonic() + _GOODBYE_SECONDS
            with suppress(PoolError):  # whoever fails now is no concern of a rank that has done its work
                while any(self._outboxes.values()) and time.monotonic() < deadline:
                    self._read(0.05)
        self._epoll.close()
        for connection in self._sockets.values():
            connection.close()
        with self._wake_lock:
            os.close(self._wake)
            self._wake = -1
        for message in self.early:
            if message.descriptor is not None:
                os.close(message.descriptor)
        self.early.clear()
        self.board.close()

    def _read(self, timeout: float) -> list[Message]:
        messages: list[Message] = []
        for descriptor, events in self._epoll.poll(timeout):
            if descriptor == self._wake:
                self._raise_fault()
            elif descriptor in self._process_of:
                self._ended(descriptor)
            elif descriptor in self._peer_of:  # else its peer has left earlier in this round
                peer = self._peer_of[descriptor]
                if events & select.EPOLLOUT:
                    self._flush(peer)
                if events & (select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR):
                    self._drain(peer, messages)
        return messages

    def _drain(self, peer: int, messages: list[Message]) -> None:
        """Read what ``peer`` has sent."""
        connection = self._sockets[peer]
        for _ in range(_MESSAGES_AT_ONCE):
            try:
                data, descriptor = receive_message(connection)
            except BlockingIOError:
                return
            except ConnectionResetError:
                continue  # it closed before it read everything; what it sent before is still to come
            if not data and self.board.pages[peer].state is not State.FINISHED:
                self._blame(peer)
            record, payload = decode_record(data, peer) if data else (None, b"")
            if record is None or record.kind is Kind.GOODBYE:
                self._forget(peer)
                return
            messages.append(Message(record, payload, descriptor))

    def _flush(self, peer: int) -> None:
        """Send what is queued for ``peer``, as much as it takes."""
        connection, outbox = self._sockets[peer], self._outboxes[peer]
        try:
            while outbox:
                send_message(connection, *outbox[0])
                outbox.popleft()
        except BlockingIOError:
            if peer not in self._blocked:
                self._blocked.add(peer)
                self._epoll.modify(connection.fileno(), select.EPOLLIN | select.EPOLLOUT)
            return
        except (BrokenPipeError, ConnectionResetError):
            outbox.clear()  # it has ended; reading from it will say whether in good order
        if peer in self._blocked:
            self._blocked.remove(peer)
            self._epoll.modify(connection.fileno(), select.EPOLLIN)

    def _look(self) -> None:
        """Read the others' pages: a peer that failed may not have closed its connection yet."""
        for peer in self._sockets:
            if self.board.pages[peer].state is State.FAILED:
                self._blame(peer)

    def _ended(self, process: int) -> None:
        """A peer's process is gone. Its connection may not tell so, when children of it have inherited that."""
        peer = self._process_of.pop(process)
        self._epoll.unregister(process)
        if peer in self._sockets and self.board.pages[peer].state is not State.FINISHED:
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
        connection = self._sockets.pop(peer)
        del self._outboxes[peer], self._peer_of[connection.fileno()]
        self._epoll.unregister(connection.fileno())
        connection.close()
