"""Control records are checked before they are believed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain_lightning.pool import PoolError
from flowtrain_lightning.pool.record import RECORD_BYTES, Kind, Record, decode_record, encode_record

words = st.integers(0, (1 << 64) - 1)
records = st.builds(
    Record,
    kind=st.sampled_from(Kind),
    sender=st.integers(0, (1 << 16) - 1),
    link=st.integers(0, (1 << 32) - 1),
    channel=st.integers(0, 255),
    number=words,
    address=words,
    size=words,
    start=words,
)
RECORD = Record(Kind.PUBLISH, 1, 2, 3, 4, 5, 6, 7)


@given(records, st.binary(max_size=100))
def test_every_record_comes_back_as_it_was(record, payload):
    message = encode_record(record, payload)
    assert len(message) == RECORD_BYTES + len(payload)
    assert decode_record(message, record.sender) == (record, payload)


def test_no_flipped_bit_goes_unnoticed():
    message = encode_record(RECORD, b"payload")
    for bit in range(len(message) * 8):
        damaged = bytearray(message)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(PoolError, match="A control record from rank 1 was refused"):
            decode_record(bytes(damaged), 1)


@given(st.binary(max_size=2 * RECORD_BYTES))
def test_noise_is_refused(message):
    with pytest.raises(PoolError, match="an unknown process was refused"):
        decode_record(message)


def test_a_message_that_was_cut_or_lengthened_is_refused():
    message = encode_record(RECORD, b"payload")
    for damaged in (message[:-1], message + b"x", message[:RECORD_BYTES], message[: RECORD_BYTES - 1], b""):
        with pytest.raises(PoolError):
            decode_record(damaged, 1)


def test_nobody_can_speak_for_another_rank():
    with pytest.raises(PoolError, match="claims to come from rank 1"):
        decode_record(encode_record(RECORD), 2)
