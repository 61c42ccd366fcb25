"""Control records: what ranks tell each other, their binary form, and the inboxes through which small ones pass.

Every rank has an inbox in shared memory, behind its status page, with a ring of records for each peer of its host::

    0    reader: how often it fell asleep or woke; odd while it sleeps
    64   per peer, written by the peer: how many records it has put in
    ...  per peer, written by the reader: how many it has taken out
    ...  per peer: RING_RECORDS records of 64 bytes

A peer that finds the reader asleep sets its wake event, an ``eventfd``, once per sleep. No wake-up is lost: the peer
counts its record and then looks whether the reader sleeps; the reader says that it sleeps and then looks for records
once more. Between the two moments stands a memory fence.
"""

from __future__ import annotations

import os
import platform
import struct
import threading
import zlib
from enum import IntEnum
from mmap import mmap
from typing import NamedTuple

from flowtrain_lightning.pool.address import aligned
from flowtrain_lightning.pool.pool_errors import PoolError

MAX_PAYLOAD = 32 * 1024
"""Bytes that may follow a record."""

RING_RECORDS = 128
"""Records that a peer can put into an inbox before the reader takes any out; what is more goes through the socket."""

ORDERED_STORES = platform.machine() in ("x86_64", "AMD64")
"""Whether this processor shows stores to others in the order in which they were made, as inboxes need it.

Elsewhere all records go through the sockets, whose system calls order them.
"""


class Kind(IntEnum):
    """The kind of a record. The fields of `ControlRecord` that it uses are named in brackets."""

    HELLO = 1
    """I am ``sender`` of ``number`` ranks; my status page and my wake event are attached."""
    GOODBYE = 2
    """I leave in good order; this is no death."""
    SEGMENT = 3
    """My segment has ``size`` bytes; its memory is attached, if the reader can share it."""
    PUBLISH = 4
    """The entry ``channel, number`` of ``size`` bytes lies at ``address``."""
    RELEASE = 5
    """I have done with the entry at ``address``."""
    STATUS = 6
    """The payload is what my status page says; for ranks that cannot see it."""
    BLOCK = 7
    """My block of device memory has ``size`` bytes; the payload names it and ``number`` events. 0: I have none."""
    BLOCK_READ = 8
    """I can read your block; the payload names ``number`` events of mine. 0: I cannot, for that reason."""
    BLOCK_CLOSED = 9
    """I read your block no more."""


class ControlRecord(NamedTuple):
    """One control record: 64 bytes, and what follows them.

    Attributes:
        kind: what it says.
        sender: rank that says it.
        link: number of the link, and so of the pool, that it belongs to; see `Mesh.begin_link`.
        channel: of a key.
        number: a key but for its channel, or a count.
        address: of an entry.
        size: bytes.
        payload: up to ``MAX_PAYLOAD`` bytes that follow; of an entry that came over the network, all of its bytes.
        descriptors: what came along; the receiver closes them.
        sequence: counts the records that its sender has sent to this receiver, from 1 on; given when it is sent.
    """

    kind: Kind
    sender: int
    link: int = 0
    channel: int = 0
    number: int = 0
    address: int = 0
    size: int = 0
    payload: bytes | bytearray = b""
    descriptors: tuple[int, ...] = ()
    sequence: int = 0


_MAGIC = 0x464C5433
# magic, kind, channel, sender, link, bytes of the payload, sequence, number, address, size, checksum of the payload
_BODY = struct.Struct("<IBBHIIQQQQI8x")
_CHECKSUM = struct.Struct("<I")  # of the body alone, so that the payload's length is checked before it is believed
_WHOLE = struct.Struct(_BODY.format + "I")
_BODY_BYTES = _BODY.size
RECORD_BYTES = _WHOLE.size
_KINDS = {int(kind): kind for kind in Kind}
_new = tuple.__new__  # half the time of a call of the class, once per record that arrives


def encode_record(record: ControlRecord, sequence: int = 0) -> bytes:
    """The bytes that carry ``record``, but for its descriptors."""
    kind, sender, link, channel, number, address, size, payload, _, _ = record
    length, payload_sum = (len(payload), zlib.crc32(payload)) if payload else (0, 0)
    body = _BODY.pack(_MAGIC, kind, channel, sender, link, length, sequence, number, address, size, payload_sum)
    return body + _CHECKSUM.pack(zlib.crc32(body)) + payload


def decode_records(arrived: bytes, sender: int | None = None) -> tuple[list[ControlRecord], int]:
    """The records at the start of a stream of bytes.

    Args:
        arrived: as many bytes as have arrived; the last record may be cut.
        sender: the rank that they must come from; None while that is not known yet.

    Returns:
        What is whole, and how many bytes that is. The rest waits for what arrives later.

    Raises:
        PoolError: when anything about a record is not as `encode_record` makes it.
    """
    found: list[ControlRecord] = []
    begin, available = 0, len(arrived)
    while available - begin >= RECORD_BYTES:
        fields = _WHOLE.unpack_from(arrived, begin)
        magic, kind, channel, said, link, length, sequence, number, address, size, payload_sum, checksum = fields
        if zlib.crc32(arrived[begin : begin + _BODY_BYTES]) != checksum:
            raise PoolError(_damaged(sender, "its checksum does not match"))
        if magic != _MAGIC or kind not in _KINDS or length > MAX_PAYLOAD:
            raise PoolError(_damaged(sender, "it is none that this version knows; do all ranks run the same version?"))
        if said != sender and sender is not None:
            raise PoolError(_damaged(sender, f"it claims to come from rank {said}"))
        end = begin + RECORD_BYTES + length
        if end > available:
            break
        payload = arrived[begin + RECORD_BYTES : end] if length else b""
        if length and payload_sum != zlib.crc32(payload):
            raise PoolError(_damaged(sender, "the checksum of what follows it does not match"))
        fields = (_KINDS[kind], said, link, channel, number, address, size, payload, (), sequence)
        found.append(_new(ControlRecord, fields))
        begin = end
    return found, begin


def decode_record(message: bytes, sender: int | None = None) -> ControlRecord:
    """The record that these bytes are, no more and no less; see `decode_records`.

    Raises:
        PoolError: also when they are more or less than one record.
    """
    found, nbytes = decode_records(message, sender)
    if len(found) != 1 or nbytes != len(message):
        raise PoolError(_damaged(sender, f"{len(message)} bytes came that are not one whole record"))
    return found[0]


def _damaged(sender: int | None, why: str) -> str:
    who = "an unknown process" if sender is None else f"rank {sender}"
    return f"A control record from {who} was refused: {why}."


_WORD = 8
_COUNTS = 64  # where the peers' counts begin
_fence = threading.Lock()
"""Lets no later load pass an earlier store: to take a lock is an atomic operation, which orders both on x86."""


def inbox_bytes(ranks: int) -> int:
    """The size of the inbox of each of ``ranks`` ranks."""
    return _rings(ranks) + ranks * RING_RECORDS * RECORD_BYTES


class Inbox:
    """The reader's side of its inbox.

    Args:
        memory: holds the inbox.
        start: where in it.
        ranks: how many ranks there are.
    """

    def __init__(self, memory: mmap, start: int, ranks: int) -> None:
        self._memory = memory
        self._words = _words(memory, start, ranks)
        self._peers = range(ranks)
        self._counts = slice(start + _COUNTS, start + _COUNTS + ranks * _WORD)
        self._seen = bytes(ranks * _WORD)  # the counts when they were last looked at
        self._taken = [0] * ranks
        self._taken_words = (_COUNTS + aligned(ranks * _WORD)) // _WORD
        self._rings = start + _rings(ranks)

    def take(self) -> list[ControlRecord]:
        """All records that peers have put in, in the order of each peer.

        Raises:
            PoolError: when a record, or a count, is not as a peer writes it.
        """
        found: list[ControlRecord] = []
        counts = self._memory[self._counts]
        if counts == self._seen:
            return found
        self._seen = counts
        for peer in self._peers:
            count, taken = self._words[_COUNTS // _WORD + peer], self._taken[peer]
            if count == taken:
                continue
            if not 0 < count - taken <= RING_RECORDS:
                raise PoolError(
                    f"Rank {peer} says that it has put {count} records into an inbox of which {taken} are read."
                )
            ring = self._rings + peer * RING_RECORDS * RECORD_BYTES
            first, last = taken % RING_RECORDS * RECORD_BYTES, ((count - 1) % RING_RECORDS + 1) * RECORD_BYTES
            if first < last:
                arrived = self._memory[ring + first : ring + last]
            else:
                arrived = self._memory[ring + first : ring + RING_RECORDS * RECORD_BYTES]
                arrived += self._memory[ring : ring + last]
            records, nbytes = decode_records(arrived, peer)
            if nbytes != len(arrived) or len(records) != count - taken:
                raise PoolError(_damaged(peer, "it is longer than an inbox can hold"))
            found += records
            self._taken[peer] = self._words[self._taken_words + peer] = count
        return found

    def fall_asleep(self) -> None:
        """From now on peers set the wake event. What they put in before is there when this returns."""
        self._words[0] += 1
        with _fence:
            pass

    def wake_up(self) -> None:
        """From now on peers need not set the wake event."""
        self._words[0] += 1


class InboxWriter:
    """A peer's side of one reader's inbox.

    Args:
        memory: holds the reader's inbox.
        start: where in it.
        ranks: how many ranks there are.
        rank: the peer.
        wake_event: the reader's ``eventfd``, closed by `close`.
    """

    def __init__(self, memory: mmap, start: int, ranks: int, rank: int, wake_event: int) -> None:
        self._memory = memory
        self._words = _words(memory, start, ranks)
        self._count_word = _COUNTS // _WORD + rank
        self._taken_word = (_COUNTS + aligned(ranks * _WORD)) // _WORD + rank
        self._ring = start + _rings(ranks) + rank * RING_RECORDS * RECORD_BYTES
        self._wake_event = wake_event
        self._count = 0
        self._woken = 0  # the sleep for which the wake event was set

    def put(self, record: bytes) -> bool:
        """Put in a record of ``RECORD_BYTES``, and wake the reader if it sleeps; False where the ring is full."""
        count, words = self._count, self._words
        if not 0 <= count - words[self._taken_word] < RING_RECORDS:
            return False
        start = self._ring + count % RING_RECORDS * RECORD_BYTES
        self._memory[start : start + RECORD_BYTES] = record
        self._count = words[self._count_word] = count + 1
        with _fence:
            pass
        sleep = words[0]
        if sleep & 1 and sleep != self._woken:
            self._woken = sleep
            os.eventfd_write(self._wake_event, 1)
        return True

    def close(self) -> None:
        """Let go of the wake event."""
        os.close(self._wake_event)


def _rings(ranks: int) -> int:
    return _COUNTS + 2 * aligned(ranks * _WORD)


def _words(memory: mmap, start: int, ranks: int) -> memoryview:
    return memoryview(memory)[start : start + _rings(ranks)].cast("Q")  # each is stored whole
