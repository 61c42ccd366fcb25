"""The pool as its users see it: put tensors in, get them elsewhere as views, give the memory back.

An owner writes an entry into its segment and publishes it by a record; a reader of the same host has mapped that
segment and looks at the tensors in place; when all readers have sent a record of release, the owner frees the bytes.
Readers on other hosts are reached by a transport, and tensors on a GPU may stay in device memory.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from torch import Tensor

from flowtrain_lightning.pool.address import DEVICE_BIT, GENERATIONS, OFFSET_MASK, OFFSET_SHIFT, OWNER_SHIFT, Address
from flowtrain_lightning.pool.control_records import ControlRecord, Kind
from flowtrain_lightning.pool.counters import Occupancy, PoolCounters, PoolTally
from flowtrain_lightning.pool.device.device_entries import DeviceEntries
from flowtrain_lightning.pool.device.device_tier import DeviceRuntime, DeviceTier
from flowtrain_lightning.pool.device.host_copies import COPY_SECONDS, HostCopies
from flowtrain_lightning.pool.entry import (
    EntryLayout,
    Key,
    Memory,
    erase_header,
    lay_out_tensors,
    read_tensors,
    target_of,
    write_header,
    write_tensors,
)
from flowtrain_lightning.pool.lease import Lease
from flowtrain_lightning.pool.memory_region import MemoryRegion, Reservation
from flowtrain_lightning.pool.mesh import Mesh
from flowtrain_lightning.pool.pool_errors import PoolError
from flowtrain_lightning.pool.shared_memory import Segment
from flowtrain_lightning.pool.transport import NetworkChoice, Transport

_OPEN_POLL_SECONDS = 1.0
_new = tuple.__new__  # half the time of a call of the class, where it is made for every entry


class _OwnEntry(NamedTuple):
    """An entry of this rank, from its put until all readers have released it."""

    key: Key
    region: MemoryRegion
    offset: int
    readers: set[int]  # who have not released it


class Pool:
    """One rank's part of the pool. Used by the thread that uses its mesh.

    Build it with `Pool.open`.
    """

    def __init__(self, mesh: Mesh, segment: Segment, transport: Transport, device: DeviceEntries | None) -> None:
        self._mesh = mesh
        self._link = mesh.link
        self._rank = mesh.rank
        self._ranks = set(range(mesh.ranks))
        self._segment = segment
        self._regions = (segment.current, segment.ahead)
        self._transport = transport
        self._memories: Mapping[int, Memory] = transport.memories  # segments of the ranks of this host
        self._remote = transport.remote
        self._device = device
        self._generation = 0
        self._own: dict[int, _OwnEntry] = {}  # by address
        self._own_keys: set[Key] = set()
        self._published: dict[Key, ControlRecord] = {}  # to this rank, and not leased yet
        self._leased: set[Key] = set()
        self._tally = PoolTally()
        self._copies: HostCopies | None = None
        self._closed = False

    @classmethod
    def open(
        cls,
        mesh: Mesh,
        current_bytes: int,
        ahead_bytes: int,
        network: NetworkChoice = "auto",
        device: DeviceTier | None = None,
        runtime: DeviceRuntime | None = None,
    ) -> Pool:
        """Make this rank's segment and get to know those of the others. Every rank of the mesh calls it.

        It waits until all have done so, for as long as they live. A pool that was opened before on this mesh is
        replaced: what was published in it is void, and its owner closes it.

        Args:
            mesh: connects the ranks.
            current_bytes: memory for entries of the step that runs; 0 where the rank puts none.
            ahead_bytes: memory for entries of later steps.
            network: how entries pass between hosts, equal on all ranks.
            device: device memory in which entries of tensors on this device lie as long as they fit; given by all ranks
                of a host or by none. Host memory is taken and reserved for them all the same.
            runtime: the device on which this rank computes. Host memory is pinned for it: the own segment, whole, since
                what finds no room on the device goes through it; and those of ranks with which it shares no device
                memory. Nobody waits for such copies: entries are published, and given back, as `poll` finds them done.

        Raises:
            PeerFailed: when a peer ends meanwhile.
            PoolError: when memory is lacking.
        """
        segment = Segment(mesh.rank, current_bytes, ahead_bytes)
        mesh.begin_link()
        transport = Transport(mesh, segment, network)
        pool = cls(mesh, segment, transport, None if device is None else DeviceEntries(device, segment.memory))
        transport.announce()
        while not transport.ready():
            pool.poll(_OPEN_POLL_SECONDS)
        if runtime is not None:
            pool._pin(runtime)
        return pool

    def reserve(self, *orders: Mapping[Key, Reservation], ahead: bool = False) -> bool:
        """Promise memory to entries that will be put in these orders, which can then not block; see `Reservation`.

        Each finds its bytes as soon as those before it are released that are released without it, whatever else is put.
        A promise ends when all its entries are put and released, or when another one replaces it.

        Args:
            orders: the entries' keys and what is reserved for each, in the order in which they are put. Entries of two
                orders may be put in any order; they share no memory.
            ahead: promise the memory of later steps.

        Returns:
            Whether there was memory to promise now. If not, releases of what was put before make some; ask again.

        Raises:
            PoolError: when these orders need more than there is in all; the text says how much would do.
        """
        return self._regions[ahead].reserve(*orders)

    def has_room(self, keys: Sequence[Key], ahead: bool = False) -> bool:
        """Whether these reserved entries could all be put now.

        Raises:
            PoolError: when one of them was not reserved, or was put already.
        """
        return self._regions[ahead].has_room(keys)

    def fits(self, nbytes: int | Sequence[int], ahead: bool = False) -> bool:
        """Whether an entry of ``nbytes`` (see `entry_nbytes`), or several, could be put now without a reservation."""
        return self._regions[ahead].fits([nbytes] if isinstance(nbytes, int) else nbytes)

    def put(self, key: Key, tensors: Sequence[Tensor], readers: Sequence[int], ahead: bool = False) -> Address | None:
        """Copy a tuple of tensors into the own segment and publish it.

        Args:
            key: the entry's name, which no entry had before.
            tensors: up to 16 of any dtype, of up to 8 dimensions, contiguous or not, on any device. Those of the
                device on which the rank computes are copied after this returns: drop them, but write nothing into them
                until all have read.
            readers: ranks that will each get and release it; the own rank may be one.
            ahead: take the memory of later steps.

        Returns:
            Its address, or None when it does not fit now. Nothing has changed then; releases make it fit.

        Raises:
            PoolError: when it could never fit, is larger than was reserved for it, or key, tensors or readers are not
                as expected.
        """
        number, waiting = key.pack(), set(readers)
        if not waiting or len(waiting) != len(readers) or not waiting <= self._ranks:
            raise PoolError(
                f"{key} was put for readers {list(readers)}; expected different ranks below {len(self._ranks)}."
            )
        if key in self._own_keys:
            raise PoolError(f"{key} was put before; every entry needs a key of its own.")
        layout, region = lay_out_tensors(tensors), self._regions[ahead]
        nbytes, segment = layout.nbytes, self._segment
        offset = region.allocate(key, nbytes)
        if offset is None:
            if nbytes > region.capacity:
                raise PoolError(
                    f"{key} needs {nbytes:,} bytes; this rank's part of the pool has {region.capacity:,} bytes for "
                    f"entries of {'later steps' if ahead else 'the step that runs'} in all. Raise "
                    "`PoolSettings(bytes=...)`, or make the entries smaller."
                )
            self._tally.refused += 1
            return None
        self._generation = (self._generation + 1) % GENERATIONS
        address = self._rank << OWNER_SHIFT | offset << OFFSET_SHIFT | self._generation
        fields = (Kind.PUBLISH, self._rank, self._link, key.channel, number, address, nbytes, b"", (), 0)
        record = _new(ControlRecord, fields)
        try:
            on_device = None if self._device is None else self._device.put(record, offset, tensors, layout, waiting)
            is_underway = on_device is None and self._copies is not None and self._copies.holds(tensors)
            if on_device is not None:
                record = on_device
            elif is_underway:
                self._copy(key, record, readers, offset, tensors, layout)
            else:
                write_tensors(segment.memory, segment.first_byte, offset, tensors, layout)
                write_header(segment.memory, offset, record, layout)
        except BaseException:
            region.free(offset)
            raise
        self._own[record.address] = _new(_OwnEntry, (key, region, offset, waiting))
        self._own_keys.add(key)
        self._tally.put(nbytes)
        if not is_underway:
            self._publish(key, record, readers)
        return Address(record.address)

    def poll(self, timeout: float = 0.0) -> bool:
        """Take in what peers have sent; wait up to ``timeout`` seconds for something.

        Returns:
            Whether anything arrived, or own copies came to their end.

        Raises:
            PeerFailed: when a peer died or failed.
            PoolError: when a peer sent what cannot be true, or another pool has replaced this one.
        """
        if self._link != self._mesh.link:
            raise PoolError("Another pool was opened on this mesh, which has replaced this one. Poll that one.")
        if timeout > 0:
            started = time.perf_counter()
            records = self._receive(timeout)
            self._tally.waited(time.perf_counter() - started)
        else:
            records = self._mesh.receive()
        for record in records:
            if record.kind is Kind.RELEASE:
                self._released(record.address, record.sender)
            elif record.kind is Kind.PUBLISH and record.sender in self._memories:
                self._learn(record)
            elif (published := self._transport.receive(record)) is not None:
                self._learn(published)
        copied = self._copies is not None and self._copies.finish()
        return copied or bool(records)

    @property
    def is_settled(self) -> bool:
        """Whether all that was put is published, and all that was released is given back."""
        return self._copies is None or not self._copies.are_underway

    def settle(self) -> None:
        """Waits until all that was put is published, and all that was released is given back.

        To be called by who has put or released something and does not poll for a while.
        """
        while not self.is_settled:
            self.poll(COPY_SECONDS)

    def arrived(self, keys: Iterable[Key]) -> list[Key]:
        """Those of ``keys``, in their order, whose entries were published to this rank and that `get` would lease."""
        return list(filter(self._published.__contains__, keys))

    def get(self, key: Key) -> Lease | None:
        """A lease of an entry that was published to this rank; None while it was not (see `poll`).

        Raises:
            PoolError: when the entry is not there any more, or is leased already.
        """
        record = self._published.get(key)
        if record is None:
            if key in self._leased:
                raise PoolError(f"{key} is leased by this rank already; a rank can lease an entry once.")
            return None
        if self._remote is None or record.sender in self._memories:
            memory, start = self._memories[record.sender], record.address >> OFFSET_SHIFT & OFFSET_MASK
        else:
            memory, start = self._remote.locate(record)
        if self._device is not None and record.address & DEVICE_BIT:
            tensors = self._device.read(memory, start, record)
        else:
            tensors = read_tensors(memory, start, record)
        del self._published[key]
        self._leased.add(key)
        self._tally.leased_bytes += record.size
        return Lease(key, record.sender, record.address, self._end_lease, tensors)

    def close(self) -> None:
        """Drop segment and mappings. Views that are still in use stay valid; the mesh stays connected."""
        self._closed = True
        for books in (self._own, self._own_keys, self._published, self._leased):
            books.clear()
        if self._device is not None:
            self._device.close()
        if self._copies is not None:
            self._copies.close()
        self._transport.close()
        self._segment.close()

    @property
    def counters(self) -> PoolCounters:
        """A snapshot of what this rank's part has done."""
        device, name = self._device, self._transport.name
        return self._tally.counters(
            name if device is None else f"{name} and device",
            self._segment.current.occupancy,
            self._segment.ahead.occupancy,
            Occupancy(0, 0, 0) if device is None else device.occupancy,
            0 if device is None else device.fallbacks,
        )

    def _pin(self, runtime: DeviceRuntime) -> None:
        self._copies = HostCopies(runtime)
        for rank, memory in self._transport.memories.items():
            if rank == self._rank or self._device is None or not self._device.serves_both_ways(rank):
                self._copies.pin(memory)

    def _copy(
        self,
        key: Key,
        record: ControlRecord,
        readers: Sequence[int],
        offset: int,
        tensors: Sequence[Tensor],
        layout: EntryLayout,
    ) -> None:
        """Begins to copy an entry from the device into the own segment, which is published when that is done."""
        assert self._copies is not None
        memory = self._segment.memory

        def publish() -> None:
            write_header(memory, offset, record, layout)
            self._publish(key, record, readers)

        targets = (target_of(memory, offset + at, each) for at, each in zip(layout.offsets, tensors, strict=True))
        self._copies.write(zip(targets, (each.detach() for each in tensors), strict=True), publish)

    def _publish(self, key: Key, record: ControlRecord, readers: Iterable[int]) -> None:
        for reader in readers:
            if reader == self._rank:
                self._published[key] = record
                continue
            self._tally.moved_bytes += record.size
            if reader in self._memories:
                self._mesh.send(reader, record)
            elif self._remote is not None:
                self._remote.publish(reader, record)

    def _receive(self, timeout: float) -> list[ControlRecord]:
        """Receives what peers have sent, as soon as something has arrived or own copies are done."""
        if self._copies is None or not self._copies.are_underway:
            return self._mesh.receive(timeout)
        return self._copies.wait_for(self._mesh.receive, timeout)

    def _learn(self, record: ControlRecord) -> None:
        """An entry was published to this rank."""
        address, sender = record.address, record.sender
        if address >> OWNER_SHIFT != sender:
            raise PoolError(f"Rank {sender} published {Address(address)!r}, which is not its own.")
        memory = self._memories.get(sender)
        if memory is not None and (address >> OFFSET_SHIFT & OFFSET_MASK) + record.size > len(memory):
            raise PoolError(f"Rank {sender} published {record}, which lies outside of its segment.")
        if address & DEVICE_BIT and (self._device is None or not self._device.reads_from(sender)):
            raise PoolError(f"Rank {sender} published {record} in device memory, which this rank cannot read.")
        key = Key.unpack(record.channel, record.number)
        if key in self._published or key in self._leased:
            raise PoolError(f"Rank {sender} published {key} twice.")
        self._published[key] = record

    def _end_lease(self, key: Key, owner: int, address: int) -> None:
        """A lease of this rank was released."""
        if self._closed:
            return
        self._leased.remove(key)
        if self._device is not None:
            self._device.done(address)
        if self._copies is None or address & DEVICE_BIT:
            self._give_back(owner, address)
        else:
            self._copies.after_reads(partial(self._give_back, owner, address))

    def _give_back(self, owner: int, address: int) -> None:
        if owner == self._rank:
            self._released(address, owner)
            return
        if self._remote is not None:
            self._remote.forget(address)
        if owner in self._mesh.peers:
            self._mesh.send(
                owner, _new(ControlRecord, (Kind.RELEASE, self._rank, self._link, 0, 0, address, 0, b"", (), 0))
            )

    def _released(self, address: int, reader: int) -> None:
        """A reader has released an entry of this rank."""
        own = self._own.get(address)
        if own is None or reader not in own.readers:
            raise PoolError(f"Rank {reader} released {Address(address)!r}, of which it held no lease.")
        if self._device is not None:
            self._device.given_back(address, reader)
        key, region, offset, readers = own
        readers.remove(reader)
        if not readers:
            del self._own[address]
            self._own_keys.remove(key)
            erase_header(self._segment.memory, offset)
            region.free(offset)
