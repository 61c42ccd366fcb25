"""How ranks open each other's device memory, and what happens where one of them cannot."""

import pytest
import torch

from flowtrain_lightning.pool import Key, Pool, PoolError, Tier, choose_device_tier, open_device_tier
from flowtrain_lightning.pool.control_records import ControlRecord, Kind
from tests.pool.device.simulated import simulated
from tests.pool.ranks import lease_of, meshes, on_all_ranks, wait_for

NBYTES = 1 << 16


@pytest.fixture
def three():
    with meshes(3) as made:
        yield made


@pytest.fixture
def devices():
    made = [simulated(rank) for rank in range(3)]
    yield made
    for device in made:
        device.close()


def open_tiers(made, devices, nbytes=NBYTES, required=False):
    return on_all_ranks(lambda rank: open_device_tier(made[rank], devices[rank], nbytes, required), len(made))


def passes(pools, owner, reader):
    """Where an entry lay that has passed from one rank to another."""
    key, tensor = Key(0, owner, reader), torch.full((1000,), 10.0 * owner + reader)
    address = pools[owner].put(key, [tensor], [reader])
    lease = lease_of(pools[reader], key)
    assert torch.equal(lease.tensors[0], tensor)
    lease.release()
    wait_for(pools[owner], lambda: pools[owner].counters.current.now == 0)
    return address.tier


def open_pools(made, tiers, runtimes=(None, None, None)):
    return on_all_ranks(
        lambda rank: Pool.open(made[rank], NBYTES, 0, device=tiers[rank], runtime=runtimes[rank]), len(made)
    )


def test_all_ranks_read_all_blocks_in_place(three, devices):
    tiers = open_tiers(three, devices)
    assert (
        tiers[0].sentence == "device memory of rank 0: 65,536 bytes of a simulated device, read in place by ranks 1, 2"
    )
    pools = open_pools(three, tiers)
    assert {passes(pools, owner, reader) for owner in range(3) for reader in range(3)} == {Tier.DEVICE}


def test_a_rank_that_can_open_no_block_is_reached_through_host_memory(three, devices):
    devices[1] = simulated(1, blind=True)
    tiers = open_tiers(three, devices)
    assert tiers[0].sentence.endswith("by ranks 2; rank 1 cannot read the block of rank 0 (invalid device context)")
    assert "read in place" not in tiers[1].sentence
    pools = open_pools(three, tiers)
    assert passes(pools, 0, 2) is Tier.DEVICE
    assert [passes(pools, *pair) for pair in [(0, 1), (1, 0), (1, 2), (2, 1)]] == [Tier.HOST] * 4


def test_host_memory_is_pinned_where_entries_pass_through_it(three, devices):
    devices[1] = simulated(1, blind=True)
    for tiers, pinned in ((open_tiers(three, devices), [2, 3, 2]), ((None, None, None), [3, 3, 3])):
        pools = open_pools(three, tiers, devices)
        assert [device.pinned for device in devices] == pinned, "the own segment, and those that are read"
        for pool in pools:
            pool.close()
        assert [device.pinned for device in devices] == [0, 0, 0]


def test_a_block_that_holds_other_bytes_than_were_written_is_not_used(three, devices, monkeypatch):
    monkeypatch.setattr(devices[1], "copy", lambda target, source: None)
    tiers = open_tiers(three, devices)
    assert (
        "rank 2 cannot read the block of rank 1 (it holds other bytes than its owner has written)" in tiers[1].refusals
    )
    pools = open_pools(three, tiers)
    assert passes(pools, 0, 1) is Tier.DEVICE
    assert passes(pools, 1, 0) is Tier.HOST


def test_a_rank_without_memory_for_a_block_still_reads_those_of_others(three, devices, monkeypatch):
    def fails(nbytes):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(devices[2], "allocate", fails)
    tiers = open_tiers(three, devices)
    assert tiers[2].refusals == ("rank 2 can make no block on a simulated device (out of memory)",)
    assert "rank 2 has no block (out of memory)" in tiers[0].refusals
    pools = open_pools(three, tiers)
    assert passes(pools, 0, 2) is Tier.DEVICE
    assert passes(pools, 2, 0) is Tier.HOST


def test_a_block_finds_the_room_that_pytorch_keeps_on_a_full_card(three, devices):
    devices[1].room, devices[1].kept = NBYTES // 2, NBYTES
    assert not any(tier.refusals for tier in open_tiers(three, devices))
    assert devices[1].kept == 0


def test_a_rank_that_only_reads_has_no_block_and_needs_none(devices):
    with meshes(2) as made:
        tiers = on_all_ranks(lambda r: open_device_tier(made[r], devices[r], 0 if r else NBYTES, required=True), 2)
        assert tiers[0].refusals == tiers[1].refusals == ()
        pools = open_pools(made, tiers)
        assert passes(pools, 0, 1) is Tier.DEVICE
        assert passes(pools, 1, 0) is Tier.HOST


def test_what_is_required_and_does_not_work_is_an_error_on_both_sides(devices):
    devices[1] = simulated(1, blind=True)
    with meshes(2) as made:
        told = on_all_ranks(lambda rank: refusal(made[rank], devices[rank]), 2)
    assert all("rank 1 cannot read the block of rank 0" in sentence for sentence in told)


def refusal(mesh, device):
    with pytest.raises(PoolError, match=r"Device memory was asked for, but .* Use host memory") as caught:
        open_device_tier(mesh, device, NBYTES, required=True)
    return str(caught.value)


def test_a_block_is_freed_after_all_who_read_it_have_let_go_of_it(three, devices, monkeypatch):
    monkeypatch.setattr("flowtrain_lightning.pool.device.device_opening.CLOSE_SECONDS", 30.0)
    closed = devices[0].closed
    for device in devices:
        device.closed = closed
    tiers = open_tiers(three, devices)
    pools = open_pools(three, tiers)

    def leave(rank):
        for _ in range(rank):  # some ranks use their pool while others have closed theirs
            pools[rank].poll(0.2)
        pools[rank].close()
        tiers[rank].close()

    on_all_ranks(leave, 3)
    assert len(closed) == 9
    for name in {name for _, name in closed}:
        assert [what for what, whose in closed if whose == name] == ["closed", "closed", "freed"]


def test_a_block_that_somebody_may_still_read_is_not_freed(three, devices, monkeypatch):
    monkeypatch.setattr("flowtrain_lightning.pool.device.device_opening.CLOSE_SECONDS", 0.1)
    tiers = open_tiers(three, devices)
    tiers[0].close()
    assert [what for what, _ in devices[0].closed] == ["closed", "closed"]


@pytest.mark.parametrize("payload", [b"", b"short", bytes(16 + 64 * 3), bytes(16 + 64 * 2)])
def test_what_is_no_block_is_not_opened(payload, devices):
    with meshes(2) as made:

        def tell_a_lie():
            mesh = made[1]
            mesh.send(0, ControlRecord(Kind.BLOCK, 1, mesh.begin_link(), number=1, size=4096, payload=payload))
            answers = mesh.receive(50)
            while not any(record.kind is Kind.BLOCK_READ for record in answers):
                answers += mesh.receive(50)
            return next(record for record in answers if record.kind is Kind.BLOCK_READ)

        def listen():
            return open_device_tier(made[0], devices[0], 0)

        tier, answer = on_all_ranks(lambda rank: tell_a_lie() if rank else listen(), 2)
        assert answer.number == 0
        assert list(tier.readable) == []
        assert "rank 0 cannot read the block of rank 1" in tier.sentence


@pytest.mark.parametrize(("choice", "words"), [("auto", None), ("host", None), ("device", "computes on cpu")])
def test_ranks_that_compute_on_the_cpu_have_no_device_tier(choice, words):
    with meshes(1) as (mesh,):
        if words is None:
            assert choose_device_tier(choice, mesh, torch.device("cpu"), NBYTES) is None
        else:
            with pytest.raises(PoolError, match=words):
                choose_device_tier(choice, mesh, torch.device("cpu"), NBYTES)


def test_ranks_of_other_hosts_are_reached_as_without_a_device(devices):
    with meshes(3, "both") as made:  # ranks 0 and 2 share a host
        tiers = open_tiers(made, devices)
        assert "ranks 2" in tiers[0].sentence
        pools = open_pools(made, tiers)
        assert [passes(pools, 0, reader) for reader in (1, 2)] == [Tier.HOST, Tier.DEVICE]
        assert pools[0].put(Key(1, 0, 0), [torch.ones(9)], [1, 2]).tier is Tier.HOST
        assert all(lease_of(pool, Key(1, 0, 0)).tensors[0].eq(1).all() for pool in pools[1:])


def test_an_entry_in_device_memory_that_a_rank_cannot_read_is_refused(three):
    pools = on_all_ranks(lambda rank: Pool.open(three[rank], NBYTES, 0), 3)
    address = pools[0].put(Key(0, 0, 0), [torch.ones(10)], [2])
    record = ControlRecord(Kind.PUBLISH, 0, three[0].link, address=address | 1 << 49, size=256)
    three[0].send(1, record)
    with pytest.raises(PoolError, match="in device memory, which this rank cannot read"):
        pools[1].poll(50)
