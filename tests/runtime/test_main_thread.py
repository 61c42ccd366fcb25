"""A monitor tells a rank that waits for others from one that computes, whoever has called the collective."""

import os
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import FileStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from flowtrain_lightning.parallel.ranks.job_secret import JobKey
from flowtrain_lightning.parallel.ranks.keyed_store import KeyedStore
from flowtrain_lightning.runtime.main_thread import main_stack, main_waits_for_ranks
from tests.processes import run_ranks

SEEN = 5  # looks in a row
LATEST = 60.0  # seconds


class Watching(threading.Thread):
    """Looks 20 times a second whether the main thread waits for ranks, and tells so by a file once it surely does."""

    def __init__(self, told):
        super().__init__(daemon=True)
        self.told, self.in_a_row, self.elsewhere, self.over = told, 0, "", threading.Event()

    def run(self):
        while not self.over.wait(0.05):
            self.in_a_row = self.in_a_row + 1 if main_waits_for_ranks() else 0
            if self.in_a_row == SEEN:
                self.told.touch()
            elif not self.in_a_row:
                self.elsewhere = main_stack()


def surely_waits(act, told):
    """Whether the main thread was seen to wait for ranks, several times in a row, while it acts."""
    watching = Watching(told)
    watching.start()
    act()
    watching.over.set()
    watching.join()
    if told.exists():
        return True
    told.touch()  # the other rank goes on
    print(watching.elsewhere)
    return False


def wait_for(file):
    deadline = time.monotonic() + LATEST
    while not file.exists() and time.monotonic() < deadline:
        time.sleep(0.02)


def collectives(rank, ranks):
    """What both ranks take part in, by name."""
    mesh = init_device_mesh("cpu", (ranks,))
    shard = DTensor.from_local(torch.ones(4, requires_grad=True), mesh, [Shard(0)])
    layer = nn.Linear(4, 4)
    fully_shard(layer, mesh=mesh)
    results = []
    yield "a barrier", dist.barrier
    yield "a gathered DTensor", lambda: results.append(shard.redistribute(mesh, [Replicate()]).to_local().sum())
    yield "its backward", lambda: results.pop().backward()
    yield "a forward of FSDP2", lambda: results.append(layer(torch.ones(1, 4)).sum())
    yield "its backward, too", lambda: results.pop().backward()
    yield "a new group", lambda: dist.new_group([0, 1])


def acts(rank, ranks):
    """Rank 1 takes part once rank 0 was seen to wait for it, or has gone on without it."""
    folder = Path(os.environ["FOLDER"])
    store = KeyedStore(FileStore(str(folder / "store"), ranks), JobKey(b"x" * 32))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    for name, act in collectives(rank, ranks):
        told = folder / name
        if rank == 0:
            print(name, surely_waits(act, told))
        else:
            wait_for(told)
            act()
        dist.barrier()
    if rank == 0:
        print("a sleep", surely_waits(lambda: time.sleep(1), folder / "a sleep"))


def test_ranks_wait_in_collectives_of_every_layout_and_not_in_their_own_code():
    first, _ = run_ranks(acts, 2)
    answers = [line for line in first.out.splitlines() if line.endswith(("True", "False"))]
    assert answers == [
        "a barrier True",
        "a gathered DTensor True",
        "its backward False",  # which sums nothing
        "a forward of FSDP2 True",
        "its backward, too True",
        "a new group True",
        "a sleep False",
    ], str(first)
