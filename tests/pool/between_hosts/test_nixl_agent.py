"""The thread that fetches entries, with memory of this process instead of another host's."""

import ctypes
import queue
import threading

import pytest

from flowtrain_lightning.pool import Address, PoolError, Tier
from flowtrain_lightning.pool.between_hosts import nixl_agent
from flowtrain_lightning.pool.between_hosts.nixl_agent import Fetch, Fetcher
from flowtrain_lightning.pool.control_records import ControlRecord, Kind
from flowtrain_lightning.pool.shared_memory import first_byte_of

NBYTES = 256
SECONDS = 60


class Transfers:
    """Stands for NIXL: a transfer is done when a test lets it."""

    def __init__(self):
        self.begun = queue.Queue()  # first byte of the source of each transfer
        self.let = threading.Semaphore(0)
        self.running = {}
        self.handles = 0
        self.error = None

    def read(self, name, source, target, nbytes):
        self.handles += 1
        self.running[self.handles] = target, source, nbytes
        self.begun.put(source)
        return self.handles

    def is_done(self, handle):
        if self.error:
            raise PoolError(self.error)
        if not self.let.acquire(blocking=False):
            return False
        ctypes.memmove(*self.running[handle])
        return True

    def release(self, handle):
        del self.running[handle]


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


def record(offset=0):
    return ControlRecord(Kind.PUBLISH, 1, address=Address.of(1, Tier.HOST, offset, 1), size=NBYTES)


def fetch_of(source, target, offset=0):
    return Fetch(record(offset), "remote", first_byte_of(source) + offset, first_byte_of(target) + offset)


def test_an_entry_is_told_of_when_all_of_it_is_here(fetcher, transfers, ended):
    source, target = bytearray(b"x" * NBYTES), bytearray(NBYTES)
    fetcher.fetch(fetch_of(source, target))
    assert transfers.begun.get(timeout=SECONDS) == first_byte_of(source)
    assert ended.empty()
    transfers.let.release()
    assert ended.get(timeout=SECONDS) == record()
    assert target == source


def test_so_many_transfers_run_at_once_and_others_follow(fetcher, transfers, ended):
    source, target = bytearray(40 * NBYTES), bytearray(40 * NBYTES)
    for number in range(20):
        fetcher.fetch(fetch_of(source, target, number * NBYTES))
    begun = [transfers.begun.get(timeout=SECONDS) for _ in range(16)]
    with pytest.raises(queue.Empty):
        transfers.begun.get(timeout=0.05)
    for _ in range(20):
        transfers.let.release()
    begun += [transfers.begun.get(timeout=SECONDS) for _ in range(4)]
    assert begun == [first_byte_of(source) + number * NBYTES for number in range(20)]
    assert sorted(ended.get(timeout=SECONDS).address.offset for _ in range(20)) == [n * NBYTES for n in range(20)]


def test_why_an_entry_cannot_come_is_told_when_a_death_would_have_been(fetcher, transfers, ended, monkeypatch):
    monkeypatch.setattr(nixl_agent, "LIVENESS_SECONDS", 0.2)
    source, target = bytearray(NBYTES), bytearray(NBYTES)
    transfers.error = "The other host is gone."
    fetcher.fetch(fetch_of(source, target))
    with pytest.raises(queue.Empty):
        ended.get(timeout=0.1)
    assert ended.get(timeout=SECONDS).payload == b"The other host is gone."


def test_what_is_still_on_its_way_at_the_end_is_given_up(transfers, ended):
    source, target = bytearray(NBYTES), bytearray(NBYTES)
    fetcher = Fetcher(transfers, ended.put)
    fetcher.fetch(fetch_of(source, target))
    transfers.begun.get(timeout=SECONDS)
    fetcher.close()
    assert ended.empty()
    assert not transfers.running, "no transfer writes any more"
