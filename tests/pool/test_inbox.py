"""Records through shared memory: none is lost, twice, or out of its order, and whoever sleeps is woken."""

import os
import random
import select
import threading
import time

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from flowtrain_lightning.pool import PoolError
from flowtrain_lightning.pool.inbox import ORDERED_STORES, PLACES, Inbox, Slot, inbox_bytes
from flowtrain_lightning.pool.memory import create_memory, map_memory
from flowtrain_lightning.pool.record import MAX_PAYLOAD, RECORD_BYTES, Kind, Record, encode_record
from tests.pool.ranks import join_job, meshes
from tests.processes import assert_all_good, run_ranks

START, RANKS = 64, 3

pytestmark = pytest.mark.skipif(not ORDERED_STORES, reason="this processor reorders stores: inboxes are not used")


class Box:
    """An inbox of rank 0 and the slots of its peers in it, all in this process."""

    def __init__(self):
        descriptor = create_memory("test", START + inbox_bytes(RANKS))
        self.memory = map_memory(descriptor, START + inbox_bytes(RANKS))
        os.close(descriptor)
        self.bell = os.eventfd(0, os.EFD_NONBLOCK)
        self.inbox = Inbox(self.memory, START, RANKS)
        self.slots = {peer: Slot(self.memory, START, RANKS, peer, os.dup(self.bell)) for peer in (1, 2)}

    def close(self):
        os.close(self.bell)
        for slot in self.slots.values():
            slot.close()

    def rings(self):
        """How often the bell was rung since it was last asked."""
        return os.eventfd_read(self.bell) if select.select([self.bell], [], [], 0)[0] else 0


@pytest.fixture
def box():
    made = Box()
    yield made
    made.close()


def message(peer, place):
    return encode_record(Record(Kind.RELEASE, peer, number=place), place)


class InboxUse(RuleBasedStateMachine):
    """Peers put records in, the reader takes them out, sleeps and wakes, in any order."""

    def __init__(self):
        super().__init__()
        self.box = Box()
        self.put = {1: 0, 2: 0}
        self.taken = {1: 0, 2: 0}
        self.asleep = False
        self.unheard = False

    @rule(peer=st.sampled_from([1, 2]), count=st.sampled_from([1, 2, PLACES]))
    def put_in(self, peer, count):
        for _ in range(count):
            accepted = self.box.slots[peer].put(message(peer, self.put[peer]))
            assert accepted == (self.put[peer] - self.taken[peer] < PLACES), "refused exactly when there is no place"
            self.put[peer] += accepted
            self.unheard |= self.asleep and accepted

    @rule()
    def take(self):
        for place, record in self.box.inbox.take():
            assert (record.number, place) == (self.taken[record.sender], self.taken[record.sender])
            self.taken[record.sender] += 1
        assert self.taken == self.put

    @precondition(lambda self: not self.asleep)
    @rule()
    def fall_asleep(self):
        self.box.inbox.fall_asleep()
        self.asleep = True

    @precondition(lambda self: self.asleep)
    @rule()
    def wake_up(self):
        rings = self.box.rings()
        assert (rings > 0) == self.unheard, "the bell is rung if and only if something came during the sleep"
        assert rings <= 2, "once by each peer"
        self.box.inbox.wake_up()
        self.asleep = self.unheard = False

    def teardown(self):
        self.box.close()


TestInboxUse = InboxUse.TestCase
TestInboxUse.settings = settings(max_examples=40, deadline=None)


def test_a_flipped_bit_is_an_error_or_nothing_at_all_but_never_another_record(box):
    for place in range(3):
        box.slots[1].put(message(1, place))
    expected = [(place, Record(Kind.RELEASE, 1, number=place)) for place in range(3)]
    counts, ring = START * 8, box.slots[1]._ring * 8
    for bit in (*range(counts, counts + 128 * 8), *range(ring, ring + 3 * RECORD_BYTES * 8)):
        box.memory[bit // 8] ^= 1 << bit % 8
        try:
            found = Inbox(box.memory, START, RANKS).take()
        except PoolError:
            found = []
        assert found in ([], expected, expected[:1], expected[:2])
        box.memory[bit // 8] ^= 1 << bit % 8


def test_a_flipped_bit_of_what_the_reader_has_taken_is_an_error_or_nothing_at_all_but_never_another_record(box):
    slot = box.slots[1]
    for bit in range(64):
        box.inbox = Inbox(box.memory, START, RANKS)
        slot._count = slot._words[slot._count_word] = slot._words[slot._taken_word] = 0
        put = sum(slot.put(message(1, place)) for place in range(PLACES // 2))
        slot._words[slot._taken_word] ^= 1 << bit
        put += sum(slot.put(message(1, place)) for place in range(put, 2 * PLACES))
        try:
            found = box.inbox.take()
        except PoolError:
            found = []
        assert found in ([], [(place, Record(Kind.RELEASE, 1, number=place)) for place in range(put)])


def test_a_count_that_no_peer_can_have_reached_is_refused(box):
    box.slots[1]._words[box.slots[1]._count_word] = PLACES + 1
    with pytest.raises(PoolError, match="of which 0 are read"):
        box.inbox.take()


def test_a_peer_whose_place_is_damaged_turns_to_the_socket(box):
    for word in (1 << 63, 5):
        box.slots[1]._words[box.slots[1]._taken_word] = word
        assert not box.slots[1].put(message(1, 0))


def test_no_wake_up_is_lost_between_falling_asleep_and_a_record():
    box, count = Box(), 20_000
    poll = select.poll()
    poll.register(box.bell, select.POLLIN)

    def put_all():
        choose = random.Random(0)
        for place in range(count):
            while not box.slots[1].put(message(1, place)):
                time.sleep(0)
            if choose.random() < 0.3:
                time.sleep(0)

    writer = threading.Thread(target=put_all)
    writer.start()
    taken = 0
    while taken < count:
        box.inbox.fall_asleep()
        found = box.inbox.take()
        if not found:
            assert poll.poll(10_000), "a record came and nobody rang"
            os.eventfd_read(box.bell)
        box.inbox.wake_up()
        taken += len(found)
    writer.join()
    box.close()


def test_records_keep_their_order_whichever_way_they_go():
    choose = random.Random(1)
    with meshes(2) as (one, other):
        sent, got = [], []
        for number in range(3 * PLACES):
            size = choose.choice([0, 0, 0, 1, MAX_PAYLOAD])
            one.send(1, Record(Kind.STATUS, 0, number=number, payload=bytes(size)))
            sent.append((number, size))
            if choose.random() < 0.02:
                got += other.receive()
        deadline = time.monotonic() + 20
        while len(got) < len(sent) and time.monotonic() < deadline:
            got += other.receive(0.05)
            one.receive()
        assert [(record.number, len(record.payload)) for record in got] == sent


def test_a_record_that_comes_twice_is_refused():
    with meshes(2) as (one, other):
        one.send(1, Record(Kind.RELEASE, 0))
        assert len(other.receive(5)) == 1
        one._sent[1] = 0
        one.send(1, Record(Kind.RELEASE, 0))
        with pytest.raises(PoolError, match="it came twice"):
            other.receive(5)


def ping_pong(rank, ranks, rounds):
    """Each rank sleeps until the other one has answered, in processes of their own."""
    mesh = join_job(rank, ranks)
    for turn in range(rounds):
        if rank == turn % 2:
            mesh.send(1 - rank, Record(Kind.RELEASE, rank, number=turn))
        else:
            start, got = time.monotonic(), []
            while not got:
                got = mesh.receive(20)
                assert time.monotonic() - start < 15, "a wake-up was lost"
            assert got[0].number == turn
    mesh.close()


def test_two_processes_wake_each_other_thousands_of_times():
    assert_all_good(run_ranks(ping_pong, 2, arguments=[10_000]))


def test_what_is_longer_than_a_place_does_not_go_into_an_inbox(box):
    box.slots[1].put(encode_record(Record(Kind.STATUS, 1, payload=b"x"), 1)[:RECORD_BYTES])
    with pytest.raises(PoolError, match="longer than its place"):
        box.inbox.take()
