"""Entries come whole out of the messages that bring them, and what no rank can have put is refused."""

import random

import pytest

from flowtrain_lightning.pool import PoolError
from flowtrain_lightning.pool.address import Address, Tier
from flowtrain_lightning.pool.between_hosts.entry_pieces import EntryReceiver
from flowtrain_lightning.pool.between_hosts.outbox import MAX_MESSAGE_BYTES, PIECE_BYTES, Outbox
from flowtrain_lightning.pool.control_records import ControlRecord, Kind, encode_record

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
