"""Ranks of several hosts meet while strangers come to their ports, say something or nothing, and go or stay."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest
from torch.distributed import FileStore, PrefixStore, Store

from flowtrain_lightning.pool import Mesh
from flowtrain_lightning.pool.control_records import ControlRecord, Kind
from tests.pool.between_hosts.strangers import Address, Crowd, greet_and_go, speak_with_another_secret
from tests.pool.ranks import SECRET, labels, receive_all
from tests.processes import Ranks, assert_all_good

RANKS = 3  # two of them on one host
SECONDS = 30.0


def store_of(start: int) -> Store:
    return PrefixStore(f"start {start}", FileStore(str(Path(os.environ["FOLDER"], "store")), -1))


def meet(rank: int, starts: int) -> None:
    """Ranks come one after the other, while the strangers are at the ports of those that have come."""
    choose = random.Random(rank)
    for start in range(starts):
        time.sleep(choose.random() * 0.2 * rank)
        where = {"address": "127.0.0.1", "location": f"host {rank % 2}", "secret": SECRET}
        mesh = Mesh.connect(store_of(start), rank, RANKS, labels(RANKS), SECONDS, **where)
        for peer in mesh.peers:
            mesh.send(peer, ControlRecord(Kind.RELEASE, rank, number=start))
        assert [record.number for record in receive_all(mesh, RANKS - 1)] == [start] * (RANKS - 1)
        mesh.close()
        Path(os.environ["FOLDER"], f"met {start} {rank}").touch()


def addresses(store: Store) -> list[Address]:
    """At which ranks listen so far."""
    hosts = (store.get(key).decode().split("\n") for rank in range(RANKS) if store.check([key := f"mesh/host/{rank}"]))
    return [(host, int(port)) for _, host, *ports in hosts for port in ports]


def fire(starts: int, seed: int) -> None:
    """Come to all ports of each start until all ranks have met."""
    folder, choose = Path(os.environ["FOLDER"]), random.Random(seed)
    crowd = Crowd(choose)
    for start in range(starts):
        store = store_of(start)
        while not all((folder / f"met {start} {rank}").exists() for rank in range(RANKS)):
            if (folder / "failed").exists():
                return
            known = addresses(store)
            if not known:
                time.sleep(0.005)
                continue
            for _ in range(20):
                if seed % 2:
                    greet_and_go(choose.choice(known))
                else:
                    crowd.fire(known)
            if seed % 2:
                speak_with_another_secret(known)
        crowd.close()


def meet_or_fire(rank: int, processes: int, starts: int) -> None:
    if rank < RANKS:
        try:
            meet(rank, starts)
        except BaseException:
            Path(os.environ["FOLDER"], "failed").touch()
            raise
    else:
        fire(starts, rank)


@pytest.mark.parametrize("starts", [3, pytest.param(100, marks=pytest.mark.full)])
def test_every_start_ends_well_whoever_comes_to_the_ports(starts):
    with Ranks(meet_or_fire, RANKS + 2, [starts]) as started:
        assert_all_good(started.wait(600))
