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
from flowtrain_lightning.pool.control_records import (
    MAX_PAYLOAD,
    ORDERED_STORES,
    RECORD_BYTES,
    RING_RECORDS,
    ControlRecord,
    Inbox,
    InboxWriter,
    Kind,
    encode_record,
    inbox_bytes,
)
from flowtrain_lightning.pool.shared_memory import create_memory, map_memory
from tests.pool.ranks import join_job, mesh_and_bare_peer, meshes
from tests.processes import assert_all_good, run_ranks

START, RANKS = 64, 3
COUNTS, TAKEN = START + 64, START + 128
"""Where the layout has the numbers of records that were put in and taken out, of 8 bytes for each peer."""
RINGS = START + inbox_bytes(RANKS) - RANKS * RING_RECORDS * RECORD_BYTES

pytestmark = pytest.mark.skipif(not ORDERED_STORES, reason="this processor reorders stores: inboxes are not used")


class Box:
    """The inbox of rank 0 and the writers of its peers, all in this process."""

    def __init__(self):
        descriptor = create_memory("test", START + inbox_bytes(RANKS))
        self.memory = map_memory(descriptor, START + inbox_bytes(RANKS))
        os.close(descriptor)
        self.wake_event = os.eventfd(0, os.EFD_NONBLOCK)
        self.inbox = Inbox(self.memory, START, RANKS)
        self.writers = {peer: InboxWriter(self.memory, START, RANKS, peer, os.dup(self.wake_event)) for peer in (1, 2)}

    def close(self):
        os.close(self.wake_event)
        for writer in self.writers.values():
            writer.close()

    def wakes(self):
        """How often the wake event was set since this was last asked."""
        return os.eventfd_read(self.wake_event) if select.select([self.wake_event], [], [], 0)[0] else 0

    def flip(self, bit):
        self.memory[bit // 8] ^= 1 << bit % 8

    def set_word(self, offset, value):
        self.memory[offset : offset + 8] = value.to_bytes(8, "little")


@pytest.fixture
def box():
    made = Box()
    yield made
    made.close()


def record(peer, sequence):
    return ControlRecord(Kind.RELEASE, peer, number=sequence, sequence=sequence)


def message(peer, sequence):
    return encode_record(record(peer, sequence), sequence)


class InboxUse(RuleBasedStateMachine):
    """Peers put records in, the reader takes them out, sleeps and wakes, in any order."""

    def __init__(self):
        super().__init__()
        self.box = Box()
        self.put = {1: 0, 2: 0}
        self.taken = {1: 0, 2: 0}
        self.asleep = False
        self.unseen = False

    @rule(peer=st.sampled_from([1, 2]), count=st.sampled_from([1, 2, RING_RECORDS]))
    def put_in(self, peer, count):
        for _ in range(count):
            accepted = self.box.writers[peer].put(message(peer, self.put[peer]))
            assert accepted == (self.put[peer] - self.taken[peer] < RING_RECORDS), "refused exactly when it is full"
            self.put[peer] += accepted
            self.unseen |= self.asleep and accepted

    @rule()
    def take(self):
        for found in self.box.inbox.take():
            assert found.number == found.sequence == self.taken[found.sender]
            self.taken[found.sender] += 1
        assert self.taken == self.put

    @precondition(lambda self: not self.asleep)
    @rule()
    def fall_asleep(self):
        self.box.inbox.fall_asleep()
        self.asleep = True

    @precondition(lambda self: self.asleep)
    @rule()
    def wake_up(self):
        wakes = self.box.wakes()
        assert (wakes > 0) == self.unseen, "the reader is woken if and only if something came while it slept"
        assert wakes <= 2, "once by each peer"
        self.box.inbox.wake_up()
        self.asleep = self.unseen = False

    def teardown(self):
        self.box.close()


TestInboxUse = InboxUse.TestCase
TestInboxUse.settings = settings(max_examples=25)


def test_a_flipped_bit_is_an_error_or_nothing_but_never_another_record(box):
    expected = [record(1, sequence) for sequence in range(3)]
    for sequence in range(3):
        box.writers[1].put(message(1, sequence))
    ring = RINGS + RING_RECORDS * RECORD_BYTES
    for bit in (*range(COUNTS * 8, (COUNTS + 128) * 8), *range(ring * 8, (ring + 3 * RECORD_BYTES) * 8)):
        box.flip(bit)
        try:
            found = Inbox(box.memory, START, RANKS).take()
        except PoolError:
            found = []
        assert found in ([], expected, expected[:1], expected[:2])
        box.flip(bit)


@pytest.mark.parametrize("bit", range(64))
def test_a_flipped_bit_of_what_was_taken_never_shows_as_another_record(box, bit):
    writer = box.writers[1]
    put = sum(writer.put(message(1, sequence)) for sequence in range(RING_RECORDS // 2))
    box.flip((TAKEN + 8) * 8 + bit)
    put += sum(writer.put(message(1, sequence)) for sequence in range(put, 2 * RING_RECORDS))
    try:
        found = box.inbox.take()
    except PoolError:
        found = []
    assert found in ([], [record(1, sequence) for sequence in range(put)])


def test_a_count_that_no_peer_can_have_reached_is_refused(box):
    box.set_word(COUNTS + 8, RING_RECORDS + 1)
    with pytest.raises(PoolError, match="of which 0 are read"):
        box.inbox.take()


def test_a_peer_that_cannot_have_so_much_space_turns_to_the_socket(box):
    for taken in (1 << 63, 5):
        box.set_word(TAKEN + 8, taken)
        assert not box.writers[1].put(message(1, 0))


def test_a_record_with_a_payload_does_not_fit_into_an_inbox(box):
    box.writers[1].put(encode_record(ControlRecord(Kind.STATUS, 1, payload=b"x"), 1)[:RECORD_BYTES])
    with pytest.raises(PoolError, match="longer than an inbox can hold"):
        box.inbox.take()


def test_no_wake_up_is_lost_between_falling_asleep_and_a_record():
    box, count = Box(), 20_000
    poll = select.poll()
    poll.register(box.wake_event, select.POLLIN)

    def put_all():
        choose = random.Random(0)
        for sequence in range(count):
            while not box.writers[1].put(message(1, sequence)):
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
            assert poll.poll(60_000), "a record came and nobody set the wake event"
            os.eventfd_read(box.wake_event)
        box.inbox.wake_up()
        taken += len(found)
    writer.join()
    box.close()


def test_records_keep_their_order_whichever_way_they_go():
    choose = random.Random(1)
    with meshes(2) as (one, other):
        sent, got = [], []
        for number in range(3 * RING_RECORDS):
            size = choose.choice([0, 0, 0, 1, MAX_PAYLOAD])
            one.send(1, ControlRecord(Kind.STATUS, 0, number=number, payload=bytes(size)))
            sent.append((number, size))
            if choose.random() < 0.02:
                got += other.receive()
        deadline = time.monotonic() + 60
        while len(got) < len(sent) and time.monotonic() < deadline:
            got += other.receive(0.05)
            one.receive()
        assert [(found.number, len(found.payload)) for found in got] == sent


def test_a_record_that_comes_twice_is_refused():
    with mesh_and_bare_peer() as (mesh, peer):
        peer.local[0].socket.send(message(1, 1))
        assert len(mesh.receive(50)) == 1
        peer.local[0].socket.send(message(1, 1))
        with pytest.raises(PoolError, match="it came twice"):
            mesh.receive(50)


def ping_pong(rank, ranks, rounds):
    """Each rank sleeps until the other one has answered, in processes of their own."""
    mesh = join_job(rank, ranks)
    for turn in range(rounds):
        if rank == turn % 2:
            mesh.send(1 - rank, ControlRecord(Kind.RELEASE, rank, number=turn))
        else:
            got = mesh.receive(50)
            assert got, "a wake-up was lost"
            assert got[0].number == turn
    mesh.close()


def test_two_processes_wake_each_other_thousands_of_times():
    assert_all_good(run_ranks(ping_pong, 2, deadline=120, arguments=[10_000]))
