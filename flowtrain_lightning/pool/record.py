"""Control records: what processes tell each other, in a fixed binary form that is checked before it is believed."""

from __future__ import annotations

import struct
import zlib
from enum import IntEnum
from typing import NamedTuple

from flowtrain_lightning.pool.errors import PoolError

MAX_PAYLOAD = 32 * 1024
"""Bytes that may follow a record."""


class Kind(IntEnum):
    """What a record says. The fields of `Record` that a kind uses are named in brackets."""

    HELLO = 1
    """I am ``sender`` of ``number`` ranks; my status page and my bell are attached."""
    GOODBYE = 2
    """I leave in good order; this is no death."""
    SEGMENT = 3
    """My segment has ``size`` bytes; its memory is attached, if the transport shares any."""
    PUBLISH = 4
    """The entry ``channel, number`` of ``size`` bytes lies at ``address``."""
    RELEASE = 5
    """I have done with the entry ``channel, number`` at ``address``."""
    STATUS = 6
    """The payload is what my status page says; for ranks that cannot see it."""
    BLOCK = 7
    """My block of device memory has ``size`` bytes; the payload names it and ``number`` events. 0: I have none."""
    BLOCK_READ = 8
    """I can read your block; the payload names ``number`` events of mine. 0: I cannot, for that reason."""
    BLOCK_CLOSED = 9
    """I read your block no more."""


class Record(NamedTuple):
    """One control record: 64 bytes on the way, and what follows them.

    Attributes:
        kind: what it says.
        sender: rank that says it.
        link: number of the link, and so of the pool, that it belongs to.
        channel: of a key.
        number: a key but for its channel, or a count.
        address: of an entry.
        size: bytes.
        start: bytes.
        payload: up to ``MAX_PAYLOAD`` bytes that follow; of an entry that came over the network, all of its bytes.
        descriptors: what came along; the receiver closes them.
    """

    kind: Kind
    sender: int
    link: int = 0
    channel: int = 0
    number: int = 0
    address: int = 0
    size: int = 0
    start: int = 0
    payload: bytes | bytearray = b""
    descriptors: tuple[int, ...] = ()


Numbered = tuple[int, Record]
"""A record and its place, from 1 on, among all that its sender has sent to this receiver."""

_MAGIC = 0x464C5432
# magic, kind, channel, sender, link, bytes of the payload, place, number, address, size, start, checksum of the payload
_BODY = struct.Struct("<IBBHIIQQQQQI")
_CHECKSUM = struct.Struct("<I")  # of the body alone, so that the payload's length is checked before it is believed
_BODY_BYTES = _BODY.size
RECORD_BYTES = _BODY_BYTES + _CHECKSUM.size
_WHOLE = struct.Struct(_BODY.format + "I")
_KINDS = {int(kind): kind for kind in Kind}
_new = tuple.__new__  # half the time of a call of the class, once per record that arrives


def encode_record(record: Record, place: int = 0) -> bytes:
    """The bytes that carry ``record``, but for its descriptors."""
    kind, sender, link, channel, number, address, size, start, payload, _ = record
    length, payload_sum = len(payload), zlib.crc32(payload) if payload else 0
    body = _BODY.pack(_MAGIC, kind, channel, sender, link, length, place, number, address, size, start, payload_sum)
    return body + _CHECKSUM.pack(zlib.crc32(body)) + payload


def decode_records(arrived: bytes, sender: int | None = None) -> tuple[list[Numbered], int]:
    """The records at the start of a stream of bytes.

    Args:
        arrived: as many bytes as have arrived; the last record may be cut.
        sender: the rank that they must come from; None while that is not known yet.

    Returns:
        What is whole, and how many bytes that is. The rest waits for what arrives later.

    Raises:
        PoolError: when anything about a record is not as `encode_record` makes it.
    """
    found: list[Numbered] = []
    begin, available = 0, len(arrived)
    while available - begin >= RECORD_BYTES:
        fields = _WHOLE.unpack_from(arrived, begin)
        magic, kind, channel, said, link, length, place, number, address, size, start, payload_sum, checksum = fields
        if zlib.crc32(arrived[begin : begin + _BODY_BYTES]) != checksum:
            raise PoolError(_damaged(sender, "its checksum does not match"))
        if magic != _MAGIC or kind not in _KINDS or length > MAX_PAYLOAD:
            raise PoolError(_damaged(sender, "it is none that this version knows; do all ranks run the same version?"))
        if said != sender and sender is not None:
            raise PoolError(_damaged(sender, f"it claims to come from rank {said}"))
        end = begin + RECORD_BYTES + length
        if end > available:
            break
        payload = arrived[begin + RECORD_BYTES : end] if length else b""
        if payload_sum != zlib.crc32(payload):
            raise PoolError(_damaged(sender, "the checksum of what follows it does not match"))
        found.append(
            (place, _new(Record, (_KINDS[kind], said, link, channel, number, address, size, start, payload, ())))
        )
        begin = end
    return found, begin


def decode_record(message: bytes, sender: int | None = None) -> Record:
    """The record that these bytes are, no more and no less; see `decode_records`.

    Raises:
        PoolError: also when they are more or less than one record.
    """
    found, nbytes = decode_records(message, sender)
    if len(found) != 1 or nbytes != len(message):
        raise PoolError(_damaged(sender, f"{len(message)} bytes came that are not one whole record"))
    return found[0][1]


def _damaged(sender: int | None, why: str) -> str:
    who = "an unknown process" if sender is None else f"rank {sender}"
    return f"A control record from {who} was refused: {why}."
