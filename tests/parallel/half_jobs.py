"""What ranks do in the tests of halves: weigh what they hold of a module, and train modules that are refused."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from flowtrain_lightning.data import PackedMedia
from flowtrain_lightning.parallel.ranks.connecting import disconnect_groups
from tests.exactness.data import steps_data
from tests.exactness.layouts import trainer_for
from tests.forks import write_down
from tests.processes import memory_of_process
from tests.tiny import TinyVLM, tiny_data


class Misplaced(TinyVLM):
    """Its backbone is not where `halves` says."""

    def configure_backbone(self) -> None:
        super().configure_backbone()
        self.language_model = self.backbone
        del self.backbone


def misplace_a_half(folder: Path, *, data: str) -> None:
    """Is refused."""
    trainer_for("1+1", max_steps=1, default_root_dir=folder).fit(Misplaced(), datamodule=tiny_data(Path(data)))


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
    before = memory_of_process("VmRSS")

    class Measure(L.Callback):
        def on_train_start(self, *args: Any) -> None:
            seen["built"] = memory_of_process("VmHWM") - before

        def on_train_batch_end(self, *args: Any) -> None:
            seen["trained"] = memory_of_process("VmRSS") - before

    module = Heavy()
    module.mark_checked()  # the check's copy, on one rank before the halves are built, would hide what these take
    trainer = trainer_for(layout, max_steps=1, limit_val_batches=0, callbacks=[Measure()], default_root_dir=folder)
    trainer.fit(module, datamodule=steps_data(Path(data)))
    seen["absent"] = sorted({name.split(".")[0] for name, p in module.named_parameters() if p.is_meta})
    write_down(folder, seen)
    disconnect_groups()


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


def part_a_whole_module(folder: Path, *, data: str) -> None:
    """Parts a module that has trained whole; then writes what is absent, and what is said to whoever wants it whole."""

    def fit(layout: str) -> None:
        trainer = trainer_for(layout, max_steps=1, limit_val_batches=0, default_root_dir=folder)
        trainer.fit(module, datamodule=steps_data(Path(data)))

    def absent() -> list[str]:
        return sorted({name.split(".")[0] for name, p in module.named_parameters() if p.is_meta})

    module = TinyVLM()
    told = {}
    fit("colocated 2")
    trainer_for("1+1", default_root_dir=folder).validate(module, datamodule=steps_data(Path(data)))
    seen = {"absent after validation": absent()}
    fit("1+1")
    seen["absent"] = absent()
    for layout in ("colocated 2", "auto"):
        try:
            fit(layout)
        except RuntimeError:
            told[layout] = traceback.format_exc()  # under "auto" Lightning's clean-up fails too
    write_down(folder, {**seen, "told": told})
    disconnect_groups()
