"""Control records: what processes tell each other, in a fixed binary form that is checked before it is believed."""

from __future__ import annotations

import struct
import zlib
from enum import IntEnum
from typing import NamedTuple

from flowtrain_lightning.pool.errors import PoolError

MAX_PAYLOAD = 32 * 1024
"""Bytes that may follow a record in the same message."""


class Kind(IntEnum):
    """What a record says. The fields of `Record` that a kind uses are named in brackets."""

    HELLO = 1
    """I am ``sender`` of ``number`` ranks; my status page is attached."""
    GOODBYE = 2
    """I leave in good order; this is no death."""
    SEGMENT = 3
    """My segment has ``size`` bytes; its memory is attached, if the transport shares any."""
    PUBLISH = 4
    """The entry ``channel, number`` of ``size`` bytes lies at ``address``."""
    DATA = 5
    """The payload is what the entry at ``address`` holds from byte ``start`` on."""
    RELEASE = 6
    """I have done with the entry ``channel, number`` at ``address``."""


class Record(NamedTuple):
    """One control record: 52 bytes on the wire.

    Attributes:
        kind: what it says.
        sender: rank that says it.
        link: number of the link, and so of the pool, that it belongs to.
        channel: of a key.
        number: index and item of a key, or a count.
        address: packed address of an entry.
        size: bytes.
        start: bytes.
    """

    kind: Kind
    sender: int
    link: int = 0
    channel: int = 0
    number: int = 0
    address: int = 0
    size: int = 0
    start: int = 0


_MAGIC = 0x464C5431
_BODY = struct.Struct("<IBBHIIQQQQ")
_CHECKSUM = struct.Struct("<I")
RECORD_BYTES = _BODY.size + _CHECKSUM.size
_KINDS = {int(kind): kind for kind in Kind}


def encode_record(record: Record, payload: bytes = b"") -> bytes:
    """The message that carries ``record`` and at most ``MAX_PAYLOAD`` bytes after it."""
    kind, sender, link, channel, number, address, size, start = record
    body = _BODY.pack(_MAGIC, kind, channel, sender, link, len(payload), number, address, size, start)
    checksum = zlib.crc32(payload, zlib.crc32(body))
    return body + _CHECKSUM.pack(checksum) + payload


def decode_record(message: bytes, sender: int | None = None) -> tuple[Record, bytes]:
    """The record and payload of a message.

    Args:
        message: the bytes of one whole message.
        sender: the rank that this connection belongs to; None while that is not known yet.

    Raises:
        PoolError: when anything about the message is not as `encode_record` makes it.
    """
    if len(message) < RECORD_BYTES:
        raise PoolError(_damaged(sender, f"it has {len(message)} bytes instead of {RECORD_BYTES} or more"))
    body, payload = message[: _BODY.size], message[RECORD_BYTES:]
    (checksum,) = _CHECKSUM.unpack_from(message, _BODY.size)
    if zlib.crc32(payload, zlib.crc32(body)) != checksum:
        raise PoolError(_damaged(sender, "its checksum does not match"))
    magic, kind, channel, said_sender, link, length, number, address, size, start = _BODY.unpack(body)
    if magic != _MAGIC or kind not in _KINDS or length != len(payload):
        raise PoolError(_damaged(sender, "it is none that this version knows; do all ranks run the same version?"))
    if sender is not None and said_sender != sender:
        raise PoolError(_damaged(sender, f"it claims to come from rank {said_sender}"))
    return Record(_KINDS[kind], said_sender, link, channel, number, address, size, start), payload


def _damaged(sender: int | None, why: str) -> str:
    who = "an unknown process" if sender is None else f"rank {sender}"
    return f"A control record from {who} was refused: {why}."
