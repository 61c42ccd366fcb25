"""Entries in device memory: which ones fit there, and that no stream ever comes too early, whoever runs first."""

import zlib
from itertools import permutations
from mmap import mmap

import pytest
import torch

from flowtrain_lightning.pool import Address, DeviceTier, Key, PoolError, Tier, entry_nbytes
from flowtrain_lightning.pool.control_records import ControlRecord, Kind
from flowtrain_lightning.pool.device.device_entries import DeviceEntries
from flowtrain_lightning.pool.device.device_tier import ReadableBlock
from flowtrain_lightning.pool.entry import lay_out_tensors
from tests.pool.device.simulated import Eager, Event, SimulatedRuntime, Stepped

OWNER, READER = 0, 1
ENTRY_BYTES = entry_nbytes([4000])
"""Size of an entry of a thousand floats."""


class Pair:
    """The device entries of an owner and of a reader, in one process."""

    def __init__(self, stream, nbytes, slots):
        self.owners, self.readers = (SimulatedRuntime(stream(), stream()) for _ in range(2))
        self.memory = mmap(-1, 1 << 16)  # the owner's segment in host memory
        block = self.owners.allocate(nbytes)
        published, own, done = ([self.owners.make_event() for _ in range(slots)] for _ in range(3))
        self.owner = DeviceEntries(
            DeviceTier(
                rank=OWNER,
                runtime=self.owners,
                nbytes=nbytes,
                slots=slots,
                readable={OWNER: ReadableBlock(block, published, own)},
                readers={OWNER: own, READER: done},
                refusals=(),
                close=lambda: None,
            ),
            self.memory,
        )
        self.reader = DeviceEntries(
            DeviceTier(
                rank=READER,
                runtime=self.readers,
                nbytes=0,
                slots=0,
                readable={OWNER: ReadableBlock(block, published, done)},
                readers={},
                refusals=(),
                close=lambda: None,
            ),
            mmap(-1, 4096),
        )

    def put(self, number, tensors, readers=(READER,)):
        """The record that publishes an entry which fitted, or None."""
        layout, start = lay_out_tensors(tensors), number * 1024
        address = Address.of(OWNER, Tier.HOST, start, number)
        record = ControlRecord(
            Kind.PUBLISH, OWNER, 1, number=Key(0, 0, number).pack(), address=address, size=layout.nbytes
        )
        return self.owner.put(record, start, tensors, layout, readers)

    def read(self, published):
        return self.reader.read(self.memory, Address(published.address).offset, published)

    def give_back(self, published):
        self.reader.done(published.address)
        self.owner.given_back(published.address, READER)

    def close(self):
        self.owners.close()
        self.readers.close()


@pytest.fixture
def pair():
    made = Pair(Eager, 2 * ENTRY_BYTES, 2)
    yield made
    made.close()


def floats(value=1.0):
    return torch.full((1000,), float(value))


def test_tensors_are_read_in_the_owners_block_as_they_were_put(pair):
    tensors = [torch.randn(7, 5, dtype=torch.bfloat16), torch.zeros(0, 3), torch.tensor(True), torch.randn(6, 4).t()]
    found = pair.read(pair.put(1, tensors))
    for tensor, expected in zip(found, tensors, strict=True):
        assert tensor.dtype == expected.dtype
        assert torch.equal(tensor, expected)
    assert found[0].untyped_storage().data_ptr() == found[3].untyped_storage().data_ptr(), "nothing was copied"


def test_writing_one_view_is_no_change_of_another_for_autograd(pair):
    tensors = [torch.ones(4), torch.ones(4)]
    first, second = pair.read(pair.put(1, tensors))
    first.requires_grad_()
    loss = (first**2).sum()
    second.mul_(2)
    loss.backward()
    assert torch.equal(first.grad, torch.full((4,), 2.0))


def test_what_finds_no_room_no_slot_or_no_reader_belongs_into_host_memory(pair):
    assert pair.put(1, [torch.zeros(5000)]) is None, "larger than the block"
    assert pair.put(1, [floats()], readers=[READER, 2]) is None, "rank 2 cannot read it"
    assert pair.put(1, []) is None
    assert [pair.put(number, [torch.zeros(1)]) is not None for number in range(1, 4)] == [True, True, False]
    assert pair.owner.occupancy.now == 2 * entry_nbytes([4])
    assert pair.owner.fallbacks == 3, "an entry without tensors would be in host memory anyhow"


def test_tensors_of_other_devices_belong_into_host_memory(pair, monkeypatch):
    monkeypatch.setattr(pair.owners, "holds", lambda tensor: tensor.dtype is not torch.int64)
    assert pair.put(1, [floats(), torch.zeros(1, dtype=torch.int64)]) is None
    assert pair.put(1, [floats()]) is not None


def test_room_and_slots_come_back_when_all_readers_have_given_back(pair):
    for number in range(1, 20):
        published = pair.put(number, [floats(number)], readers=[OWNER, READER])
        assert Address(published.address).tier is Tier.DEVICE
        assert pair.read(published)[0].eq(number).all()
        pair.owner.given_back(published.address, OWNER)
        assert pair.owner.occupancy.now == ENTRY_BYTES
        pair.give_back(published)
        assert pair.owner.occupancy.now == 0
    assert pair.owner.occupancy.peak == ENTRY_BYTES


def test_what_was_never_put_or_is_given_back_twice_has_no_effect(pair):
    address = pair.put(1, [floats()], readers=[OWNER, READER]).address
    pair.owner.given_back(address, READER)
    pair.owner.given_back(address, READER)
    pair.owner.given_back(address + 1, OWNER)
    pair.reader.done(address)
    assert pair.owner.occupancy.now == ENTRY_BYTES


def test_a_lease_of_a_former_pool_has_no_effect_on_the_next_one(pair):
    published = pair.put(1, [floats()])
    pair.read(published)
    pair.reader.close()
    marks = list(pair.owners.events)
    pair.reader.done(published.address)
    assert list(pair.owners.events) == marks


@pytest.mark.parametrize("field", [24, 32])
def test_a_header_that_leads_out_of_the_block_is_refused(pair, field):
    """As one that its owner has written wrongly, checksum and all."""
    published = pair.put(1, [floats()])
    start, length = Address(published.address).offset, 56
    pair.memory[start + field : start + field + 4] = (1 << 20).to_bytes(4, "little")
    pair.memory[start : start + 4] = zlib.crc32(pair.memory[start + 4 : start + length]).to_bytes(4, "little")
    with pytest.raises(PoolError, match="cannot be in its owner's block"):
        pair.read(published)


class Waits:
    """Counts the waits that are issued, and leaves one of them out."""

    def __init__(self, monkeypatch, left_out=None):
        self.issued = 0
        wait = Event.wait

        def counted(event, stream):
            self.issued += 1
            if self.issued - 1 != left_out:
                wait(event, stream)

        monkeypatch.setattr(Event, "wait", counted)


def pass_three(runs_first):
    """Whether three entries arrive as they are made, one after another in the same bytes.

    First all is given to the streams; then these run, each time the first one of ``runs_first`` that can.
    """
    pair = Pair(Stepped, ENTRY_BYTES, 3)
    streams = [
        [pair.owners.side, pair.owners.current_stream, pair.readers.current_stream][which] for which in runs_first
    ]
    seen = []
    for number in range(1, 4):
        tensor = torch.zeros(1000)
        pair.owners.current_stream.put(lambda tensor=tensor, number=number: tensor.fill_(number))
        published = pair.put(number, [tensor])
        (view,) = pair.read(published)
        pair.readers.current_stream.put(lambda view=view: seen.append(view.clone()))
        pair.give_back(published)
    while any(stream.step() for stream in streams):
        pass
    pair.close()
    assert len(seen) == 3, "a stream waits for what never comes"
    return all(found.eq(number).all() for number, found in enumerate(seen, 1))


def test_every_byte_is_right_whichever_stream_runs_first(monkeypatch):
    waits = Waits(monkeypatch)
    assert all(pass_three(order) for order in permutations(range(3)))
    assert waits.issued == 6 * 8, "three for what is made, three for what is published, two for readers"


@pytest.mark.parametrize("left_out", range(8))
def test_without_any_one_of_the_waits_some_byte_would_be_wrong(monkeypatch, left_out):
    right = []
    for order in permutations(range(3)):
        with monkeypatch.context() as patched:
            Waits(patched, left_out)
            right.append(pass_three(order))
    assert not all(right)
