"""Lets ranks of one host open each other's device memory at start, and prove that bytes come through.

Every rank tells the others its block and its events. Each of them opens these, reads a pattern that the owner's side
stream has written, and answers with events of its own or with the reason why it cannot. What this shows is what is
used; where it fails, for example in containers that share no IPC namespace, entries go through host memory.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Literal

import torch
from torch import Tensor

from flowtrain_lightning.pool.control_records import ControlRecord, Kind
from flowtrain_lightning.pool.device.cuda_ipc import CudaRuntime
from flowtrain_lightning.pool.device.device_tier import (
    HANDLE_BYTES,
    DeviceBlock,
    DeviceRuntime,
    DeviceTier,
    Events,
    ReadableBlock,
)
from flowtrain_lightning.pool.mesh import Mesh
from flowtrain_lightning.pool.pool_errors import PoolError

TierChoice = Literal["auto", "host", "device"]

MOST_SLOTS = 128
_MOST_EVENTS = 768  # that a process makes; drivers run out of events that others can open at about a thousand
_PATTERN_BYTES = 4096
_POLL_SECONDS = 1.0
_LONGEST_REASON = 500
CLOSE_SECONDS = 2.0
"""A rank that ends waits for at most so long until its peers have closed its block."""


def choose_device_tier(choice: TierChoice, mesh: Mesh, device: torch.device, nbytes: int) -> DeviceTier | None:
    """The device tier of a rank, or None where all entries go through host memory. Every rank calls it alike.

    Args:
        choice: ``"auto"`` uses device memory between ranks that have proved at start that they can read it;
            ``"host"`` never does; ``"device"`` refuses what cannot.
        mesh: connects the ranks.
        device: on which this rank computes.
        nbytes: of device memory for entries of this rank.

    Raises:
        PeerFailed: when a peer ends meanwhile.
        PoolError: when device memory was asked for by name and cannot be used.
    """
    if choice == "device" and device.type != "cuda":
        raise PoolError(f"Device memory was asked for, but this rank computes on {device}. Use 'auto' or 'host'.")
    if choice == "host" or device.type != "cuda":
        return None
    return open_device_tier(mesh, CudaRuntime(device), nbytes, required=choice == "device")


def open_device_tier(mesh: Mesh, runtime: DeviceRuntime, nbytes: int, required: bool = False) -> DeviceTier:
    """Make this rank's block and open those of the others. Every rank of the mesh calls it, before it opens a pool.

    It waits until all of this host have done so, for as long as they live.

    Args:
        mesh: connects the ranks; those of other hosts take no part.
        runtime: the rank's device.
        nbytes: of the own block; 0 for a rank that only reads.
        required: refuse what else falls back to host memory.

    Raises:
        PeerFailed: when a peer ends meanwhile.
        PoolError: when something that is required does not work; the text says between which ranks and why.
    """
    opening = _Opening(mesh, runtime, nbytes)
    opening.announce()
    opening.wait_until(lambda: len(opening.answered) == len(opening.told) == len(opening.peers))
    if required and opening.refusals:
        raise PoolError(f"Device memory was asked for, but {'; '.join(opening.refusals)}. Use host memory.")
    return opening.tier()


class _Opening:
    """One rank's part in the opening of blocks, and in their closing at the end."""

    def __init__(self, mesh: Mesh, runtime: DeviceRuntime, nbytes: int) -> None:
        self._mesh = mesh
        self._link = mesh.begin_link()
        self._runtime = runtime
        self._rank = mesh.rank
        self._nbytes = nbytes
        self.peers = set(range(mesh.ranks)) - {mesh.rank} - mesh.remote.pages.keys()
        self._slots = min(MOST_SLOTS, _MOST_EVENTS // (len(self.peers) + 2))
        self.told: set[int] = set()  # peers that have told of their block
        self.answered: set[int] = set()  # peers that have said whether they can read this rank's block
        self._closed: set[int] = set()  # peers that read it no more
        self.refusals: list[str] = []
        self._own: DeviceBlock | None = None
        self._readable: dict[int, ReadableBlock] = {}
        self._readers: dict[int, Events] = {}

    def announce(self) -> None:
        """Make the own block, write the pattern into it, and tell of it."""
        slots, payload = 0, b""
        if self._nbytes:
            try:
                slots, payload = self._slots, self._make_block()
            except (RuntimeError, OSError) as error:
                self._nbytes, slots, payload = 0, 0, str(error).encode()[:_LONGEST_REASON]
                self._refuse(f"rank {self._rank} can make no block on {self._runtime.name}", payload)
        if not slots:
            self.answered |= self.peers  # there is nothing to answer
        for peer in self.peers:
            self._send(peer, Kind.BLOCK, slots, payload)

    def wait_until(self, done: Callable[[], bool], seconds: float = math.inf) -> None:
        """Take in what peers say."""
        deadline = time.monotonic() + seconds
        while not done() and (left := deadline - time.monotonic()) > 0:
            self._poll(min(left, _POLL_SECONDS))

    def tier(self) -> DeviceTier:
        """Its outcome."""
        return DeviceTier(
            rank=self._rank,
            runtime=self._runtime,
            nbytes=self._nbytes,
            slots=self._slots if self._nbytes else 0,
            readable=self._readable,
            readers=self._readers,
            refusals=tuple(self.refusals),
            close=self.close,
        )

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Let go of the peers' blocks, and of the own one when no peer reads it any more. All ranks call it.

        A peer that does not say so in time may still read it; then its memory is freed when this process ends. So is
        everything when a peer has failed, whose events this rank's streams may wait for in vain.

        Args:
            seconds: how long to wait for peers.
        """
        self._link = self._mesh.begin_link()  # records of the former one that came meanwhile were dropped for a pool's
        readable, self._readable = dict(self._readable), {}
        readable.pop(self._rank, None)
        with suppress(RuntimeError, OSError):  # a failed peer, or a device that failed: this rank ends, too
            self._poll(0.0)
            self._runtime.synchronize()
            for rank, of_peer in readable.items():
                of_peer.block.close()
                if not self._mesh.has_left(rank):
                    self._send(rank, Kind.BLOCK_CLOSED)
            readers = self._readers.keys() - {self._rank}
            self.wait_until(lambda: self._closed >= readers, seconds)
            if self._own is not None and self._closed >= readers:
                self._own.close()
        self._own = None

    def _poll(self, timeout: float) -> None:
        for record in self._mesh.receive(timeout):
            self._take(record)

    def _make_block(self) -> bytes:
        runtime = self._runtime
        block = self._own = self._allocate()
        published = [runtime.make_event() for _ in range(self._slots)]
        done = [runtime.make_event() for _ in range(self._slots)]
        pattern = _pattern(self._rank, self._nbytes)
        runtime.copy(block.memory[: len(pattern)], runtime.to_device(pattern))
        published[0].record(runtime.side)
        runtime.synchronize()  # so that no peer's stream waits for ever if this process ends now
        self._readable[self._rank] = ReadableBlock(block, published, done)
        self._readers[self._rank] = done
        return block.handle + b"".join(event.ipc_handle() for event in published)

    def _allocate(self) -> DeviceBlock:
        try:
            return self._runtime.allocate(self._nbytes)
        except RuntimeError:
            self._runtime.make_room()
            return self._runtime.allocate(self._nbytes)

    def _take(self, record: ControlRecord) -> None:
        peer = record.sender
        if record.kind is Kind.BLOCK and peer in self.peers - self.told:
            self.told.add(peer)
            self._read_block(peer, record)
        elif record.kind is Kind.BLOCK_READ and peer in self.peers - self.answered:
            self.answered.add(peer)
            self._open_reader(peer, record)
        elif record.kind is Kind.BLOCK_CLOSED and peer in self._readers:
            self._closed.add(peer)
        else:
            raise PoolError(f"Rank {peer} sent {record._replace(payload=b'')}, which belongs to no block of memory.")

    def _read_block(self, owner: int, record: ControlRecord) -> None:
        """Open the block of a peer, look for its pattern, and answer."""
        if not record.number:
            if record.payload:  # else it wants none
                self._refuse(f"rank {owner} has no block", record.payload)
            return
        try:
            payload = self._open_block(owner, record)
        except (RuntimeError, OSError) as error:
            reason = str(error).encode()[:_LONGEST_REASON]
            self._refuse(f"rank {self._rank} cannot read the block of rank {owner}", reason)
            self._send(owner, Kind.BLOCK_READ, 0, reason)
        else:
            self._send(owner, Kind.BLOCK_READ, record.number, payload)

    def _open_block(self, owner: int, record: ControlRecord) -> bytes:
        runtime, slots = self._runtime, record.number
        handles = _handles(record.payload, slots + 1)
        block = runtime.open_block(handles[0], record.size)
        try:
            published = [runtime.open_event(handle) for handle in handles[1:]]
            done = [runtime.make_event() for _ in range(slots)]
            pattern = _pattern(owner, record.size)
            published[0].wait(runtime.current())
            found = runtime.to_host(block.memory[: len(pattern)])
            done[0].record(runtime.current())
            runtime.synchronize()  # as the owner has
            if not torch.equal(found, pattern):
                raise PoolError("it holds other bytes than its owner has written")
            handles = [event.ipc_handle() for event in done]
        except BaseException:
            block.close()
            raise
        self._readable[owner] = ReadableBlock(block, published, done)
        return b"".join(handles)

    def _open_reader(self, reader: int, record: ControlRecord) -> None:
        """Take the events of a peer that reads the own block, or its reason why it cannot."""
        if not record.number:
            self._refuse(f"rank {reader} cannot read the block of rank {self._rank}", record.payload)
            return
        try:
            handles = _handles(record.payload, self._slots)
            done = [self._runtime.open_event(handle) for handle in handles]
            done[0].wait(self._runtime.side)
        except (RuntimeError, OSError) as error:
            self._refuse(f"rank {self._rank} cannot wait for rank {reader}", str(error).encode())
            self._closed.add(reader)  # never to be read by it
        else:
            self._readers[reader] = done

    def _refuse(self, what: str, reason: bytes | bytearray) -> None:
        self.refusals.append(f"{what} ({reason[:_LONGEST_REASON].decode(errors='replace')})")

    def _send(self, peer: int, kind: Kind, slots: int = 0, payload: bytes = b"") -> None:
        record = ControlRecord(kind, self._rank, self._link, number=slots, size=self._nbytes, payload=payload)
        self._mesh.send(peer, record)


def _pattern(rank: int, nbytes: int) -> Tensor:
    """The bytes with which the block of a rank begins until it is used."""
    return ((torch.arange(min(nbytes, _PATTERN_BYTES)) * 37 + rank * 101 + 13) % 251).to(torch.uint8)


def _handles(payload: bytes | bytearray, count: int) -> list[bytes]:
    """The handles that a peer has sent."""
    if len(payload) != count * HANDLE_BYTES:
        raise PoolError(f"{len(payload)} bytes came where those of {count} handles were expected")
    return [bytes(payload[start : start + HANDLE_BYTES]) for start in range(0, len(payload), HANDLE_BYTES)]
