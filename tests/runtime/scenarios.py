"""What ranks do in the tests of the runtime; each function runs on every rank and writes down what it saw."""

from __future__ import annotations

import json
import os
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from flowtrain_lightning.data import PackedMedia
from flowtrain_lightning.runtime import engine as engine_module
from flowtrain_lightning.runtime.groups import CrossGroup, disconnect_groups
from flowtrain_lightning.runtime.timeline import Span
from tests.exactness.data import steps_data
from tests.exactness.layouts import trainer_for
from tests.ports import free_port
from tests.tiny import TinyVLM, tiny_data


def write_down(folder: Path, value: Any) -> None:
    """Keeps what this rank saw, for ``read_down``."""
    (folder / f"rank{os.environ['RANK']}.json").write_text(json.dumps(value))


def read_down(folder: Path) -> list[Any]:
    """What each rank wrote down, in order of ranks."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("rank*.json"))]


# ---- collectives -----------------------------------------------------------------------------------------------------


def list_collectives(folder: Path, *, data: str, layout: str, clip: float | None = None) -> None:
    """Writes the collectives from each training step's beginning to that of the next one, as ``"group: name"``.

    Where the lanes begin and end is noted among them.
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

    for name in ("all_reduce", "broadcast", "all_gather", "all_gather_object", "broadcast_object_list", "barrier"):
        setattr(dist, name, _noted(getattr(dist, name), lambda name=name: events.append(f"role: {name}")))
    for name in ("all_reduce", "broadcast"):
        setattr(CrossGroup, name, _noted(getattr(CrossGroup, name), lambda name=name: events.append(f"all: {name}")))
    run_lanes = engine_module.take_turns

    def noted_lanes(*args: Any) -> None:
        events.append("lanes begin")
        run_lanes(*args)
        events.append("lanes end")

    engine_module.take_turns = noted_lanes
    trainer = trainer_for(
        layout, max_steps=5, limit_val_batches=0, gradient_clip_val=clip, callbacks=[Steps()], default_root_dir=folder
    )
    trainer.fit(TinyVLM(), datamodule=steps_data(Path(data)))
    write_down(folder, steps[:-1])  # the last one is followed by the end of the run
    disconnect_groups()


def _noted(function: Callable[..., Any], note: Callable[[], None]) -> Callable[..., Any]:
    def noted(*args: Any, **kwargs: Any) -> Any:
        note()
        return function(*args, **kwargs)

    return noted


def cross_group(folder: Path) -> None:
    """Every operation of the group over all ranks, and of the role worlds, on three ranks: two worlds."""
    from datetime import timedelta

    from flowtrain_lightning.runtime.groups import connect_groups

    rank = int(os.environ["RANK"])
    groups = connect_groups(rank, ((0, 1), (2,)), "gloo", timedelta(seconds=30))
    seen = {
        "sum": groups.cross.all_reduce(torch.tensor([rank + 1])).tolist(),
        "most": groups.cross.all_reduce(torch.tensor([rank]), dist.ReduceOp.MAX).tolist(),
        "broadcast": groups.cross.broadcast(torch.tensor([10 * rank]), 1).tolist(),
        "object": groups.cross.broadcast_object({"from": rank}, 2),
        "gathered": groups.cross.gather_objects(f"rank {rank}"),
        "collectives": groups.cross.collectives,
        "role": (groups.role_rank, groups.role_ranks),
        "sum of role": groups.sum_over_role(torch.tensor([rank + 1])).tolist(),
        "objects of role": groups.gather_over_role(rank),
        "again the same": connect_groups(rank, ((0, 1), (2,)), "gloo", timedelta(seconds=30)) is groups,
    }
    other = connect_groups(rank, ((0,), (1, 2)), "gloo", timedelta(seconds=30))
    seen["role of another layout"] = (other.role_rank, other.role_ranks)
    seen["gathered in another layout"] = other.gather_over_role(rank)
    other.cross.barrier()
    write_down(folder, seen)
    disconnect_groups()


def fork_after_a_run(folder: Path) -> None:
    """A process that was connected once forks two, which connect with each other."""
    import multiprocessing
    from datetime import timedelta

    from flowtrain_lightning.runtime.groups import connect_groups

    patience = timedelta(seconds=30)
    connect_groups(0, ((0,),), "gloo", patience)
    disconnect_groups()
    port = free_port()

    def connect(rank: int) -> None:
        os.environ |= {"RANK": str(rank), "MASTER_PORT": str(port)}
        groups = connect_groups(rank, ((0,), (1,)), "gloo", patience)
        write_down(folder, groups.cross.gather_objects(rank))
        disconnect_groups()

    forks = [multiprocessing.get_context("fork").Process(target=connect, args=(rank,)) for rank in range(2)]
    for fork in forks:
        fork.start()
    for fork in forks:
        fork.join()


def fork_during_a_run(folder: Path) -> None:
    """A process that is connected forks; the fork tries to connect and ends, and the first goes on."""

    from datetime import timedelta

    from flowtrain_lightning.runtime.groups import connect_groups

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
    write_down(folder, {"fork ended with": code, "gathered afterwards": groups.gather_over_role("here")})
    disconnect_groups()


# ---- a half that is built under another name -------------------------------------------------------------------------


class Misplaced(TinyVLM):
    """Its backbone is not where `halves` says."""

    def configure_backbone(self) -> None:
        super().configure_backbone()
        self.language_model = self.backbone
        del self.backbone


def misplace_a_half(folder: Path, *, data: str) -> None:
    """Is refused."""
    trainer_for("1+1", max_steps=1, default_root_dir=folder).fit(Misplaced(), datamodule=tiny_data(Path(data)))


# ---- features that nobody uses ---------------------------------------------------------------------------------------


class IgnoresFeatures(TinyVLM):
    """Its backbone reads the text only."""

    def merge(self, batch: Any, features: dict[str, Any]) -> dict[str, Any]:
        return super().merge(batch, {})


def ignore_features(folder: Path, *, data: str, layout: str) -> None:
    """Trains a few epochs with pictures in every step."""
    trainer = trainer_for(layout, max_epochs=4, limit_val_batches=0, default_root_dir=folder)
    trainer.fit(IgnoresFeatures(), datamodule=tiny_data(Path(data)))
    disconnect_groups()


# ---- an encoder that does not train ----------------------------------------------------------------------------------


class SlowBackbone(TinyVLM):
    """Its backbone takes its time, so that a frozen encoder can work ahead.

    Attributes:
        skips_from: epoch and batch from which on the rest of the epoch is skipped.
    """

    skips_from = (-1, -1)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if (self.current_epoch, batch_idx) == self.skips_from else None

    def backbone_step(self, batch: Any, features: Any, stage: str) -> Any:
        time.sleep(0.03)
        return super().backbone_step(batch, features, stage)


class Notes(L.Callback):
    """Losses of training and validation, and what the lanes did."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.train: list[float] = []
        self.val: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, *args: Any) -> None:
        self.train.append(float(outputs["loss"]))

    def on_validation_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, *args: Any) -> None:
        self.val.append(float(outputs))

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if hasattr(trainer.strategy, "engine"):
            self.spans = list(trainer.strategy.engine.timeline.spans)


def freeze(
    folder: Path,
    *,
    data: str,
    layout: str,
    pool_bytes: int | None = None,
    skips_from: Sequence[int] = (-1, -1),
    **trainer: Any,
) -> None:
    """Trains with a frozen encoder; writes losses, the lanes' spans."""
    notes = Notes()
    chosen = trainer_for(
        layout,
        strategy={"pool_bytes": pool_bytes},
        callbacks=[notes],
        precision="64-true",
        default_root_dir=folder,
        **trainer,
    )
    module = SlowBackbone(freeze_encoder=True)
    module.skips_from = tuple(skips_from)
    chosen.fit(module, datamodule=tiny_data(Path(data), shuffle=False))
    write_down(folder, {"train": notes.train, "val": notes.val, "spans": notes.spans})
    disconnect_groups()


# ---- halves ----------------------------------------------------------------------------------------------------------


class Heavy(TinyVLM):
    """Each half weighs 64 MiB more than it needs."""

    ballast = 64 << 20

    def configure_encoder(self) -> None:
        super().configure_encoder()
        self.encoder.ballast = nn.Parameter(torch.randn(self.ballast // 4))

    def configure_backbone(self) -> None:
        super().configure_backbone()
        self.backbone.ballast = nn.Parameter(torch.randn(self.ballast // 4))

    def encode(self, media: PackedMedia) -> tuple[Tensor, ...]:
        return tuple(level + self.encoder.ballast[0] for level in super().encode(media))

    def merge(self, batch: Any, features: Any) -> dict[str, Any]:
        merged = super().merge(batch, features)
        return {**merged, "x": merged["x"] + self.backbone.ballast[0]}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def measure_memory(folder: Path, *, data: str, layout: str) -> None:
    """Writes by how much the memory of this rank grew, and which halves are without memory.

    ``built`` is the most bytes that were resident at a time until training began, ``trained`` what is resident after
    a step, gradients included.
    """
    seen: dict[str, Any] = {}
    Path("/proc/self/clear_refs").write_text("5")  # the most that was resident counts anew from here
    before = _memory("VmRSS")

    class Measure(L.Callback):
        def on_train_start(self, *args: Any) -> None:
            seen["built"] = _memory("VmHWM") - before

        def on_train_batch_end(self, *args: Any) -> None:
            seen["trained"] = _memory("VmRSS") - before

    module = Heavy()
    trainer = trainer_for(layout, max_steps=1, limit_val_batches=0, callbacks=[Measure()], default_root_dir=folder)
    trainer.fit(module, datamodule=steps_data(Path(data)))
    seen["absent"] = sorted({name.split(".")[0] for name, p in module.named_parameters() if p.is_meta})
    write_down(folder, seen)
    disconnect_groups()


def _memory(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) << 10


# ---- memory of a step ------------------------------------------------------------------------------------------------


class SavedTensors:
    """Bytes that autograd keeps for backwards: now, and at most."""

    def __init__(self) -> None:
        self.now = 0
        self.most = 0

    def pack(self, tensor: Tensor) -> _Saved:
        return _Saved(tensor, self)

    def unpack(self, saved: _Saved) -> Tensor:
        return saved.tensor


class _Saved:
    def __init__(self, tensor: Tensor, counter: SavedTensors) -> None:
        self.tensor = tensor
        counter.now += tensor.nbytes
        counter.most = max(counter.most, counter.now)
        weakref.finalize(self, self._freed, counter, tensor.nbytes)

    @staticmethod
    def _freed(counter: SavedTensors, nbytes: int) -> None:
        counter.now -= nbytes


KEPT_BATCHES = 4
"""Encoder batches whose activations a rank keeps by default."""


def measure_saved_tensors(folder: Path, *, data: str, layout: str, global_batch_size: int) -> None:
    """Writes how many bytes autograd kept at most, how many microbatches a step had, and its heaviest batches."""
    saved = SavedTensors()
    microbatches, heaviest = 0, 0

    class Count(L.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            nonlocal microbatches, heaviest
            plan = batch.plan
            microbatches = len(plan.microbatches[0])
            patches = sorted(int(plan.sizes.media_patches[media].sum()) for media in plan.encoder_batches[0])
            heaviest = sum(patches[-KEPT_BATCHES:])

    trainer = trainer_for(layout, max_steps=1, limit_val_batches=0, callbacks=[Count()], default_root_dir=folder)
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, saved.unpack):
        trainer.fit(TinyVLM(), datamodule=tiny_data(Path(data), global_batch_size=global_batch_size))
    write_down(folder, {"most": saved.most, "left": saved.now, "microbatches": microbatches, "heaviest": heaviest})
    disconnect_groups()


# ---- what is refused -------------------------------------------------------------------------------------------------


class Tied(TinyVLM):
    """A weight of the backbone is one of the encoder's too."""

    def configure_backbone(self) -> None:
        super().configure_backbone()
        self.backbone.block.norm.bias = self.encoder.block.norm.bias


class Homeless(TinyVLM):
    """A parameter lies under no half."""

    def configure_backbone(self) -> None:
        super().configure_backbone()
        self.scale = nn.Parameter(torch.ones(1))


def be_refused(folder: Path, *, data: str, layout: str) -> None:
    """Writes what ``fit`` says to modules that it cannot train."""
    from lightning.pytorch.demos.boring_classes import BoringModel

    told = {}
    for name, module in {"plain": BoringModel(), "tied": Tied(), "homeless": Homeless()}.items():
        try:
            trainer_for(layout, max_steps=1, default_root_dir=folder).fit(module, datamodule=tiny_data(Path(data)))
        except (TypeError, ValueError) as error:
            told[name] = f"{type(error).__name__}: {error}"
    write_down(folder, told)
    disconnect_groups()


# ---- predictions -----------------------------------------------------------------------------------------------------


def predict(folder: Path, *, data: str, layout: str) -> None:
    """Writes the predictions of this rank: ``[sample, [token, ...]]``, and how many lists it returned."""
    trainer = trainer_for(layout, precision="64-true", default_root_dir=folder)
    outputs = trainer.predict(TinyVLM(), datamodule=tiny_data(Path(data), global_batch_size=4))
    write_down(folder, [pair for step in outputs or [] for microbatch in step for pair in microbatch])
    disconnect_groups()
