"""The runs of `layouts.py`: one module, each layout of its backbone, by flowtrain and by Lightning's own strategies."""

from __future__ import annotations

import ctypes
import json
import resource
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.modules import IMAGES, Work
from flowtrain_lightning import FlowTrainStrategy, PackedBatch, PackedMedia, RoleLayout
from flowtrain_lightning.data import StepBatch
from flowtrain_lightning.parallel.blocks import repeated_blocks
from recipes.quickstart.module import QuickstartVLM

Side = Literal["flowtrain", "lightning"]

BACKBONES = {
    "400 MB": {"backbone_width": 1024, "backbone_depth": 8, "backbone_heads": 16},
    "tiny": {"backbone_width": 64, "backbone_depth": 2, "backbone_heads": 4},
    "empty": {"backbone_width": 32, "backbone_depth": 1, "backbone_heads": 4},
}
"""Sizes of the half that is laid out; the encoder is as small as it can be."""

_ENCODER = {"encoder_width": 32, "encoder_depth": 1, "patch_dim": IMAGES.patch_dim, "merge_size": IMAGES.merge_size}
_MMAP_THRESHOLD = -3  # of mallopt(3)
_PAGE = 4096


@dataclass(frozen=True)
class ComparedLayout:
    """One line of the table: a layout of the backbone, and how a user of Lightning alone gets it.

    Attributes:
        layout: what flowtrain is told.
        sharers: ranks that hold the weights once between them.
        strategy: Lightning's own.
        parallelize: puts the layout onto the peer's module, given the number of ranks; None where the strategy does.
    """

    layout: RoleLayout
    sharers: int
    strategy: Callable[[], Any]
    parallelize: Callable[[nn.Module, int], None] | None = None


def _shard(module: nn.Module, mesh: DeviceMesh) -> None:
    """As PyTorch's and Lightning's documentation do it: every block, then all that is left."""
    for block in repeated_blocks(module):
        fully_shard(block, mesh=mesh)
    fully_shard(module, mesh=mesh)


def _fsdp(module: nn.Module, ranks: int) -> None:
    _shard(module, init_device_mesh("cpu", (ranks,)))


def _hsdp(module: nn.Module, ranks: int) -> None:
    _shard(module, init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replica", "shard")))


def _model_parallel() -> ModelParallelStrategy:
    return ModelParallelStrategy(tensor_parallel_size=1, data_parallel_size=RANKS)


RANKS = 4

LAYOUTS = {
    "replicate": ComparedLayout(RoleLayout(), 1, DDPStrategy),
    "FSDP2": ComparedLayout(RoleLayout(shard="fsdp"), RANKS, _model_parallel, _fsdp),
    "HSDP 2 x 2": ComparedLayout(RoleLayout(shard="fsdp", replicas=2), RANKS // 2, _model_parallel, _hsdp),
}
"""Name -> a layout of the backbone over all ranks."""


@dataclass(frozen=True)
class LayoutJob:
    """What one run does.

    Attributes:
        side: whose strategy.
        layout: one of ``LAYOUTS``.
        backbone: one of ``BACKBONES``.
        work: the data.
        folder: where the ranks write what they measured.
        warmup: steps before the measurement.
        steps: steps that are measured.
        exact_memory: give memory back to the system as soon as it is free, so that the peak is of what is in use; that
            takes time.
    """

    side: Side
    layout: str
    backbone: str
    work: Work
    folder: Path
    warmup: int
    steps: int
    exact_memory: bool = False


class Usage(L.Callback):
    """Writes ``rank<r>.json``: CPU seconds of the whole process, its peak of memory, and what the steps held.

    Args:
        folder: where to write.
        warmup: steps that are not counted; at least 1.
    """

    def __init__(self, folder: Path, warmup: int) -> None:
        self._folder = folder
        self._warmup = warmup
        self._done = 0
        self._samples = 0
        self._cpu = 0.0

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: StepBatch, batch_idx: int
    ) -> None:
        """Begins to count after the warm-up."""
        self._done += 1
        if self._done == self._warmup:
            self._cpu = _cpu_seconds()
            Path("/proc/self/clear_refs").write_text("5")  # the peak is forgotten
        elif self._done > self._warmup:
            self._samples += sum(len(each.samples) for each in batch.microbatches if each is not None)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Writes the file."""
        told = {"cpu_seconds": _cpu_seconds() - self._cpu, "samples": self._samples, "peak_bytes": _peak_bytes()}
        (self._folder / f"rank{trainer.global_rank}.json").write_text(json.dumps(told))


class PlainVLM(L.LightningModule):
    """What a user of Lightning alone writes: the same layers on the same batches, in a layout of its own.

    Args:
        sizes: arguments of `QuickstartVLM`.
        parallelize: puts the layout onto the module; None where the strategy does.
        ranks: of the run.
    """

    def __init__(self, sizes: dict[str, int], parallelize: Callable[[nn.Module, int], None] | None, ranks: int) -> None:
        super().__init__()
        self._sizes, self._parallelize, self._ranks = sizes, parallelize, ranks

    def configure_model(self) -> None:
        """Builds the layers and lays them out."""
        self.whole = WholeForward(QuickstartVLM(**self._sizes))  # type: ignore[arg-type]
        if self._parallelize is not None:
            self._parallelize(self.whole, self._ranks)

    def training_step(self, batch: StepBatch, batch_idx: int) -> Tensor:
        """The mean loss over this rank's target tokens."""
        ((packed,), (media,)) = batch.microbatches, batch.media["encoder"]
        loss: Tensor = self.whole(packed, media)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """As in flowtrain's run."""
        return optimizer_of(self.parameters())


class WholeForward(nn.Module):
    """Both halves as one forward, since FSDP2 gathers weights in a module's own."""

    def __init__(self, vlm: QuickstartVLM) -> None:
        super().__init__()
        vlm.configure_encoder()
        vlm.configure_backbone()
        self.encoder, self.backbone = vlm.encoder, vlm.backbone
        self._methods = (vlm.encode, vlm.merge, vlm.loss)

    def forward(self, packed: PackedBatch, media: PackedMedia | None) -> Tensor:
        """The mean loss."""
        encode, merge, loss = self._methods
        features: dict[str, Tensor | tuple[Tensor, ...]] = {} if media is None else {media.modality: encode(media)}
        total, tokens = loss(self.backbone(**merge(packed, features)), packed)
        return total / max(tokens, 1)


class LaidOutVLM(QuickstartVLM):
    """The quickstart's module with the peer's optimizer."""

    def configure_optimizers(self) -> Any:
        """AdamW without a schedule."""
        return optimizer_of(self.parameters())


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    """AdamW, whose two states are as large as the weights."""
    return torch.optim.AdamW(parameters, lr=1e-5)


def train(job: LayoutJob) -> None:
    """Train, as one of the ranks."""
    if job.exact_memory:
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 16 * _PAGE)
    compared, sizes = LAYOUTS[job.layout], {**_ENCODER, **BACKBONES[job.backbone]}
    ours = job.side == "flowtrain"
    strategy = FlowTrainStrategy(placement="colocated", roles={"backbone": compared.layout})
    module: L.LightningModule = PlainVLM(sizes, compared.parallelize, RANKS)
    if ours:
        module = LaidOutVLM(**sizes)  # type: ignore[arg-type]
    L.seed_everything(1, verbose=False)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy=strategy if ours else compared.strategy(),
        max_steps=job.warmup + job.steps,
        use_distributed_sampler=False,
        callbacks=[Usage(job.folder, job.warmup)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=job.folder,
    )
    trainer.fit(module, job.work.data())


def layer_bytes(backbone: str) -> tuple[int, int]:
    """Bytes of the weights of a backbone of ``BACKBONES``: of all, and of what is gathered at the same time."""
    with torch.device("meta"):
        vlm = QuickstartVLM(**_ENCODER, **BACKBONES[backbone])  # type: ignore[arg-type]
        vlm.configure_backbone()
    whole = sum(weight.nbytes for weight in vlm.backbone.parameters())
    blocks = [sum(weight.nbytes for weight in block.parameters()) for block in repeated_blocks(vlm.backbone)]
    return whole, whole - sum(blocks) + max(blocks)


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _peak_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
