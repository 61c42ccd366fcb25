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

from flowtrain_lightning.parallel.job_secret import JobKey
from flowtrain_lightning.parallel.keyed_store import KeyedStore
from flowtrain_lightning.runtime.main_thread import main_stack, main_waits_for_ranks
from tests.processes import run_ranks

LATE = 1.5  # seconds by which rank 1 comes later than rank 0


class Watching(threading.Thread):
    """Notes twenty times a second whether the main thread waits for ranks, and where it was when it did not."""

    def __init__(self):
        super().__init__(daemon=True)
        self.waits, self.elsewhere, self.over = [], [], threading.Event()

    def run(self):
        while not self.over.wait(0.05):
            self.waits.append(main_waits_for_ranks())
            if not self.waits[-1]:
                self.elsewhere.append(main_stack())


def waits_all_along(act):
    """Whether the main thread was seen to wait for ranks in nearly all of the time that ``act`` takes."""
    watching = Watching()
    watching.start()
    act()
    watching.over.set()
    watching.join()
    if sum(watching.waits) > 0.6 * len(watching.waits):
        return True
    print(*watching.elsewhere[-1:])
    return False


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
    key = JobKey(b"x" * 32)
    store = KeyedStore(FileStore(str(Path(os.environ["FOLDER"]) / "store"), ranks), key)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    for name, act in collectives(rank, ranks):
        if rank == 1:
            time.sleep(LATE)
            act()
        else:
            print(name, waits_all_along(act))
        dist.barrier()
    if rank == 0:
        print("a sleep", waits_all_along(lambda: time.sleep(LATE)))


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
