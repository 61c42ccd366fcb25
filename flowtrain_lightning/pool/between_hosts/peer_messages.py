"""Messages to and from one rank of another host: in order, in pieces, and only so much on its way."""

from __future__ import annotations

from collections import deque
from enum import Enum

from flowtrain_lightning.pool.address import Address
from flowtrain_lightning.pool.control_records import (
    MAX_PAYLOAD,
    RECORD_BYTES,
    ControlRecord,
    Kind,
    decode_record,
    encode_record,
)
from flowtrain_lightning.pool.pool_errors import PoolError

PIECE_BYTES = 64 * 1024
"""Bytes of an entry that one message carries: larger ones gain nothing, and stay in no processor's cache."""

MAX_MESSAGE_BYTES = 2 * PIECE_BYTES
"""A longer message ends its connection before memory is taken for it. None of ours is so long, encrypted or not."""

assert RECORD_BYTES + max(PIECE_BYTES, MAX_PAYLOAD) < MAX_MESSAGE_BYTES


class Purpose(Enum):
    """The contents of each connection between two ranks of different hosts."""

    RECORDS = "records"
    PAGES = "pages"
    ENTRIES = "entries"


WINDOWS = {Purpose.RECORDS: 256, Purpose.PAGES: 1, Purpose.ENTRIES: (4 << 20) // PIECE_BYTES}
"""Most messages on their way to a rank; further ones wait in their owner's memory.

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


class EntryReceiver:
    """A message that is arriving: a record with the first bytes of its entry, then the others.

    Only what an owner keeps in its segment can be on its way, so a reader needs no more memory for entries of an owner
    than that owner's segment has.

    Args:
        peer: the rank that sends.
    """

    def __init__(self, peer: int) -> None:
        self._peer = peer
        self._segments: dict[int, int] = {}  # link -> bytes of the peer's segment
        self._record: ControlRecord | None = None
        self._entry = bytearray()
        self._filled = 0

    def take(self, message: memoryview) -> ControlRecord | None:
        """Take in a message.

        Returns:
            The record that is whole by it, with the entry as its payload; None where more is to come.

        Raises:
            PoolError: when the peer sent what it cannot have put.
        """
        record = self._record
        if record is None:
            record = decode_record(bytes(message[:RECORD_BYTES]), self._peer)
            message = message[RECORD_BYTES:]
            if record.kind is Kind.SEGMENT and record.link not in self._segments and not message:
                self._segments[record.link] = record.size
                return record
            self._begin(record)
        end = self._filled + len(message)
        if end > len(self._entry):
            raise PoolError(f"Rank {self._peer} sent more than the {len(self._entry):,} bytes of {record}.")
        self._entry[self._filled : end] = message
        self._filled = end
        if end < len(self._entry):
            return None
        self._record, whole = None, self._entry
        return record._replace(payload=whole)

    def _begin(self, record: ControlRecord) -> None:
        end = Address(record.address).offset + record.size
        if record.kind is not Kind.PUBLISH or not 0 < record.size <= end <= self._segments.get(record.link, 0):
            raise PoolError(f"Rank {self._peer} sent {record}, which lies outside of its segment or is no entry.")
        try:
            self._entry = bytearray(record.size)
        except MemoryError:
            raise PoolError(
                f"There is no memory for an entry of {record.size:,} bytes from rank {self._peer}, which runs on "
                "another host. Lower `PoolSettings(bytes=...)` or run fewer ranks on this machine."
            ) from None
        self._record, self._filled = record, 0
