"""Entries that pass from device to device through host memory: no thread waits, and no copy ever comes too early."""

from functools import partial
from itertools import permutations

import pytest
import torch

from flowtrain_lightning.pool import Key, Pool, entry_nbytes
from flowtrain_lightning.pool.device.host_copies import HostCopies
from tests.pool.device.simulated import Event, SimulatedRuntime, Stepped
from tests.pool.ranks import meshes, on_all_ranks

OWNER, READER = 0, 1
ENTRIES = 3
ENTRY_BYTES = entry_nbytes([4000])
"""Size of an entry of a thousand floats."""


class Pair:
    """Pools of an owner and of a reader without device memory in common, whose devices do what they are told to."""

    def __init__(self, made):
        self.owners, self.readers = (SimulatedRuntime(Stepped(), Stepped()) for _ in range(2))
        runtimes = [self.owners, self.readers]
        self.owner, self.reader = on_all_ranks(
            lambda rank: Pool.open(made[rank], ENTRY_BYTES, 0, runtime=runtimes[rank]), 2
        )

    @property
    def streams(self):
        return [self.owners.current_stream, self.owners.side, self.readers.current_stream]

    def run(self):
        """Lets the streams do all that they can."""
        while any(stream.step() for stream in self.streams):
            pass

    def close(self):
        self.run()
        for pool in (self.owner, self.reader):
            pool.close()
        for runtime in (self.owners, self.readers):
            runtime.close()


@pytest.fixture
def pair():
    with meshes(2) as made:
        pair = Pair(made)
        yield pair
        pair.close()


def test_any_number_of_copies_may_be_underway():
    runtime, done = SimulatedRuntime(Stepped(), Stepped()), []
    copies = HostCopies(runtime)
    for number in range(2000):  # of events that others could open there would be 1,024
        copies.write([(torch.zeros(1), torch.ones(1))], partial(done.append, number))
    while any(stream.step() for stream in (runtime.current_stream, runtime.side)):
        pass
    copies.finish()
    assert done == list(range(2000))
    runtime.close()


def test_an_entry_is_published_when_its_copy_is_done_and_not_before(pair):
    tensor = torch.zeros(1000)
    pair.owners.current_stream.put(lambda: tensor.fill_(1))
    pair.owner.put(Key(0, 0, 0), [tensor], [READER])
    pair.owner.poll()
    assert not pair.reader.poll(0.01)
    pair.run()
    assert pair.owner.poll(), "its own copy has come to its end"
    assert pair.reader.poll(10)
    lease = pair.reader.get(Key(0, 0, 0))
    assert lease.tensors[0].eq(1).all()


def test_an_entry_is_given_back_when_its_readers_copy_is_done_and_not_before(pair):
    pair.owner.put(Key(0, 0, 0), [torch.ones(1000)], [READER])
    pair.run()
    pair.owner.poll()
    pair.reader.poll(10)
    pair.reader.get(Key(0, 0, 0)).release()
    pair.reader.poll()
    assert not pair.owner.poll(0.01)
    assert pair.owner.counters.current.now == ENTRY_BYTES
    pair.readers.current_stream.step()
    pair.reader.poll()
    pair.owner.poll(10)
    assert pair.owner.counters.current.now == 0


def test_a_rank_that_waits_for_others_finds_out_that_its_own_copies_are_done(pair):
    pair.owner.put(Key(0, 0, 0), [torch.ones(1000)], [OWNER, READER])
    pair.run()
    assert pair.owner.poll(100)
    assert pair.owner.get(Key(0, 0, 0)) is not None


def test_whoever_settles_leaves_nothing_unpublished(pair):
    pair.owner.put(Key(0, 0, 0), [torch.ones(1000)], [READER])
    pair.run()
    pair.owner.settle()
    assert pair.reader.poll(10)


def test_tensors_of_other_devices_are_copied_at_once(pair, monkeypatch):
    monkeypatch.setattr(pair.owners, "holds", lambda tensor: False)
    pair.owner.put(Key(0, 0, 0), [torch.ones(1000)], [READER])
    assert pair.reader.poll(10)


def pass_three(runs_first):
    """Whether three entries arrive as they are made, one after another in the same bytes.

    The ranks' threads go on while they can; then the first of the streams ``runs_first`` that can does its next thing.
    """
    with meshes(2) as made:
        pair, seen, put, got = Pair(made), [], 0, 0
        for _ in range(200):
            put_before, got_before = put, got
            if put < ENTRIES and pair.owner.fits(ENTRY_BYTES):
                tensor, put = torch.zeros(1000), put + 1
                pair.owners.current_stream.put(lambda tensor=tensor, number=put: tensor.fill_(number))
                pair.owner.put(Key(0, 0, put), [tensor], [READER])
            if got < put and (lease := pair.reader.get(Key(0, 0, got + 1))) is not None:
                (view,), got = lease.tensors, got + 1
                pair.readers.current_stream.put(lambda view=view: seen.append(view.clone()))
                lease.release()
            heard = pair.owner.poll() or pair.reader.poll()
            if not heard and (put, got) == (put_before, got_before):
                any(pair.streams[which].step() for which in runs_first)
        pair.close()
    assert len(seen) == ENTRIES, "somebody waits for what never comes"
    return all(found.eq(number).all() for number, found in enumerate(seen, 1))


def test_every_byte_is_right_whichever_stream_runs_first():
    assert all(pass_three(order) for order in permutations(range(3)))


@pytest.mark.parametrize(
    "left_out", ["what the tensors wait for", "the mark of what is written", "that of what is read"]
)
def test_without_any_one_of_the_three_some_byte_would_be_wrong(monkeypatch, left_out):
    if left_out == "what the tensors wait for":
        monkeypatch.setattr(Event, "wait", lambda event, stream: None)
    else:
        name = "write" if "written" in left_out else "after_reads"
        marked = HostCopies.__dict__[name]

        def at_once(copies, *arguments):
            *_, then = arguments
            marked(copies, *arguments[:-1], lambda: None)
            then()

        monkeypatch.setattr(HostCopies, name, at_once)
    assert not all(pass_three(order) for order in permutations(range(3)))
