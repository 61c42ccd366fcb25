"""What is to be sent to one rank over one connection: in order, and only so much of it on its way at once."""

from __future__ import annotations

from collections import deque
from enum import Enum

from flowtrain_lightning.pool.control_records import MAX_PAYLOAD, RECORD_BYTES, ControlRecord, encode_record

PIECE_BYTES = 64 * 1024
"""Bytes of an entry that one message carries: larger ones gain nothing, and stay in no processor's cache."""

MAX_MESSAGE_BYTES = 2 * PIECE_BYTES
"""A longer message ends its connection before memory is taken for it. None of ours is so long, encrypted or not."""

assert RECORD_BYTES + max(PIECE_BYTES, MAX_PAYLOAD) < MAX_MESSAGE_BYTES


class Purpose(Enum):
    """What each connection between two ranks of different hosts carries."""

    RECORDS = "records"
    PAGES = "pages"
    ENTRIES = "entries"


WINDOWS = {Purpose.RECORDS: 256, Purpose.PAGES: 1, Purpose.ENTRIES: (4 << 20) // PIECE_BYTES}
"""How many messages may be on their way to a rank: what more is to be sent waits where it is, in its owner's memory.

Of pages it is one, which fits into any system's buffer: a process that is stopped then keeps its connection.
"""


class Outbox:
    """Messages to one rank over one connection. `add` may be called by any one thread, all else by another one.

    Args:
        identity: names rank and connection.
        window: how many messages may be on their way at once.

    Attributes:
        identity: names rank and connection.
    """

    def __init__(self, identity: bytes, window: int) -> None:
        self.identity = identity
        self._window = window
        self._queue: deque[bytes | memoryview] = deque()
        self._sent = self._acknowledged = 0

    @property
    def settled(self) -> bool:
        """Whether everything has arrived."""
        return not self._queue and self._acknowledged == self._sent

    @property
    def ready(self) -> bool:
        """Whether a message can be sent now."""
        return bool(self._queue) and self._sent - self._acknowledged < self._window

    def add(self, message: bytes) -> None:
        """Queue a message."""
        self._queue.append(message)

    def add_entry(self, record: ControlRecord, entry: memoryview) -> None:
        """Queue a record and the bytes of an entry, in pieces; they must not change before the reader releases it."""
        self._queue.append(encode_record(record) + entry[:PIECE_BYTES])
        self._queue.extend(entry[begin : begin + PIECE_BYTES] for begin in range(PIECE_BYTES, len(entry), PIECE_BYTES))

    def replace(self, message: bytes) -> None:
        """Queue a message in place of all that are queued."""
        self._queue.clear()
        self._queue.append(message)

    def first(self) -> bytes | memoryview:
        """The message whose turn it is."""
        return self._queue[0]

    def is_sent(self) -> None:
        """The first message is on its way."""
        self._queue.popleft()
        self._sent += 1

    def acknowledge(self, count: int) -> bool:
        """So many messages have arrived in all; False where that cannot be."""
        if not self._acknowledged <= count <= self._sent:
            return False
        self._acknowledged = count
        return True

    def drop(self) -> None:
        """The rank is lost: nothing is to be sent any more, and nothing is waited for."""
        self._queue.clear()
        self._acknowledged = self._sent
