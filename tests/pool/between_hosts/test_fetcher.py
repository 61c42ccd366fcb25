"""The thread that fetches entries, with memory of this process in the place of another host's."""

import ctypes
import queue
import threading

import pytest

from flowtrain_lightning.pool import Address, PoolError, Tier
from flowtrain_lightning.pool.between_hosts import fetcher as fetcher_module
from flowtrain_lightning.pool.between_hosts.fetcher import Fetch, Fetcher
from flowtrain_lightning.pool.entry import HEAD_BYTES
from flowtrain_lightning.pool.record import Kind, Record

NBYTES = 256
PATIENCE = 10


class Transfers:
    """Stands for NIXL: a transfer is done when a test lets it."""

    def __init__(self):
        self.begun = queue.Queue()  # (source, bytes) of each transfer
        self.let = threading.Semaphore(0)
        self.running = {}
        self.error = None

    def read(self, name, source, target, nbytes):
        handle = len(self.running)
        self.running[handle] = target, source, nbytes
        self.begun.put((source, nbytes))
        return handle

    def is_done(self, handle):
        if self.error:
            raise PoolError(self.error)
        if not self.let.acquire(blocking=False):
            return False
        ctypes.memmove(*self.running[handle])
        return True

    def release(self, handle):
        del self.running[handle]
        self.running[-1 - handle] = None


@pytest.fixture
def transfers():
    return Transfers()


@pytest.fixture
def ended():
    return queue.Queue()


@pytest.fixture
def fetcher(transfers, ended):
    made = Fetcher(transfers, ended.put)
    yield made
    made.close()


def place(memory, offset=0):
    return ctypes.addressof(ctypes.c_char.from_buffer(memory)) + offset


def record(offset=0, nbytes=NBYTES):
    return Record(Kind.PUBLISH, 1, address=Address.of(1, Tier.HOST, offset, 1), size=nbytes)


def test_the_head_of_an_entry_comes_last_so_that_what_has_one_is_whole(fetcher, transfers, ended):
    source, target = bytearray(b"x" * NBYTES), bytearray(NBYTES)
    fetcher.fetch(Fetch(record(), "far", place(source), place(target)))
    assert transfers.begun.get(timeout=PATIENCE) == (place(source) + HEAD_BYTES, NBYTES - HEAD_BYTES)
    transfers.let.release()
    assert transfers.begun.get(timeout=PATIENCE) == (place(source), HEAD_BYTES)
    assert target == bytes(HEAD_BYTES) + source[HEAD_BYTES:]
    assert ended.empty()
    source[:8] = bytes(8)  # its owner gives the room away meanwhile
    transfers.let.release()
    assert ended.get(timeout=PATIENCE) == record()
    assert target == source


def test_what_goes_to_the_same_place_waits_for_what_came_before(fetcher, transfers, ended):
    source, target = bytearray(3 * HEAD_BYTES), bytearray(3 * HEAD_BYTES)
    for offset in (0, HEAD_BYTES):
        fetch = record(offset, 2 * HEAD_BYTES)
        fetcher.fetch(Fetch(fetch, "far", place(source, offset), place(target, offset)))
    for start in (1, 0, 2, 1):
        assert transfers.begun.get(timeout=PATIENCE) == (place(source, start * HEAD_BYTES), HEAD_BYTES)
        with pytest.raises(queue.Empty):
            transfers.begun.get(timeout=0.02)
        transfers.let.release()
    assert [ended.get(timeout=PATIENCE).address.offset for _ in range(2)] == [0, HEAD_BYTES]


def test_why_an_entry_cannot_come_is_told_when_a_death_would_have_been(fetcher, transfers, ended, monkeypatch):
    monkeypatch.setattr(fetcher_module, "_LIVENESS_SECONDS", 0.2)
    source, target = bytearray(NBYTES), bytearray(NBYTES)
    transfers.error = "The other host is gone."
    fetcher.fetch(Fetch(record(), "far", place(source), place(target)))
    with pytest.raises(queue.Empty):
        ended.get(timeout=0.1)
    assert ended.get(timeout=PATIENCE).payload == b"The other host is gone."


def test_what_is_still_on_its_way_at_the_end_is_given_up(transfers, ended):
    source, target = bytearray(NBYTES), bytearray(NBYTES)
    fetcher = Fetcher(transfers, ended.put)
    fetcher.fetch(Fetch(record(), "far", place(source), place(target)))
    transfers.begun.get(timeout=PATIENCE)
    fetcher.close()
    assert ended.empty()
    assert list(transfers.running) == [-1], "no transfer writes any more"
