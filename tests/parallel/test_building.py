"""A half that is sharded is never whole on a rank, and begins with the weights of one process."""

from __future__ import annotations

import ctypes
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from flowtrain_lightning.parallel.fully_shard import FullyShardedHalf
from flowtrain_lightning.parallel.ranks.connecting import disconnect_groups
from flowtrain_lightning.parallel.unfilled_weights import UnfilledWeights
from tests.exactness.data import steps_data, write_steps
from tests.exactness.layouts import ranks_of, trainer_for
from tests.exactness.modules import Deep
from tests.exactness.train import weights_of
from tests.forks import Job, read_down, run_jobs, write_down
from tests.processes import memory_of_process

SHARDED = {"encoder": {"shard": "fsdp"}, "backbone": {"shard": "fsdp"}}


class Pairs(Deep):
    """Its backbone gathers two blocks at a time."""

    def parallelize_backbone(self, mesh: Any, **settings: Any) -> None:
        assert mesh.mesh_dim_names == ("shard",)
        fully_shard(list(self.backbone.more[:2]), mesh=mesh, **settings)


class Early(Deep):
    """Its backbone is built at once."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        super().configure_backbone()

    def configure_backbone(self) -> None:
        pass


KINDS = {"deep": Deep, "pairs": Pairs, "early": Early}


def initial_weights(folder: Path, *, data: str, layout: str, kind: str, roles: dict[str, Any]) -> None:
    """Which weights of this rank differ from those of one process before the first step, and what is gathered alone."""
    seen: dict[str, Any] = {}

    class Look(L.Callback):
        def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            weights = weights_of(pl_module)
            expected = KINDS[kind](lr=1e-3)
            expected.configure_model()
            alone = dict(expected.named_parameters())
            seen["compared"] = len(weights)
            seen["differ"] = [name for name, weight in weights.items() if not torch.equal(weight, alone[name])]
            seen["alone"] = [name for name, part in pl_module.named_modules() if isinstance(part, FSDPModule)]

    trainer = trainer_for(
        layout,
        strategy={"roles": roles},
        max_steps=1,
        limit_val_batches=0,
        callbacks=[Look()],
        default_root_dir=folder,
    )
    L.seed_everything(7, verbose=False)
    trainer.fit(KINDS[kind](lr=1e-3), steps_data(Path(data)))
    seen["loss"] = float(trainer.callback_metrics["train_loss"])
    write_down(folder, seen)
    disconnect_groups()


class HeavyBlock(nn.Module):
    """16 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2048, 2048))


_MMAP_THRESHOLD = -3  # of mallopt(3)


class Heavy(nn.Module):
    """A half of so many blocks."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self._count = blocks

    def build(self) -> None:
        self.blocks = nn.ModuleList(HeavyBlock() for _ in range(self._count))


def memory_of_building(folder: Path, *, ranks: int, blocks: int) -> None:
    """The most bytes by which this process grew while it built and sharded a half, as one of so many ranks.

    The others are not there: who builds says nothing to them. It has built and sharded a small half before.
    """
    ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 1 << 20)  # what is freed goes back at once
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("shard",))
    for count in (1, blocks):
        Path("/proc/self/clear_refs").write_text("5")  # the most that was resident counts anew from here
        before = memory_of_process("VmRSS")
        half = Heavy(count)
        weights = UnfilledWeights(half, half.build, ("weights",))
        fill = partial(weights.fill, half, lambda name: True, torch.device("cpu"))
        engine = FullyShardedHalf({"half": half}, mesh, fill=fill)
        assert len(engine.parameters) == count
    write_down(folder, {"grown": memory_of_process("VmHWM") - before})


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("building")
    write_steps(folder)
    return str(folder)


def ran(folder: Path, function: str, layout: str, **arguments: Any) -> list[dict[str, Any]]:
    arguments = {"layout": layout, **arguments}
    job = Job(function, f"{__name__}:{function}", ranks_of(layout), arguments)
    return read_down(run_jobs(folder, [job])[function].check().folder)


LONGER = [pytest.param(kind, marks=pytest.mark.full) for kind in ("pairs", "early")]


@pytest.mark.parametrize("kind", ["deep", *LONGER])
def test_shards_hold_the_weights_that_one_process_builds(tmp_path, data, kind):
    for found in ran(tmp_path, "initial_weights", "colocated 2", data=data, kind=kind, roles=SHARDED):
        assert found["differ"] == []
        assert found["compared"] > 20
        gathered = [name for name in found["alone"] if name.startswith("backbone")]
        if kind == "pairs":
            assert gathered == ["backbone.more.0", "backbone.more.1"]
        else:
            assert gathered == ["backbone.block", "backbone.more.0", "backbone.more.1", "backbone.more.2"]


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "roles"),
    [
        ("1+2", {"backbone": {"shard": "fsdp"}}),
        ("2+2", SHARDED),
        ("1+4", {"backbone": {"shard": "fsdp", "replicas": 2}}),
        ("colocated 2", {"backbone": {"shard": "fsdp"}}),
    ],
)
def test_every_layout_begins_with_the_weights_of_one_process(tmp_path, data, layout, roles):
    for found in ran(tmp_path, "initial_weights", layout, data=data, kind="deep", roles=roles):
        assert found["differ"] == []


def test_building_takes_the_memory_of_a_shard_and_one_block(tmp_path):
    block, blocks, ranks = 16 << 20, 12, 3
    shard = blocks * block / ranks
    job = Job("memory", f"{__name__}:memory_of_building", 1, {"ranks": ranks, "blocks": blocks}, deadline=240)
    (found,) = read_down(run_jobs(tmp_path, [job])["memory"].check().folder)
    assert 0.9 * shard < found["grown"] <= 1.3 * shard + block
