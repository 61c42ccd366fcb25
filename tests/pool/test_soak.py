"""Random puts, gets and releases for a long time: no byte is ever wrong, and all memory comes back."""

import os
import random
import time
import zlib
from itertools import count

import pytest
import torch

import flowtrain_lightning.pool.pool as pool_module
from flowtrain_lightning.pool import Address, Key, Tier
from tests.pool.ranks import NIXL, device_of, join_job, location_of, open_pool
from tests.processes import assert_all_good, run_ranks

CAPACITY = 1 << 19
DATA, LAST = 0, 1
"""Channels: entries, and how many of them a rank has put in all."""

LOOK_AHEAD, MOST_LEASES = 16, 8
DTYPES = (torch.uint8, torch.bfloat16, torch.float32, torch.int64, torch.complex128)


def readers_of(owner, item, ranks):
    """Whom an entry is for, as all ranks know without asking: one rank or several, its owner perhaps among them."""
    choose = random.Random(owner << 32 | item)
    return choose.sample(range(ranks), choose.randint(1, ranks))


def checksum(key, tensors):
    """Of all that an entry is: its key, and dtypes, shapes and bytes of its tensors."""
    found = zlib.crc32(repr((tuple(key), [(tensor.dtype, tensor.shape) for tensor in tensors])).encode())
    for tensor in tensors:
        found = zlib.crc32(torch.cat([tensor.reshape(-1)]).view(torch.uint8).numpy(), found)
    return found


def random_tensors(choose, noise):
    """Up to four tensors of random bytes: most are small, some take a third of the memory, some hold nothing."""
    tensors = []
    for _ in range(choose.randint(1, 4)):
        dtype, nbytes = choose.choice(DTYPES), int(2 ** (choose.random() * 16.5))
        elements = nbytes // dtype.itemsize
        start = choose.randrange(len(noise) - elements * dtype.itemsize) // 16 * 16
        flat = noise[start : start + elements * dtype.itemsize].view(dtype)
        tensors.append(choose.choice([flat, flat[::2], flat[: elements // 2 * 2].view(2, -1).t()]))
    return tensors


def check(lease, wrong):
    """Looks whether an entry is as it was put. Its views are taken now, since it may look after their release."""
    *tensors, expected = lease.tensors

    def look():
        assert checksum(lease.key, tensors) == expected, f"{lease.key} of rank {lease.owner} {wrong}"

    return look


class NoDevice:
    """Tensors are made and used at once, by the thread that says so."""

    def make(self, tensors):
        return tensors

    def use(self, lease, look):
        look()

    def finish(self):
        """All is done."""


class LateDevice:
    """A simulated device that makes and uses tensors some time after it is told to."""

    def __init__(self, runtime):
        self.stream = runtime.current()
        self.in_place = 0
        write = pool_module.write_tensors

        def write_when_made(*arguments):  # as a copy from a device into host memory waits for what makes its source
            self.finish()
            write(*arguments)

        pool_module.write_tensors = write_when_made

    def make(self, tensors):
        made = [torch.empty_like(tensor) for tensor in tensors]
        self.stream.put(lambda: [later.copy_(tensor) for later, tensor in zip(made, tensors, strict=True)])
        return made

    def use(self, lease, look):
        if Address(lease.address).tier is Tier.DEVICE:
            self.in_place += 1
            self.stream.put(look)
        else:  # as a copy from host memory
            self.finish()
            look()

    def finish(self):
        self.stream.finish()


NO_DEVICE = NoDevice()


class Soak:
    """One rank: does now this, now that, until the time is over and everything was read and released."""

    def __init__(self, pool, rank, ranks, seed, device=NO_DEVICE):
        self.pool, self.rank, self.ranks, self.device = pool, rank, ranks, device
        self.choose = random.Random(seed * ranks + rank)
        self.noise = torch.frombuffer(bytearray(self.choose.randbytes(1 << 19)), dtype=torch.uint8)
        self.items = count()
        self.waiting = None  # an entry that did not fit yet
        self.awaited = {owner: self.entries_from(owner) for owner in range(ranks)}
        self.window = {owner: [next(keys) for _ in range(LOOK_AHEAD)] for owner, keys in self.awaited.items()}
        self.last = {}  # owner -> how many entries it has put in all
        self.leases = []
        self.read = 0

    def entries_from(self, owner):
        return (Key(DATA, 0, item) for item in count(owner, self.ranks) if self.is_for_me(owner, item))

    def is_for_me(self, owner, item):
        return self.rank in readers_of(owner, item, self.ranks)

    def put(self):
        """Put the next entry, or try the one again that did not fit."""
        if self.waiting is None:
            key = Key(DATA, 0, next(self.items) * self.ranks + self.rank)
            tensors = random_tensors(self.choose, self.noise)
            tensors.append(torch.tensor(checksum(key, tensors)))
            tensors = self.device.make(tensors)
            self.waiting = key, tensors, readers_of(self.rank, key.item, self.ranks), self.choose.random() < 0.3
        if self.pool.put(*self.waiting) is None:
            return False
        self.waiting = None
        return True

    def get(self):
        """Lease and check what has come of the entries that are expected next."""
        for owner, keys in self.window.items():
            for key in self.choose.sample(keys, len(keys)):
                if len(self.leases) == MOST_LEASES:
                    return
                lease = self.pool.get(key)
                if lease is None:
                    continue
                self.device.use(lease, check(lease, "came with wrong bytes"))
                keys[keys.index(key)] = next(self.awaited[owner])
                self.leases.append(lease)
                self.read += 1

    def release(self):
        """Release some lease, whose bytes are still as they were."""
        if self.leases:
            lease = self.leases.pop(self.choose.randrange(len(self.leases)))
            self.device.use(lease, check(lease, "has changed while it was leased"))
            lease.release()

    def run(self, seconds):
        while self.put():  # until all memory is full: on a busy machine nothing may overflow later
            pass
        end = time.monotonic() + seconds
        while time.monotonic() < end or self.waiting is not None:
            moved = self.choose.random() < 0.7 and self.put()
            self.get()
            if not moved or self.choose.random() < 0.5:
                self.release()
            self.pool.poll(0.0 if moved or self.leases else 0.05)
        self.say_last()
        while not self.is_over():
            self.get()
            self.release()
            self.pool.poll(0.0 if self.leases else 0.05)

    def say_last(self):
        """Tell all others how many entries there were; they wait for no more."""
        total = torch.tensor(next(self.items))
        while self.pool.put(Key(LAST, 0, self.rank), [total], range(self.ranks)) is None:
            self.get()
            self.release()
            self.pool.poll(0.0 if self.leases else 0.05)

    def is_over(self):
        for owner in set(range(self.ranks)) - set(self.last):
            lease = self.pool.get(Key(LAST, 0, owner))
            if lease is not None:
                self.device.finish()
                self.last[owner] = lease.tensors[0].item() * self.ranks + owner
                lease.release()
        all_read = len(self.last) == self.ranks and all(
            key.item >= self.last[owner] for owner, keys in self.window.items() for key in keys
        )
        counters = self.pool.counters
        return all_read and not self.leases and counters.current.now == counters.ahead.now == 0


def soak(rank, ranks, transport, seconds, seed):
    mesh = join_job(rank, ranks, **location_of(transport, rank))
    pool = open_pool(mesh, CAPACITY, CAPACITY, transport, late=True)
    device = LateDevice(device_of(mesh)) if transport == "device" else NO_DEVICE
    opened = set(os.listdir("/proc/self/fd"))
    one = Soak(pool, rank, ranks, seed, device)
    one.run(seconds)
    device.finish()
    assert one.read > 5 * seconds
    assert transport != "device" or 0 < device.in_place < 2 * one.read, "some entries, not all, lay on the device"
    assert pool.counters.device.now == 0
    assert pool.fits(CAPACITY), "the memory that came back is whole"
    assert pool.fits(CAPACITY, ahead=True)
    if transport != "nixl":  # which connects when something is fetched
        assert set(os.listdir("/proc/self/fd")) <= opened  # those of peers that have left are closed
    print(one.read, "entries read,", f"{pool.counters.bytes:,} bytes put,", pool.counters.refused, "refused")
    pool.close()
    mesh.close()


@pytest.mark.parametrize("transport", ["both", "device", NIXL])
def test_a_second_of_random_use(transport):
    assert_all_good(run_ranks(soak, 3, arguments=[transport, 1.0, 1]))


@pytest.mark.full
@pytest.mark.parametrize(("transport", "ranks"), [("shared_memory", 4), ("both", 4), ("device", 3)])
def test_a_minute_of_random_use(transport, ranks):
    assert_all_good(run_ranks(soak, ranks, deadline=150, arguments=[transport, 60.0, 2]))
