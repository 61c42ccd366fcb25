"""Control records are checked before they are believed."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowtrain_lightning.pool import PoolError
from flowtrain_lightning.pool.control_records import (
    MAX_PAYLOAD,
    RECORD_BYTES,
    ControlRecord,
    Kind,
    decode_record,
    decode_records,
    encode_record,
)

words = st.integers(0, (1 << 64) - 1)
records = st.builds(
    ControlRecord,
    kind=st.sampled_from(Kind),
    sender=st.integers(0, (1 << 16) - 1),
    link=st.integers(0, (1 << 32) - 1),
    channel=st.integers(0, 255),
    number=words,
    address=words,
    size=words,
    payload=st.binary(max_size=100),
    descriptors=st.just(()),
    sequence=words,
)
RECORD = ControlRecord(Kind.PUBLISH, 1, 2, 3, 4, 5, 6, b"payload")


@given(records)
def test_every_record_comes_back_as_it_was(record):
    message = encode_record(record, record.sequence)
    assert len(message) == RECORD_BYTES + len(record.payload)
    assert decode_records(message, record.sender) == ([record], len(message))


@settings(max_examples=50)
@given(st.lists(records.map(lambda record: record._replace(sender=1)), max_size=5), st.data())
def test_a_stream_that_is_cut_anywhere_gives_the_same_records(sent, data):
    stream = b"".join(encode_record(record, record.sequence) for record in sent)
    cut = data.draw(st.integers(0, len(stream)))
    first, nbytes = decode_records(stream[:cut], 1)
    assert nbytes <= cut
    rest, remaining = decode_records(stream[nbytes:], 1)
    assert first + rest == sent
    assert nbytes + remaining == len(stream)


@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("payload", [b"", b"payload"])
def test_no_flipped_bit_goes_unnoticed(kind, payload):
    message = encode_record(RECORD._replace(kind=kind, payload=payload), 8)
    for bit in range(len(message) * 8):
        damaged = bytearray(message)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(PoolError, match="A control record from rank 1 was refused"):
            decode_records(bytes(damaged), 1)


@settings(max_examples=50)
@given(st.binary(min_size=RECORD_BYTES, max_size=2 * RECORD_BYTES))
def test_noise_is_refused(message):
    with pytest.raises(PoolError, match="an unknown process was refused"):
        decode_records(message)


def test_a_message_that_was_cut_or_lengthened_is_not_one_record():
    message = encode_record(RECORD)
    for damaged in (
        message[:-1],
        message + b"x",
        message[:RECORD_BYTES],
        message[: RECORD_BYTES - 1],
        b"",
        2 * message,
    ):
        with pytest.raises(PoolError, match="not one whole record"):
            decode_record(damaged, 1)


def test_a_record_with_a_longer_payload_than_any_is_refused_before_that_arrives():
    message = encode_record(RECORD._replace(payload=bytes(MAX_PAYLOAD + 1)))
    with pytest.raises(PoolError, match="none that this version knows"):
        decode_records(message[:RECORD_BYTES], 1)


def test_nobody_can_speak_for_another_rank():
    with pytest.raises(PoolError, match="claims to come from rank 1"):
        decode_record(encode_record(RECORD), 2)
