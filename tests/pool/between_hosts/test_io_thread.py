"""The thread that sends entries to other hosts and receives theirs."""

import socket
import time
from collections import deque

import pytest

from flowtrain_lightning.pool.address import Address, Tier
from flowtrain_lightning.pool.between_hosts.io_thread import IoThread
from flowtrain_lightning.pool.control_records import ControlRecord, Kind, encode_record

SEGMENT = 8 << 20


def wait_until(holds, seconds=60.0):
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not come true in time"
        time.sleep(0.005)


def segment(sender=0, link=1):
    return ControlRecord(Kind.SEGMENT, sender, link, size=SEGMENT)


def entry(offset=0, size=64, sender=0, link=1, generation=1):
    return ControlRecord(
        Kind.PUBLISH, sender, link, address=Address.of(sender, Tier.HOST, offset, generation), size=size
    )


class Pair:
    """I/O threads of ranks 0 and 1."""

    def __init__(self):
        self.ends = socket.socketpair()
        for end in self.ends:
            end.setblocking(False)
        self.arrived, self.failures = (deque(), deque()), ([], [])
        self.threads = [self.start(rank) for rank in (0, 1)]

    def start(self, rank):
        def fail(sentence, blamed):
            self.failures[rank].append((sentence, blamed))

        return IoThread({1 - rank: self.ends[rank]}, self.arrived[rank], lambda: None, fail)


@pytest.fixture
def pair():
    made = Pair()
    yield made
    for thread in made.threads:
        thread.close()


def test_entries_arrive_whole_and_in_order_both_ways(pair):
    contents = [bytes([number]) * (1 + number * 40_000) for number in range(30)]
    for rank in (0, 1):
        pair.threads[rank].send(1 - rank, segment(rank), memoryview(b""))
        for number, content in enumerate(contents):
            record = entry(64 * number, len(content), rank)
            pair.threads[rank].send(1 - rank, record, memoryview(content))
    for rank in (0, 1):
        wait_until(lambda rank=rank: len(pair.arrived[rank]) == 31)
        assert pair.arrived[rank][0].kind is Kind.SEGMENT
        assert [record.payload for record in list(pair.arrived[rank])[1:]] == contents
    wait_until(lambda: not pair.threads[0].busy and not pair.threads[1].busy)
    assert pair.failures == ([], [])


def test_sending_returns_at_once_though_nobody_reads():
    one, other = socket.socketpair()
    one.setblocking(False)
    thread = IoThread({1: one}, deque(), lambda: None, lambda *_: None)
    start = time.monotonic()
    for number in range(50):
        thread.send(1, entry(64 * number, 1 << 20), memoryview(bytes(1 << 20)))
    assert time.monotonic() - start < 20
    assert thread.busy
    thread.close()
    other.close()


@pytest.mark.parametrize(
    "record",
    [
        entry(size=64, link=2),
        entry(offset=SEGMENT, size=64),
        entry(offset=0, size=SEGMENT + 64),
        entry(size=0),
        ControlRecord(Kind.RELEASE, 0, 1),
        segment(),
    ],
    ids=["unknown segment", "behind its end", "larger than it", "nothing", "no entry", "announced twice"],
)
def test_what_no_rank_can_have_put_is_refused_before_there_is_memory_for_it(pair, record):
    pair.threads[0].send(1, segment(), memoryview(b""))
    pair.threads[0].send(1, record, memoryview(b""))
    wait_until(lambda: pair.failures[1])
    sentence, blamed = pair.failures[1][0]
    assert "outside of its segment or is no entry" in sentence
    assert blamed == 0


def test_every_flipped_bit_of_a_record_is_noticed():
    message = encode_record(segment())
    for bit in range(0, 8 * len(message), 7):
        one, other = socket.socketpair()
        other.setblocking(False)
        failures, arrived = [], deque()
        thread = IoThread({0: other}, arrived, lambda: None, lambda *said, failures=failures: failures.append(said))
        damaged = bytearray(message)
        damaged[bit // 8] ^= 1 << bit % 8
        one.sendall(damaged)
        wait_until(lambda failures=failures: failures)
        assert not arrived
        thread.close()
        one.close()
