"""Entries of other hosts, put together from the messages in which they come."""

from __future__ import annotations

from flowtrain_lightning.pool.address import Address
from flowtrain_lightning.pool.control_records import RECORD_BYTES, ControlRecord, Kind, decode_record
from flowtrain_lightning.pool.pool_errors import PoolError


class EntryReceiver:
    """What is arriving from one rank: a record with the first bytes of the entry that it tells of, then the others.

    Only what an owner keeps in its segment can be on its way, so a reader needs no more memory for entries of an owner
    than that owner's segment has.

    Args:
        peer: the rank that sends.
    """

    def __init__(self, peer: int) -> None:
        self._peer = peer
        self._segments: dict[int, int] = {}  # link -> bytes of the peer's segment
        self._record: ControlRecord | None = None
        self._entry = bytearray()
        self._filled = 0

    def take(self, message: memoryview) -> ControlRecord | None:
        """Take in a message.

        Returns:
            The record that is whole by it, with the entry as its payload; None where more is to come.

        Raises:
            PoolError: when the peer sent what it cannot have put.
        """
        record = self._record
        if record is None:
            record = decode_record(bytes(message[:RECORD_BYTES]), self._peer)
            message = message[RECORD_BYTES:]
            if record.kind is Kind.SEGMENT and record.link not in self._segments and not message:
                self._segments[record.link] = record.size
                return record
            self._begin(record)
        end = self._filled + len(message)
        if end > len(self._entry):
            raise PoolError(f"Rank {self._peer} sent more than the {len(self._entry):,} bytes of {record}.")
        self._entry[self._filled : end] = message
        self._filled = end
        if end < len(self._entry):
            return None
        self._record, whole = None, self._entry
        return record._replace(payload=whole)

    def _begin(self, record: ControlRecord) -> None:
        end = Address(record.address).offset + record.size
        if record.kind is not Kind.PUBLISH or not 0 < record.size <= end <= self._segments.get(record.link, 0):
            raise PoolError(f"Rank {self._peer} sent {record}, which lies outside of its segment or is no entry.")
        try:
            self._entry = bytearray(record.size)
        except MemoryError:
            raise PoolError(
                f"There is no memory for an entry of {record.size:,} bytes from rank {self._peer}, which runs on "
                "another host. Lower `PoolSettings(bytes=...)` or run fewer ranks on this machine."
            ) from None
        self._record, self._filled = record, 0
