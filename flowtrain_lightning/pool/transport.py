"""How entries get from their owner to their readers: the interface that every way of doing so fills."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from flowtrain_lightning.pool.address import Address
from flowtrain_lightning.pool.entry import Memory
from flowtrain_lightning.pool.errors import PoolError
from flowtrain_lightning.pool.key import Key
from flowtrain_lightning.pool.link import Link
from flowtrain_lightning.pool.record import Kind, Record

_new = tuple.__new__  # half the time of a call of the class, once per entry


class Publication(NamedTuple):
    """What a reader knows of an entry that was published to it.

    Attributes:
        key: the entry's name.
        number: the key, packed; its channel stands beside it.
        address: where its owner keeps it.
        nbytes: room that it takes, header included.
    """

    key: Key
    number: int
    address: Address
    nbytes: int

    @classmethod
    def from_record(cls, record: Record) -> Publication:
        """The publication that a record tells of, checked for what can be checked without its memory.

        Raises:
            PoolError: when it tells of an address that is not its sender's.
        """
        address, number = Address(record.address), record.number
        if address.owner != record.sender:
            raise PoolError(f"Rank {record.sender} published {address!r}, which is not its own.")
        return _new(cls, (Key.unpack(record.channel, number), number, address, record.size))

    def send(self, link: Link, peer: int, kind: Kind) -> None:
        """Tell ``peer`` something about this entry."""
        key, number, address, nbytes = self
        link.send(peer, Record(kind, link.rank, link.number, key.channel, number, address, nbytes))


class Transport(Protocol):
    """Carries published entries from their owner to their readers, and the readers' releases back.

    The pool keeps the books; a transport only moves bytes and records. Adding one means filling these methods; the
    contract tests say what they must do.
    """

    name: str

    def announce(self) -> None:
        """Tell all peers of the own segment."""

    def ready(self) -> bool:
        """Whether the segments of all peers are known."""

    def publish(self, reader: int, publication: Publication) -> None:
        """Make an entry of the own segment readable by ``reader``. Never waits."""

    def receive(self, record: Record) -> Publication | None:
        """Take a record that is not for the pool's books.

        Returns:
            The publication that became readable by it, if one did.

        Raises:
            PoolError: when it tells of bytes outside of its sender's segment.
        """

    def locate(self, publication: Publication) -> tuple[Memory, int]:
        """The memory that holds a readable entry, and where in it the entry begins."""

    def release(self, publication: Publication) -> None:
        """Tell the owner that this reader has done with an entry, and drop what was kept of it."""

    def close(self) -> None:
        """Drop all memory."""
