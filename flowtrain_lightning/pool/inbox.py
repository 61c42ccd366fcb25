"""Records between processes of one machine through shared memory: no system call while the reader is awake.

Every rank has an inbox, which follows its status page in the same memory, with a ring of places for each peer::

    0    reader: how often it fell asleep or woke; odd while it sleeps
    64   per peer, written by the peer: how many records it has put in
    ...  per peer, written by the reader: how many it has taken out
    ...  per peer: PLACES records of 64 bytes

A peer that finds the reader asleep rings its bell, an ``eventfd``, once per sleep. No wake-up is lost: the peer counts
its record and then looks whether the reader sleeps; the reader says that it sleeps and then looks for records once
more. Between the two moments stands a memory fence.
"""

from __future__ import annotations

import os
import platform
import threading
from mmap import mmap

from flowtrain_lightning.pool.address import aligned
from flowtrain_lightning.pool.errors import PoolError
from flowtrain_lightning.pool.record import RECORD_BYTES, Numbered, decode_records

PLACES = 128
"""Records that a peer can put in before the reader takes any out; what is more goes through the socket."""

ORDERED_STORES = platform.machine() in ("x86_64", "AMD64")
"""Whether this processor shows stores to others in the order in which they were made, as inboxes need it.

Elsewhere all records go through the sockets, whose system calls order them.
"""

_WORD = 8
_COUNTS = 64  # where the peers' counts begin
_fence_lock = threading.Lock()


def inbox_bytes(ranks: int) -> int:
    """The size of the inbox of each of ``ranks`` ranks."""
    return _rings(ranks) + ranks * PLACES * RECORD_BYTES


class Inbox:
    """The reader's side.

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
        self._takes = (_COUNTS + aligned(ranks * _WORD)) // _WORD
        self._rings = start + _rings(ranks)

    def take(self) -> list[Numbered]:
        """All records that peers have put in, in the order of each peer.

        Raises:
            PoolError: when a record, or a count, is not as a peer writes it.
        """
        counts = self._memory[self._counts]
        if counts == self._seen:
            return []
        self._seen = counts
        found: list[Numbered] = []
        for peer in self._peers:
            count, taken = self._words[_COUNTS // _WORD + peer], self._taken[peer]
            if count != taken:
                found += self._take_from(peer, taken, count)
        return found

    def fall_asleep(self) -> None:
        """From now on peers ring the bell. What they put in before is there when this returns."""
        self._words[0] += 1
        _fence()

    def wake_up(self) -> None:
        """From now on peers need not ring the bell."""
        self._words[0] += 1

    def _take_from(self, peer: int, taken: int, count: int) -> list[Numbered]:
        if not 0 < count - taken <= PLACES:
            raise PoolError(
                f"Rank {peer} says that it has put {count} records into an inbox of which {taken} are read."
            )
        ring, first, last = self._rings + peer * PLACES * RECORD_BYTES, taken % PLACES, (count - 1) % PLACES
        if first <= last:
            records = self._memory[ring + first * RECORD_BYTES : ring + (last + 1) * RECORD_BYTES]
        else:
            records = self._memory[ring + first * RECORD_BYTES : ring + PLACES * RECORD_BYTES]
            records += self._memory[ring : ring + (last + 1) * RECORD_BYTES]
        found, nbytes = decode_records(records, peer)
        if nbytes != len(records) or len(found) != count - taken:
            raise PoolError(f"A control record from rank {peer} was refused: it is longer than its place in an inbox.")
        self._taken[peer] = self._words[self._takes + peer] = count
        return found


class Slot:
    """A peer's side: its part of one reader's inbox.

    Args:
        memory: holds the reader's inbox.
        start: where in it.
        ranks: how many ranks there are.
        rank: the peer.
        bell: the reader's ``eventfd``, closed by `close`.
    """

    def __init__(self, memory: mmap, start: int, ranks: int, rank: int, bell: int) -> None:
        self._memory = memory
        self._words = _words(memory, start, ranks)
        self._count_word = _COUNTS // _WORD + rank
        self._taken_word = (_COUNTS + aligned(ranks * _WORD)) // _WORD + rank
        self._ring = start + _rings(ranks) + rank * PLACES * RECORD_BYTES
        self._bell = bell
        self._count = 0
        self._rung = 0  # the sleep for which the bell was rung

    def put(self, record: bytes) -> bool:
        """Put in a record, of ``RECORD_BYTES``, and wake the reader if it sleeps; False when there is no place now."""
        count, words = self._count, self._words
        if not 0 <= count - words[self._taken_word] < PLACES:
            return False
        place = self._ring + count % PLACES * RECORD_BYTES
        self._memory[place : place + RECORD_BYTES] = record
        self._count = words[self._count_word] = count + 1
        _fence()
        sleep = words[0]
        if sleep & 1 and sleep != self._rung:
            self._rung = sleep
            os.eventfd_write(self._bell, 1)
        return True

    def close(self) -> None:
        """Let go of the bell."""
        os.close(self._bell)


def _rings(ranks: int) -> int:
    return _COUNTS + 2 * aligned(ranks * _WORD)


def _words(memory: mmap, start: int, ranks: int) -> memoryview:
    return memoryview(memory)[start : start + _rings(ranks)].cast("Q")  # each is stored whole


def _fence() -> None:
    """Let no later load pass an earlier store: to take a lock is an atomic operation, which orders both on x86."""
    _fence_lock.acquire()
    _fence_lock.release()
