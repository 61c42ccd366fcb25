"""The pool as its users see it: put tensors in, get them elsewhere as views, give the room back."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from flowtrain_lightning.pool.address import Address, Tier
from flowtrain_lightning.pool.counters import Occupancy, PoolCounters, Waits
from flowtrain_lightning.pool.device.entries import DeviceEntries
from flowtrain_lightning.pool.device.tier import DeviceTier
from flowtrain_lightning.pool.entry import erase_entry, outline, read_entry, write_header, write_tensors
from flowtrain_lightning.pool.errors import PoolError
from flowtrain_lightning.pool.key import Key
from flowtrain_lightning.pool.lease import Lease
from flowtrain_lightning.pool.link import Link
from flowtrain_lightning.pool.mesh import Mesh
from flowtrain_lightning.pool.part import Part
from flowtrain_lightning.pool.record import Kind, Record
from flowtrain_lightning.pool.reservations import Reservation
from flowtrain_lightning.pool.segment import Segment
from flowtrain_lightning.pool.transport import Publication, Transport
from flowtrain_lightning.pool.ways import TransportName, choose_transport

_OPEN_POLL_SECONDS = 1.0


class Pool:
    """One rank's part of the pool. Used by the thread that uses its mesh.

    Build it with `Pool.open`.
    """

    def __init__(self, link: Link, segment: Segment, transport: Transport, device: DeviceEntries | None) -> None:
        self._link = link
        self._ranks = {link.rank, *link.peers}
        self._segment = segment
        self._transport = transport
        self._device = device
        self._own: dict[Key, tuple[Publication, set[int]]] = {}  # with the readers who have not released it yet
        self._published: dict[Key, Publication] = {}  # to this rank, and not leased yet
        self._leased: dict[Key, Publication] = {}
        self._entries = self._bytes = self._moved_bytes = self._leased_bytes = self._refused = 0
        self._waits = Waits()
        self._closed = False

    @classmethod
    def open(
        cls,
        mesh: Mesh,
        current_bytes: int,
        ahead_bytes: int,
        transport: TransportName = "auto",
        device: DeviceTier | None = None,
    ) -> Pool:
        """Make this rank's segment and get to know those of the others. Every rank of the mesh calls it.

        It waits until all have done so, for as long as they live. A pool that was opened before on this mesh is
        replaced: what was published in it is void, and its owner closes it.

        Args:
            mesh: connects the ranks.
            current_bytes: room for entries of the step that runs; 0 where the rank puts none.
            ahead_bytes: room for entries of later steps.
            transport: how entries travel, equal on all ranks; ``"auto"``: to each peer by the fastest that is sure to
                reach it; ``"nixl"``: the same, but between hosts by NIXL.
            device: device memory in which entries of tensors on this device lie while it has room; given by all ranks
                of a machine or by none. Room, order and reservations are those of host memory all the same.

        Raises:
            PeerFailed: when a peer ends meanwhile.
            PoolError: when memory is lacking.
        """
        segment = Segment(mesh.rank, current_bytes, ahead_bytes)
        link = Link(mesh)
        way = choose_transport(transport, link, segment)
        pool = cls(link, segment, way, DeviceEntries(device, segment.memory) if device is not None else None)
        way.announce()
        while not way.ready():
            pool.poll(_OPEN_POLL_SECONDS)
        return pool

    def reserve(self, order: Mapping[Key, Reservation], ahead: bool = False) -> bool:
        """Promise room to entries that will be put in this order, which can then not block; see `Reservation`.

        Each finds room as soon as those before it are released that are released without it, whatever else is put.
        A promise ends when all its entries are put and released, or when another one takes its place.

        Args:
            order: the entries' keys and what is reserved for each.
            ahead: promise the room of later steps.

        Returns:
            Whether there was room to promise now. If not, releases of what was put before make some; ask again.

        Raises:
            PoolError: when the part has less room than that order needs; the text says how much would do.
        """
        return self._segment.part(ahead).reserve(order)

    def has_room(self, keys: Sequence[Key], ahead: bool = False) -> bool:
        """Whether these reserved entries could all be put now.

        Raises:
            PoolError: when one of them was not reserved, or was put already.
        """
        return self._segment.part(ahead).has_room(keys)

    def put(self, key: Key, tensors: Sequence[Tensor], readers: Sequence[int], ahead: bool = False) -> Address | None:
        """Copy a tuple of tensors into the own segment and publish it.

        Args:
            key: the entry's name, which no entry had before.
            tensors: up to 16 of any dtype, of up to 8 dimensions, contiguous or not, on any device. On a device with a
                tier they are copied after this returns: drop them, but write nothing into them until all have read.
            readers: ranks that will each get and release it; the own rank may be one.
            ahead: take the room of later steps.

        Returns:
            Its address, or None when there is no room now. Nothing has changed then; releases make room.

        Raises:
            PoolError: when it could never fit, is larger than was reserved for it, or key, tensors or readers are not
                as expected.
        """
        number = key.pack()
        waiting = self._check(key, readers)
        lines = outline(tensors)
        nbytes, segment = lines.nbytes, self._segment
        address = segment.allocate(key, nbytes, ahead)
        if address is None:
            part = segment.part(ahead)
            if nbytes > part.capacity:
                raise PoolError(_never_fits(key, nbytes, part, ahead))
            self._refused += 1
            return None
        try:
            if self._device is None or (placed := self._device.place(tensors, nbytes, waiting)) is None:
                write_tensors(segment.memory, segment.first_byte, address.offset, tensors, lines)
                write_header(segment.memory, address, key, lines)
            else:
                address = segment.in_device_memory(address)
                self._device.write(placed, segment.memory, address, key, tensors, lines)
        except BaseException:
            segment.free(address)
            raise
        publication = Publication(key, number, address, nbytes)
        self._own[key] = publication, waiting
        self._entries += 1
        self._bytes += nbytes
        for reader in readers:
            if reader == self._link.rank:
                self._published[key] = publication
            else:
                self._moved_bytes += nbytes
                self._transport.publish(reader, publication)
        return address

    def fits(self, nbytes: int | Sequence[int], ahead: bool = False) -> bool:
        """Whether there is room now for an entry of ``nbytes`` (see `entry_nbytes`), or for several, not reserved."""
        return self._segment.part(ahead).fits([nbytes] if isinstance(nbytes, int) else nbytes)

    def poll(self, timeout: float = 0.0) -> bool:
        """Take in what peers have sent; wait up to ``timeout`` seconds for something.

        Returns:
            Whether anything arrived.

        Raises:
            PeerFailed: when a peer died or failed.
            PoolError: when a peer sent what cannot be true.
        """
        if timeout > 0:
            started = time.perf_counter()
            records = self._link.receive(timeout)
            self._waits.add(time.perf_counter() - started)
        else:
            records = self._link.receive()
        for record in records:
            self._take(record)
        return bool(records)

    def arrived(self, keys: Iterable[Key]) -> list[Key]:
        """Those of ``keys`` whose entries were published to this rank and that `get` would lease, in the same order."""
        return [key for key in keys if key in self._published]

    def get(self, key: Key) -> Lease | None:
        """A lease of an entry that was published to this rank; None while it was not (see `poll`).

        Raises:
            PoolError: when the entry is not there any more, or is leased already.
        """
        publication = self._published.get(key)
        if publication is None:
            if key in self._leased:
                raise PoolError(f"{key} is leased by this rank already; a rank can lease an entry once.")
            return None
        address = publication.address
        owner = address.owner
        own = owner == self._link.rank
        memory, start = (self._segment.memory, address.offset) if own else self._transport.locate(publication)
        read = read_entry if self._device is None or address.tier is Tier.HOST else self._device.read
        tensors = read(memory, start, publication.nbytes, address, key)
        self._leased[key] = self._published.pop(key)
        self._leased_bytes += publication.nbytes
        return Lease(key, owner, tensors, self._give_back)

    def close(self) -> None:
        """Drop segment and mappings. Views that are still in use stay valid; the mesh stays connected."""
        self._closed = True
        for books in (self._own, self._published, self._leased):
            books.clear()
        if self._device is not None:
            self._device.close()
        self._transport.close()
        self._segment.close()

    @property
    def counters(self) -> PoolCounters:
        """A snapshot of what this rank's part has done."""
        return PoolCounters(
            transport=self._transport.name if self._device is None else f"{self._transport.name} and device",
            entries=self._entries,
            bytes=self._bytes,
            moved_bytes=self._moved_bytes,
            leased_bytes=self._leased_bytes,
            refused=self._refused,
            waits=self._waits.count,
            wait_seconds=self._waits.seconds,
            wait_histogram=tuple(self._waits.histogram),
            current=self._segment.current.occupancy,
            ahead=self._segment.ahead.occupancy,
            device=Occupancy(0, 0, 0) if self._device is None else self._device.occupancy,
        )

    def _check(self, key: Key, readers: Sequence[int]) -> set[int]:
        waiting = set(readers)
        if not waiting or len(waiting) != len(readers) or not waiting <= self._ranks:
            raise PoolError(
                f"{key} was put for readers {list(readers)}; expected different ranks below {len(self._ranks)}."
            )
        if key in self._own:
            raise PoolError(f"{key} was put before; every entry needs a key of its own.")
        return waiting

    def _take(self, record: Record) -> None:
        if record.kind is Kind.RELEASE:
            self._released(Key.unpack(record.channel, record.number), record.address, record.sender)
            return
        publication = self._transport.receive(record)
        if publication is None:
            return
        key, address = publication.key, publication.address
        if address.tier is Tier.DEVICE and (self._device is None or not self._device.reads_from(address.owner)):
            raise PoolError(f"Rank {record.sender} published {key} in device memory, which this rank cannot read.")
        if key in self._published or key in self._leased:
            raise PoolError(f"Rank {record.sender} published {key} twice.")
        self._published[key] = publication

    def _give_back(self, key: Key) -> None:
        if self._closed:
            return
        publication = self._leased.pop(key)
        owner = publication.address.owner
        if self._device is not None:
            self._device.done(publication.address)
        if owner == self._link.rank:
            self._released(key, publication.address, owner)
        elif not self._link.has_left(owner):
            self._transport.release(publication)

    def _released(self, key: Key, address: int, reader: int) -> None:
        if self._device is not None:
            self._device.given_back(Address(address), reader)
        own = self._own.get(key)
        if own is None or own[0].address != address or reader not in own[1]:
            raise PoolError(f"Rank {reader} released {key}, of which it held no lease.")
        readers = own[1]
        readers.remove(reader)
        if not readers:
            self._free(key)

    def _free(self, key: Key) -> None:
        address = self._own.pop(key)[0].address
        erase_entry(self._segment.memory, address.offset)
        self._segment.free(address)


def _never_fits(key: Key, nbytes: int, part: Part, ahead: bool) -> str:
    what = "entries of later steps" if ahead else "entries of the step that runs"
    return (
        f"{key} needs {nbytes:,} bytes; this rank's part of the pool has {part.capacity:,} bytes for {what} in all. "
        "Raise `pool_bytes`, or make the entries smaller."
    )
