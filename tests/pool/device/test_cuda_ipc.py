"""The device tier on a GPU. Skipped without one; run this file by itself, in a process that has not used CUDA before.

The simulated device shows that the order of streams is right; this shows that CUDA does what it is taken to do.
"""

import pytest
import torch

from flowtrain_lightning.pool import Key, Pool, Tier, assign_offsets, choose_device_tier, entry_nbytes
from tests.pool.ranks import join_job, lease_of
from tests.pool.test_reserved import ENTRIES, STEPS, elements, random_order
from tests.processes import assert_all_good, run_ranks

CARDS = torch.cuda.device_count()  # asks no CUDA context, so children may still make theirs
pytestmark = pytest.mark.skipif(not CARDS, reason="needs a GPU")

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.uint8)
HOST_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
TWO_CARDS = pytest.param(True, marks=pytest.mark.skipif(CARDS < 2, reason="needs two GPUs"))


def open_on_gpu(rank, ranks, nbytes, block_bytes, cards=False):
    """Mesh, pool and device of a rank; all ranks share a card, or each has its own. Device memory is required."""
    device = torch.device("cuda", rank % CARDS if cards else 0)
    torch.cuda.set_device(device)
    mesh = join_job(rank, ranks)
    tier = choose_device_tier("device", mesh, device, block_bytes)
    return mesh, tier, Pool.open(mesh, nbytes, 0, device=tier), device


def leave(mesh, tier, pool):
    while pool.counters.current.now:
        pool.poll(1.0)
    assert pool.counters.device.now == 0
    pool.close()
    tier.close()
    mesh.close()


def exchange(rank, ranks, cards):
    """Rank 0 puts tensors of many dtypes and shapes before its stream has made them; the others check them."""
    mesh, tier, pool, device = open_on_gpu(rank, ranks, 64 << 20, 16 << 20, cards)
    generator = torch.Generator().manual_seed(7)
    in_device = 0
    for item in range(60):
        shape = torch.randint(1, 300, (2,), generator=generator).tolist()
        expected = [(torch.rand(shape, generator=generator) * 4).to(dtype) for dtype in DTYPES] + [torch.zeros(0, 3)]
        if rank == 0:
            slow = torch.rand(2000, 2000, device=device)
            for _ in range(5):
                slow = slow @ slow / 1000  # so that the tensors are made some milliseconds later
            tensors = [tensor.to(device, non_blocking=True) + slow[0, 0].mul(0).to(tensor.dtype) for tensor in expected]
            tensors = [tensor.t().contiguous().t() if item % 2 else tensor for tensor in tensors]
            while (address := pool.put(Key(0, 0, item), tensors, range(1, ranks))) is None:
                pool.poll(1.0)
            in_device += address.tier is Tier.DEVICE
            del tensors
        else:
            lease = lease_of(pool, Key(0, 0, item))
            copies = [tensor.to(device, copy=True) for tensor in lease.tensors]
            lease.release()  # before the copies are done
            for found, tensor in zip(copies, expected, strict=True):
                assert found.dtype == tensor.dtype
                assert torch.equal(found.cpu(), tensor), (item, tensor.dtype)
    assert rank or in_device, "nothing lay in device memory"
    leave(mesh, tier, pool)


@pytest.mark.parametrize("cards", [False, TWO_CARDS], ids=["one card", "a card each"])
def test_what_is_put_is_what_other_processes_read(cards):
    assert_all_good(run_ranks(exchange, 3, arguments=[cards], deadline=120))


def reuse(rank, ranks):
    """A block that holds one entry, which readers are still reading on their streams when it is written again."""
    elements = 1 << 20
    nbytes = entry_nbytes([4 * elements])
    mesh, tier, pool, device = open_on_gpu(rank, ranks, 4 * nbytes, nbytes)
    for item in range(100):
        if rank == 0:
            while pool.put(Key(0, 0, item), [torch.full((elements,), float(item), device=device)], [1]) is None:
                pool.poll(1.0)
            continue
        lease = lease_of(pool, Key(0, 0, item))
        view = lease.tensors[0].to(device)
        busy = torch.rand(2000, 2000, device=device)
        for _ in range(5):
            busy = busy @ busy / 1000
        wrong = (view + busy[0, 0] * 0 != item).sum()  # runs after the release
        lease.release()
        assert wrong.item() == 0, item
    leave(mesh, tier, pool)


def test_room_is_not_written_before_readers_streams_are_done_with_it():
    assert_all_good(run_ranks(reuse, 2, deadline=120))


def pass_reserved(rank, ranks):
    order = random_order(1)
    least = assign_offsets(order).capacity
    mesh, tier, pool, device = open_on_gpu(rank, ranks, 0 if rank else least, 0 if rank else least // 2)
    for step in range(STEPS):
        keys = [Key(0, step, item) for item in range(ENTRIES)]
        if rank == 0:
            while not pool.reserve(dict(zip(keys, order, strict=True))):
                assert pool.poll(50)
            for key, reservation in zip(keys, order, strict=True):
                tensor = torch.full((elements(reservation),), float(key.item), device=device)
                while pool.put(key, [tensor], range(1, ranks)) is None:
                    assert pool.poll(50), f"{key} waits for a release that waits for it"
            continue
        leases = {}
        for position, key in enumerate(keys):
            leases[position] = lease_of(pool, key)
            for held in [held for held in leases if order[held].released_after <= position]:
                lease = leases.pop(held)
                assert lease.tensors[0].to(device).eq(held).all()
                lease.release()
    leave(mesh, tier, pool)


def test_no_reader_can_block_the_owner_at_exactly_the_capacity_that_was_named():
    assert_all_good(run_ranks(pass_reserved, 3, deadline=120))


def trace(rank, ranks):
    """Looks at what a rank calls of CUDA from its first put or get to its last release."""
    mesh, tier, pool, device = open_on_gpu(rank, ranks, 64 << 20, 64 << 20)
    tensors = [torch.rand(1 << 18, device=device) for _ in range(20)]
    torch.cuda.synchronize()
    found = []
    with torch.profiler.profile(activities=list(torch.profiler.supported_activities())) as profile:
        with torch.profiler.record_function("begin"):
            pass
        for item, tensor in enumerate(tensors):
            if rank == 0:
                assert pool.put(Key(0, 0, item), [tensor], [1]).tier is Tier.DEVICE
            else:
                lease = lease_of(pool, Key(0, 0, item))
                found.append(lease.tensors[0] + 1)
                lease.release()
        with torch.profiler.record_function("end"):
            pass
    begin, end = (next(e.time_range.start for e in profile.events() if e.name == name) for name in ("begin", "end"))
    calls = [event.name for event in profile.events() if begin <= event.time_range.start < end]
    assert any("EventRecord" in call for call in calls), "the trace shows what CUDA was called for"
    assert not [call for call in calls if call in HOST_WAITS]
    leave(mesh, tier, pool)


def test_neither_put_nor_get_nor_release_waits_on_the_host():
    assert_all_good(run_ranks(trace, 2, deadline=120))


def share_cards(rank, ranks):
    """Memory of PyTorch's allocator cannot be shared under this setting; the pool's block can."""
    torch.cuda.memory._set_allocator_settings("expandable_segments:True")  # the environment has been read by now
    exchange(rank, ranks, cards=False)


def test_expandable_segments_do_no_harm():
    assert_all_good(run_ranks(share_cards, 2, deadline=120))
