"""What ranks do in the tests of groups: note every collective, meet in groups, fork and meet again."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from flowtrain_lightning.parallel.ranks.connecting import connect_groups, disconnect_groups
from flowtrain_lightning.parallel.ranks.cross_group import CrossGroup
from flowtrain_lightning.parallel.ranks.groups import Groups
from flowtrain_lightning.runtime.executor import Executor
from flowtrain_lightning.trainer import half_engines
from tests.exactness.data import steps_data
from tests.exactness.layouts import trainer_for
from tests.forks import write_down
from tests.ports import free_port
from tests.tiny import TinyVLM


def list_collectives(folder: Path, *, data: str, layout: str, clip: float | None = None, early: bool = True) -> None:
    """Writes the collectives from each training step's beginning to that of the next one, as ``"group: name"``.

    Where the works begin and end is noted among them. Sums that nobody waits for are those of gradients; where they are
    not early, halves are put into their layouts as on GPUs of both roles.
    """
    events: list[str] = []
    steps: list[list[str]] = []

    class Steps(L.Callback):
        def on_train_batch_start(self, *args: Any) -> None:
            nonlocal events
            events = []
            steps.append(events)

        def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            if isinstance(trainer.strategy.model, DistributedDataParallel):
                trainer.strategy.model.register_comm_hook(None, noted_bucket)

    def noted_bucket(state, bucket):  # PyTorch takes annotations only as objects, not as text
        events.append("role: a bucket of DistributedDataParallel")
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    def note(group: str, name: str, is_async: bool) -> None:
        events.append("gradients" if is_async else f"{group}: {name}")

    for name in ("all_reduce", "broadcast", "all_gather", "all_gather_object", "broadcast_object_list", "barrier"):
        setattr(dist, name, _noted(getattr(dist, name), partial(note, "role", name)))
    for name in ("all_reduce", "broadcast"):
        setattr(CrossGroup, name, _noted(getattr(CrossGroup, name), partial(note, "all", name)))
    run_works = Executor.run

    def noted_works(executor: Executor) -> None:
        events.append("works begin")
        run_works(executor)
        events.append("works end")

    Executor.run = noted_works
    if not early:
        make_engine = half_engines.make_engine
        half_engines.make_engine = lambda *args, **settings: make_engine(*args, **{**settings, "early": False})
    trainer = trainer_for(
        layout, max_steps=5, limit_val_batches=0, gradient_clip_val=clip, callbacks=[Steps()], default_root_dir=folder
    )
    trainer.fit(TinyVLM(), datamodule=steps_data(Path(data)))
    write_down(folder, steps[:-1])  # the last one is followed by the end of the run
    disconnect_groups()


def _noted(function: Callable[..., Any], note: Callable[[bool], None]) -> Callable[..., Any]:
    def noted(*args: Any, **kwargs: Any) -> Any:
        note(kwargs.get("async_op", False))
        return function(*args, **kwargs)

    return noted


def cross_group(folder: Path) -> None:
    """Every operation of the group over all ranks, and of the role worlds, on three ranks: two worlds."""
    rank = int(os.environ["RANK"])
    groups = connect_groups(rank, ((0, 1), (2,)), "gloo", timedelta(seconds=30))
    seen = {
        "sum": groups.cross.all_reduce(torch.tensor([rank + 1])).tolist(),
        "most": groups.cross.all_reduce(torch.tensor([rank]), dist.ReduceOp.MAX).tolist(),
        "broadcast": groups.cross.broadcast(torch.tensor([10 * rank]), 1).tolist(),
        "object": groups.cross.broadcast_message({"from": rank}, 2),
        "gathered": groups.cross.gather_messages(f"rank {rank}"),
        "collectives": groups.cross.collectives,
        "role": (groups.role_rank, groups.role_ranks),
        "sum of role": groups.sum_over_role("backbone", torch.tensor([rank + 1])).tolist(),
        "objects of role": groups.gather_over_role("backbone", rank),
        "again the same": connect_groups(rank, ((0, 1), (2,)), "gloo", timedelta(seconds=30)) is groups,
    }
    other = connect_groups(rank, ((0,), (1, 2)), "gloo", timedelta(seconds=30))
    seen["role of another layout"] = (other.role_rank, other.role_ranks)
    seen["gathered in another layout"] = other.gather_over_role("backbone", rank)
    other.cross.barrier()
    with torch.device("meta"):  # as Lightning has a GPU for the default device while a module is built
        seen["beside a default device"] = [
            other.cross.broadcast_message({"tensor": torch.zeros(0, device="cpu"), "rank": rank}, 2)["rank"],
            other.cross.gather_messages(rank),
            other.cross.reduce_over((0, 2), torch.tensor([float(rank)], device="cpu"), "sum").tolist(),
            other.gather_over_role("backbone", rank),
        ]
        other.cross.barrier()
    mixed = connect_groups(rank, ((0, 1, 2),), "gloo", timedelta(seconds=30), {"backbone": (0, 1)})
    seen["objects of all"] = mixed.gather_over_role("encoder", rank)
    seen["objects of a part"] = mixed.gather_over_role("backbone", rank) if rank < 2 else mixed.ranks_of("backbone")
    mixed.cross.barrier()
    write_down(folder, seen)
    disconnect_groups()


def sum_by_meshes(folder: Path) -> None:
    """Sums over equal meshes in two layouts, of which the first has more groups, on those ranks that are in them."""
    sums, rank = [], int(os.environ["RANK"])
    for parts in ({"encoder": (0, 1), "backbone": (1, 2)}, {"encoder": (0, 1)}):
        connect_groups(rank, ((0, 1, 2),), "gloo", timedelta(seconds=30), parts)
        mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=("data",))
        if rank < 2:
            own = DTensor.from_local(torch.ones(2) + rank, mesh, [Shard(0)])
            sums.append(float(own.sum().full_tensor()))
    write_down(folder, sums)
    disconnect_groups()


def fork_after_a_run(folder: Path) -> None:
    """A process that was connected once forks two, which connect with each other."""
    patience = timedelta(seconds=30)
    connect_groups(0, ((0,),), "gloo", patience)
    disconnect_groups()
    port = free_port()

    def connect(rank: int) -> None:
        os.environ |= {"RANK": str(rank), "MASTER_PORT": str(port)}
        groups = connect_groups(rank, ((0,), (1,)), "gloo", patience)
        write_down(folder, groups.cross.gather_messages(rank))
        disconnect_groups()

    forks = [multiprocessing.get_context("fork").Process(target=connect, args=(rank,)) for rank in range(2)]
    for fork in forks:
        fork.start()
    for fork in forks:
        fork.join()


def fork_during_a_run(folder: Path) -> None:
    """A process that is connected forks; the fork tries to connect and ends, and the first goes on."""
    patience = timedelta(seconds=30)
    groups = connect_groups(0, ((0,),), "gloo", patience)
    pid = os.fork()
    if pid == 0:
        try:
            connect_groups(1, ((0,), (1,)), "gloo", patience)
        except RuntimeError as error:
            (folder / "refusal.txt").write_text(str(error))
        sys.exit(5)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    write_down(folder, {"fork ended with": code, "gathered afterwards": groups.gather_over_role("backbone", "here")})
    disconnect_groups()


def connect_again(folder: Path) -> None:
    """One process connects again and again: as before, with another timeout, and after it has left its groups."""

    def connect(seconds: int) -> Groups:
        return connect_groups(0, ((0,),), "gloo", timedelta(seconds=seconds))

    first = connect(30)
    seen: dict[str, Any] = {"same settings, same groups": connect(30) is first}
    second = connect(60)
    seen["another timeout, other groups"] = second is not first
    dist.destroy_process_group()
    seen["groups that were left are made anew"] = connect(60) is not second and dist.is_initialized()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    others = dist.group.WORLD
    try:
        connect(60)
    except RuntimeError as error:
        seen["refusal"] = str(error)
    seen["the group of others stays"] = dist.group.WORLD is others
    write_down(folder, seen)
    dist.destroy_process_group()
