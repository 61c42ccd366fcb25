"""The five variants of `benchmarks/gpu.py`: what one process does in a run, and what it writes down."""

from __future__ import annotations

import json
import os
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
import torch.distributed as dist

from benchmarks.gpu_model import Layers, config_of, packed_model
from benchmarks.modules import Work
from benchmarks.padded_transformers import train_padded
from flowtrain_lightning import FlowModule, FlowTrainStrategy
from flowtrain_lightning.allocator import BACKBONE, ENCODER
from flowtrain_lightning.allocator.devices import maker_device
from flowtrain_lightning.compute.feature_spec import as_features
from flowtrain_lightning.data import Features, RankShard, StepBatch
from flowtrain_lightning.data.loading.dataloader import StepLoader
from flowtrain_lightning.data.loading.dataset import StepDataset
from flowtrain_lightning.metrics import FlopUtilization
from flowtrain_lightning.packing.step_plan import IMAGE
from flowtrain_lightning.placement.flop_counter import count_flops
from flowtrain_lightning.placement.probes import load_probes
from flowtrain_lightning.runtime.rank_metrics import peak_memory

VARIANTS = {
    "padded": "transformers.Trainer, padded batches",
    "loop": "plain loop, packed batches",
    "auto": "plain Lightning, packed batches",
    "colocated": "flowtrain, colocated",
    "separate": "flowtrain, separate",
}
"""Name -> what it is, in the table."""


@dataclass(frozen=True)
class Run:
    """What one run does.

    Attributes:
        variant: one of ``VARIANTS``.
        model: one of `benchmarks.gpu_model.MODELS`.
        recompute: gradient checkpointing, alike in all variants.
        work: the data.
        padded_samples: of one batch of the padded variant.
        warmup: steps before the measurement.
        steps: steps that are measured.
        on_gpu: trains on GPUs in bfloat16, else on the CPU in float32.
        folder: where ``rank<r>.json`` are written.
        asked_devices: on how many it should train.
        shared: there is one GPU, so that separate roles share it.
        layers: how PyTorch runs those of all variants but the padded one.
    """

    variant: str
    model: str
    recompute: bool
    work: Work
    padded_samples: int
    warmup: int
    steps: int
    on_gpu: bool
    folder: Path
    asked_devices: int = 1
    shared: bool = False
    layers: Layers = "eager"

    @property
    def ranks(self) -> int:
        """How many processes train: separate roles need two."""
        return max(2, self.asked_devices) if self.variant == "separate" else self.asked_devices

    @property
    def devices(self) -> int:
        """How many devices they have."""
        return 1 if self.variant == "separate" and self.shared else self.ranks


Spent = Mapping[tuple[str, str], float]
"""Lane and kind -> seconds; see `flowtrain_lightning.runtime.timeline.Timeline`."""


class StepClock:
    """Times the steps after the warm-up, all together: nobody waits for the device between them.

    Args:
        run: whose steps.
        rank: that counts them.
        spent: how the time of the rank's lanes was spent so far, where it has lanes.
    """

    def __init__(self, run: Run, rank: int = 0, spent: Callable[[], Spent] = dict) -> None:
        self._run = run
        self._rank = rank
        self._spent = spent
        self._before: Spent = {}
        self._ended = 0
        self._began = 0.0

    def step_ended(self) -> None:
        """Counts a step; after the last one, writes what was found."""
        self._ended += 1
        if self._ended == self._run.warmup:
            self._began = self._now()
            self._before = dict(self._spent())
        elif self._ended == self._run.warmup + self._run.steps:
            seconds = self._now() - self._began
            lanes = {
                f"{lane} {kind}": spent - self._before.get((lane, kind), 0.0)
                for (lane, kind), spent in self._spent().items()
            }
            found = {"seconds": seconds, "memory": peak_memory(), "lanes": lanes}
            (self._run.folder / f"rank{self._rank}.json").write_text(json.dumps(found))

    def _now(self) -> float:
        if self._run.on_gpu:
            torch.cuda.synchronize()
        return time.monotonic()


class _Clocked(L.Callback):
    """Tells a clock of Lightning's steps."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Starts the clock of this rank."""
        timeline = trainer.strategy.runner.timeline if isinstance(trainer.strategy, FlowTrainStrategy) else None
        self._clock = StepClock(self._run, trainer.global_rank, dict if timeline is None else lambda: timeline.totals)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: StepBatch, batch_idx: int
    ) -> None:
        """Tells it."""
        self._clock.step_ended()


class _CountedWaits(L.Callback):
    """Writes how often, and where, the host waits for the GPU in a step; PyTorch tells, as warnings."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._places: Counter[str] = Counter()

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Begins to count after the warm-up."""
        if batch_idx == self._run.warmup:
            warnings.simplefilter("always")
            warnings.showwarning = self._note  # type: ignore[assignment]
            if self._run.on_gpu:
                torch.cuda.set_sync_debug_mode("warn")

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Writes what was found."""
        if self._run.on_gpu:
            torch.cuda.set_sync_debug_mode("default")
        found = {"waits": sum(self._places.values()) / self._run.steps, "places": dict(self._places.most_common(8))}
        (self._run.folder / f"rank{trainer.global_rank}.json").write_text(json.dumps(found))

    def _note(self, message: Any, category: Any, file: str, line: int, *others: Any) -> None:
        if "synchronizing CUDA operation" in str(message):
            self._places[f"{'/'.join(Path(file).parts[-2:])}:{line}"] += 1


def train(run: Run) -> None:
    """Trains as one rank of a run."""
    L.seed_everything(1, verbose=False)
    if run.variant not in ("padded", "loop"):
        _train_by_lightning(run)
        return
    rank = int(os.environ["LOCAL_RANK"])
    if run.devices == 1:
        for name in ("LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK"):
            os.environ.pop(name, None)  # one process by itself, or accelerate makes a group of one
    else:
        os.environ["RANK"] = str(rank)
    (_train_padded if run.variant == "padded" else _train_in_a_loop)(run, StepClock(run, rank), rank)


def _train_padded(run: Run, clock: StepClock, rank: int) -> None:
    train_padded(
        config_of(run.model),
        step_dataset(run.work),
        rank=rank,
        ranks=run.devices,
        samples=run.padded_samples,
        device=_device(run, rank),
        recompute=run.recompute,
        num_workers=run.work.num_workers,
        max_steps=run.warmup + run.steps,
        folder=run.folder,
        step_ended=clock.step_ended,
    )


def _train_in_a_loop(run: Run, clock: StepClock, rank: int) -> None:
    """The shortest loop that computes the same: no Trainer, no strategy, no log."""
    device, dtype = _device(run, rank), torch.bfloat16 if run.on_gpu else torch.float32
    if run.on_gpu:
        torch.cuda.set_device(device)
    if run.devices > 1:
        dist.init_process_group("nccl" if run.on_gpu else "gloo")
    move = partial(_moved, device=device, dtype=dtype)
    module = packed_model(run.model, run.recompute, run.layers)
    torch.set_default_dtype(dtype)
    with device:
        module.configure_model()
    torch.set_default_dtype(torch.float32)
    module.train()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-5, weight_decay=0.0, fused=run.on_gpu or None)
    loader = StepLoader(
        replace(step_dataset(run.work), shard=RankShard.plain(rank, run.devices)),
        files=(),
        num_workers=run.work.num_workers,
        pin_memory=run.on_gpu,
        prepare_media=module.prepare_media,
    )
    for _, batch in zip(range(run.warmup + run.steps), loader, strict=False):
        optimizer.zero_grad(set_to_none=True)
        targets = sum(len(packed.targets) for packed in batch.microbatches if packed is not None)
        for number, packed in enumerate(batch.microbatches):
            if packed is None:
                continue
            features: Features = {}
            if encoded := [module.encode(move(media)) for _, media in batch.read_by(number)]:
                features = as_features(IMAGE, tuple(map(torch.cat, zip(*encoded, strict=True))))
            loss, _ = module.backbone_step(packed.to(device, non_blocking=True), features, "train")
            (loss / targets).backward()
        if run.devices > 1:
            _average(module, targets)
        optimizer.step()
        clock.step_ended()
    loader.close()
    if run.devices > 1:
        dist.destroy_process_group()


def _average(module: FlowModule, targets: int) -> None:
    """Gradients of the mean over the targets of all ranks, from those of each rank's own mean."""
    of_all = torch.tensor([float(targets)], device=next(module.parameters()).device)
    dist.all_reduce(of_all)
    share = targets / of_all
    sums = []
    for weight in module.parameters():
        weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad.mul_(share)
        sums.append(dist.all_reduce(weight.grad, async_op=True))
    for each in sums:
        each.wait()


def _moved(media: Any, device: torch.device, dtype: torch.dtype) -> Any:
    there = media.to(device, non_blocking=True)
    return there.with_patches(there.patches.to(dtype))


def _train_by_lightning(run: Run) -> None:
    strategies: dict[str, Any] = {
        "auto": lambda: "auto" if run.devices == 1 else "ddp_find_unused_parameters_true",
        "colocated": lambda: FlowTrainStrategy(placement="colocated"),
        "separate": lambda: FlowTrainStrategy(
            encoder_ranks=1 if run.ranks == 2 else None, placement="separate", ranks_per_device=run.ranks // run.devices
        ),
    }
    strategies["waits"] = strategies["colocated"]
    trainer = L.Trainer(
        accelerator="cuda" if run.on_gpu else "cpu",
        devices=run.devices,
        strategy=strategies[run.variant](),
        precision="bf16-true" if run.on_gpu else "32-true",
        max_steps=run.warmup + run.steps,
        use_distributed_sampler=False,
        callbacks=[_CountedWaits(run) if run.variant == "waits" else _Clocked(run)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=run.folder,
    )
    trainer.fit(packed_model(run.model, run.recompute, run.layers), run.work.data())


def describe(run: Run) -> None:
    """Writes ``rank0.json``: what the measured steps hold, and what device this is.

    A process of its own does, since counting starts threads and looking at a device opens it, and neither survives a
    fork.
    """
    steps = step_dataset(run.work)
    measured = [steps.plan(0, step) for step in range(run.warmup, run.warmup + run.steps)]
    flops = FlopUtilization(
        count_flops(packed_model(run.model, recompute=False), load_probes(run.work.data())),
        {BACKBONE: (0,), ENCODER: (0,)},
        peak=1.0,
    )
    for plan in measured:
        flops.update(plan, 1.0)
    name = torch.cuda.get_device_name() if run.on_gpu else "CPU"
    known = maker_device(name)
    source = steps.samples.source
    found = {
        "steps": len(steps),
        "tokens": sum(int(plan.sizes.tokens.sum()) for plan in measured),
        "flops": float(flops.compute()["all"]) * len(measured),
        "longest": int(source.sizes(np.arange(len(source))).tokens.max()),
        "device": name,
        "devices": torch.cuda.device_count(),
        "peak": None if known is None else known.peak_for(2),
        "cuda": torch.version.cuda if run.on_gpu else None,
        "attention": _attention(),
    }
    (run.folder / "rank0.json").write_text(json.dumps(found))


def _attention() -> str:
    with suppress(PackageNotFoundError):
        return f"flash-attn {version('flash-attn')}"
    return "PyTorch's own kernel"


def step_dataset(work: Work) -> StepDataset:
    """The steps of one rank by itself."""
    data = work.data()
    data.setup("fit")
    return data.train_dataloader().steps


def _device(run: Run, rank: int) -> torch.device:
    return torch.device("cuda", rank) if run.on_gpu else torch.device("cpu")
