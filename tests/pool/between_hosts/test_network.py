"""Ranks on two hosts, joined by a link that loses packets, is slow, and can be cut."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch

from flowtrain_lightning.pool import Key, PeerFailed, Pool, address_towards, describe_ways
from flowtrain_lightning.pool.between_hosts.location import own_location
from flowtrain_lightning.pool.between_hosts.remote_rendezvous import UNREACHABLE_SECONDS
from flowtrain_lightning.runtime.health import HealthMonitor
from tests.hosts import ADDRESSES, Hosts, enter, why_not
from tests.pool.faults import slowness
from tests.pool.ranks import join_job, lease_of
from tests.processes import Ranks, assert_all_good, run_ranks

HOST_OF = (0, 0, 1, 1)
"""Ranks 0 and 1 run on one host, ranks 2 and 3 on the other."""


@pytest.fixture(scope="module")
def can_make_hosts():
    if reason := why_not():
        pytest.skip(f"no hosts can be made of network namespaces here: {reason}")


@pytest.fixture
def hosts(can_make_hosts):
    with Hosts() as made:
        yield made


def join_from_host(rank, ranks, job):
    """The mesh of a rank that finds out by itself where it runs, and which of its addresses others can reach."""
    host = HOST_OF[rank]
    enter(host, job)
    return join_job(rank, ranks, address=address_towards(ADDRESSES[1 - host]))


def exchange(rank, ranks, job, rounds, elements):
    """Every rank puts entries for all others and checks theirs, byte by byte."""
    mesh = join_from_host(rank, ranks, job)
    assert mesh.locations[rank] == own_location()
    pool = Pool.open(mesh, 1 << 24, 0)
    print(pool.counters.transport, describe_ways(mesh.locations), sep="\n")
    peers = [peer for peer in range(ranks) if peer != rank]
    for turn in range(rounds):
        tensors = [
            torch.randn(elements, generator=torch.Generator().manual_seed(100 * turn + of)) for of in range(ranks)
        ]
        assert pool.put(Key(rank, turn, 0), [tensors[rank], torch.tensor(turn)], peers) is not None
        for peer in peers:
            lease = lease_of(pool, Key(peer, turn, 0))
            assert torch.equal(lease.tensors[0], tensors[peer])
            assert lease.tensors[1] == turn
            lease.release()
    while pool.counters.current.now:
        pool.poll(1.0)
    pool.close()
    mesh.close()


def test_ranks_share_memory_or_talk_over_a_link_that_loses_packets(hosts):
    results = run_ranks(exchange, 3, arguments=[os.getpid(), 5, 20_000])
    assert_all_good(results)
    transports, ways = zip(*(result.out.strip().split("\n") for result in results), strict=True)
    assert transports == ("shared_memory and network", "shared_memory and network", "network")
    assert set(ways) == {"ranks 0-1 by shared memory; rank 2; between these 2 hosts by network"}


@pytest.mark.full
def test_entries_much_larger_than_any_buffer_pass_between_the_hosts(hosts):
    assert_all_good(run_ranks(exchange, 4, arguments=[os.getpid(), 2, 500_000]))


def train(rank, ranks, job):
    """Rank 0 is a backbone, the others are encoders: their gradients equal those of one process, bit by bit."""
    mesh = join_from_host(rank, ranks, job)
    pool = Pool.open(mesh, 1 << 22, 0)
    torch.manual_seed(0)
    encoder, backbone = (torch.nn.Linear(64, 64, dtype=torch.float64) for _ in range(2))
    media = [torch.randn(50, 64, dtype=torch.float64) for _ in range(ranks)]
    turns = 4
    for turn in range(turns):
        if rank:
            features = encoder(media[rank] + turn)
            pool.put(Key(0, turn, rank), [features], [0])
            gradient = lease_of(pool, Key(1, turn, rank))
            features.backward(gradient.tensors[0])
            gradient.release()
            continue
        for owner in range(1, ranks):
            lease = lease_of(pool, Key(0, turn, owner))
            features = lease.tensors[0].clone().requires_grad_()
            lease.release()
            backbone(features).square().sum().backward()
            pool.put(Key(1, turn, owner), [features.grad], [owner])
    while pool.counters.current.now:
        pool.poll(1.0)
    found = [backbone.weight.grad] if rank == 0 else [encoder.weight.grad]
    encoder.zero_grad()
    backbone.zero_grad()
    for turn in range(turns):
        for owner in range(1, ranks) if rank == 0 else [rank]:
            backbone(encoder(media[owner] + turn)).square().sum().backward()
    expected = [backbone.weight.grad] if rank == 0 else [encoder.weight.grad]
    assert torch.equal(found[0], expected[0])
    pool.close()
    mesh.close()


@pytest.mark.full
def test_features_and_gradients_through_the_link_are_exact(hosts):
    assert_all_good(run_ranks(train, 4, arguments=[os.getpid()]))


def wait_for_features(rank, ranks, job, hang_timeout=None):
    """Rank 2, on the other host, encodes without end; all wait for what it never puts."""
    mesh = join_from_host(rank, ranks, job)
    if hang_timeout is not None:
        HealthMonitor().join(mesh, hang_timeout, hang_timeout, Path(os.environ["FOLDER"]))
    pool = Pool.open(mesh, 1 << 16, 0)
    mesh.page.enter("forward of encoder batch 5" if rank == 2 else "wait for features", 3)
    pool.put(Key(rank, 0, 0), [torch.ones(9)], [peer for peer in range(ranks) if peer != rank])
    time.sleep(1.0)  # what a rank does is known on the other host a fraction of a second later
    Path(os.environ["FOLDER"], f"ready{rank}").touch()
    try:
        while not Path(os.environ["FOLDER"], "done").exists():
            pool.poll(0.5)
    except PeerFailed as error:
        print(time.monotonic(), error, flush=True)
        if hang_timeout is not None:
            time.sleep(20)  # the health monitor ends this process earlier, and the one that is stopped
        os._exit(7)
    for peer in range(ranks):
        if peer != rank:
            lease_of(pool, Key(peer, 0, 0)).release()
    while pool.counters.current.now:
        pool.poll(1.0)
    pool.close()
    mesh.close()


def start_waiting(hang_timeout=None):
    ranks = Ranks(wait_for_features, 4, [os.getpid(), hang_timeout])
    try:
        for rank in range(4):
            ranks.wait_for(f"ready{rank}")
    except BaseException:
        ranks.__exit__(None, None, None)
        raise
    return ranks


def blamed(result):
    moment, _, sentence = result.out.partition(" ")
    assert result.code == 7, str(result)
    return float(moment), sentence


@pytest.mark.full
def test_a_rank_that_dies_is_named_on_both_hosts_within_two_seconds(hosts):
    with start_waiting() as ranks:
        killed = time.monotonic()
        ranks.signal(2, signal.SIGKILL)
        results = ranks.wait(20)
    for result in (results[0], results[1], results[3]):
        moment, sentence = blamed(result)
        assert moment - killed < 2 * slowness()
        assert sentence.startswith("Rank 2 (encoder 1) died")
        assert "in phase 'forward of encoder batch 5' of step 3" in sentence


@pytest.mark.full
def test_a_rank_that_is_stopped_is_named_on_both_hosts_when_it_hangs(hosts):
    with start_waiting(hang_timeout=8.0) as ranks:
        ranks.signal(2, signal.SIGSTOP)
        results = ranks.wait(30)
    assert [result.code for result in results] == [1, 1, -signal.SIGKILL, 1]
    for result in (results[0], results[1], results[3]):
        assert "Rank 2 (encoder 1) was stopped in phase 'forward of encoder batch 5' of step 3" in result.err, result


@pytest.mark.full
def test_when_the_link_is_cut_each_host_says_so_of_the_other(hosts):
    with start_waiting() as ranks:
        cut = time.monotonic()
        hosts.cut()
        results = ranks.wait(40)
    for result in results:
        moment, sentence = blamed(result)
        assert moment - cut < UNREACHABLE_SECONDS + 5 * slowness()
        assert "can no longer be reached" in sentence
        assert (
            f"Rank {2 - 2 * HOST_OF[result.rank]} " in sentence or f"Rank {3 - 2 * HOST_OF[result.rank]} " in sentence
        )


@pytest.mark.full
def test_a_link_that_is_mended_in_time_does_no_harm(hosts):
    with start_waiting() as ranks:
        hosts.cut()
        time.sleep(3.0)
        hosts.mend()
        (ranks.folder / "done").touch()
        assert_all_good(ranks.wait(40))
