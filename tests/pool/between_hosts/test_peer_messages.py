"""Only so much is on its way to a rank, all else waits in order; and entries come whole out of their messages."""

import random

import pytest

from flowtrain_lightning.pool import PoolError
from flowtrain_lightning.pool.address import Address, Tier
from flowtrain_lightning.pool.between_hosts.peer_messages import MAX_MESSAGE_BYTES, PIECE_BYTES, EntryReceiver, Outbox
from flowtrain_lightning.pool.control_records import ControlRecord, Kind, encode_record


def sent_by(outbox):
    found = []
    while outbox.ready:
        found.append(outbox.first())
        outbox.is_sent()
    return found


def test_messages_wait_in_order_until_those_before_them_have_arrived():
    outbox = Outbox(b"1/records", window=2)
    for message in (b"a", b"b", b"c", b"d", b"e"):
        outbox.add(message)
    assert sent_by(outbox) == [b"a", b"b"]
    assert outbox.acknowledge(1)
    assert sent_by(outbox) == [b"c"]
    assert outbox.acknowledge(3)
    assert sent_by(outbox) == [b"d", b"e"]
    assert not outbox.settled
    assert outbox.acknowledge(5)
    assert outbox.settled


def test_more_than_was_sent_or_less_than_before_cannot_have_arrived():
    outbox = Outbox(b"1/records", window=2)
    outbox.add(b"a")
    sent_by(outbox)
    assert not outbox.acknowledge(2)
    assert outbox.acknowledge(1)
    assert not outbox.acknowledge(0)


def test_of_pages_only_the_newest_waits():
    outbox = Outbox(b"1/pages", window=1)
    for page in (b"old", b"new"):
        outbox.replace(page)
    assert sent_by(outbox) == [b"new"]


def test_nothing_is_waited_for_from_a_rank_that_is_lost():
    outbox = Outbox(b"1/records", window=1)
    for message in (b"a", b"b"):
        outbox.add(message)
    sent_by(outbox)
    outbox.drop()
    assert outbox.settled
    assert not outbox.ready


SEGMENT = 8 << 20


def segment(sender=0, link=1):
    return ControlRecord(Kind.SEGMENT, sender, link, size=SEGMENT)


def entry(offset=0, size=64, sender=0, link=1):
    return ControlRecord(Kind.PUBLISH, sender, link, address=Address.of(sender, Tier.HOST, offset, 1), size=size)


def messages_of(record, content=b""):
    outbox = Outbox(b"0/entries", window=1 << 20)
    outbox.add_entry(record, memoryview(content))
    while outbox.ready:
        yield bytes(outbox.first())
        outbox.is_sent()


@pytest.fixture
def receiver():
    made = EntryReceiver(0)
    (message,) = messages_of(segment())
    assert made.take(memoryview(message)) == segment()
    return made


def test_entries_of_any_size_come_whole(receiver):
    for size in (1, 64, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 10 * PIECE_BYTES + 17):
        content = random.Random(size).randbytes(size)
        messages = list(messages_of(entry(size=size), content))
        assert max(map(len, messages)) < MAX_MESSAGE_BYTES
        *none, whole = [receiver.take(memoryview(message)) for message in messages]
        assert not any(none)
        assert whole == entry(size=size)._replace(payload=content)


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
def test_what_no_rank_can_have_put_is_refused_before_there_is_memory_for_it(receiver, record):
    with pytest.raises(PoolError, match="outside of its segment or is no entry"):
        receiver.take(memoryview(encode_record(record)))


def test_more_bytes_than_an_entry_has_are_refused(receiver):
    with pytest.raises(PoolError, match="Rank 0 sent more than the 64 bytes"):
        receiver.take(memoryview(encode_record(entry()) + bytes(65)))


def test_every_flipped_bit_of_a_record_is_noticed():
    message = encode_record(segment())
    for bit in range(8 * len(message)):
        damaged = bytearray(message)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(PoolError, match="A control record from rank 0 was refused"):
            EntryReceiver(0).take(memoryview(damaged))
