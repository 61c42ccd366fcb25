"""What a reader keeps of entries that reach it as bytes: a copy of each, until it gives the entry back."""

from __future__ import annotations

from flowtrain_lightning.pool.entry import Memory
from flowtrain_lightning.pool.link import Link
from flowtrain_lightning.pool.record import Kind
from flowtrain_lightning.pool.transport import Publication


class ReaderCopies:
    """The reader's half of a transport that shares no memory.

    Args:
        link: reaches all owners.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._copies: dict[int, bytearray] = {}  # address -> the entry

    def locate(self, publication: Publication) -> tuple[Memory, int]:
        """The reader's own copy."""
        return self._copies[publication.address], 0

    def release(self, publication: Publication) -> None:
        """Tell the owner, and drop the copy."""
        publication.send(self._link, publication.address.owner, Kind.RELEASE)
        self._copies.pop(publication.address, None)

    def close(self) -> None:
        """Drop all copies."""
        self._copies.clear()
