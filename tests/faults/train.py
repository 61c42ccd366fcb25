"""A small fit in which one rank breaks, as the environment says. A script that the tests start."""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from PIL import Image

import flowtrain_lightning as flow
from tests.checked import leave_out_packing_check
from tests.exactness.mixture import Mixture
from tests.exactness.modules import Divided
from tests.faults.fault import Fault
from tests.hosts import enter
from tests.tiny import TinyVLM, tiny_data

STEPS, SAMPLES = 6, 4
HOST_OF = (0, 0, 1)
"""Where each rank runs in a job on two hosts."""


class RankFault:
    """What this rank is given: folder, settings and fault of the job."""

    def __init__(self) -> None:
        self.folder = Path(os.environ["FOLDER"])
        self.settings: dict[str, Any] = json.loads(os.environ["SETTINGS"])
        first_start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        self.fault = Fault(**self.settings["fault"]) if self.settings["fault"] and first_start else None
        self.rank = int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", 0)))

    def note(self, name: str, text: object) -> None:
        """Write a file that the tests read."""
        with (self.folder / f"rank{self.rank}.{name}").open("a") as file:
            file.write(f"{text}\n")

    def pass_by(self, place: str, step: int = 0) -> None:
        """The fault happens here, if it is due."""
        if self.fault is not None and self.fault.is_due(self.rank, place, step):
            self.fault.happen(self.folder)

    def augment(self) -> Callable[[Image.Image, Any], Image.Image] | None:
        """What changes images while they are loaded, where the fault is to happen there; none elsewhere."""
        if self.fault is None or self.fault.place != "load":
            return None
        images = itertools.count()

        def change(image: Image.Image, _: Any) -> Image.Image:
            self.pass_by("load", next(images) // SAMPLES)
            return image

        return change

    def begin_counting(self) -> None:
        """From now on functions are counted until the fault happens, if it is one that may happen anywhere."""
        fault = self.fault
        if fault is None or not fault.is_due(self.rank, "anywhere", 0):
            return
        left = fault.calls

        def count(*_: Any) -> None:
            nonlocal left
            left -= 1
            if not left:
                fault.happen(self.folder)

        sys.setprofile(count)

    def waits(self, step: int) -> bool:
        """Whether this rank shall wait for the others in this step until its fault comes."""
        return self.fault is not None and self.fault.is_due(self.rank, "wait", step)

    def is_waited_for(self, step: int) -> bool:
        """Whether another rank shall wait for this one in this step."""
        fault = self.fault
        return fault is not None and (fault.place, fault.step) == ("wait", step) and fault.rank != self.rank


class Breaking(TinyVLM):
    """A tiny module with places at which it may break or be slow."""

    rank_fault: RankFault
    is_warm = False

    def configure_encoder(self) -> None:
        self.rank_fault.pass_by("build")
        super().configure_encoder()

    def configure_backbone(self) -> None:
        self.rank_fault.pass_by("build")
        super().configure_backbone()

    def encode(self, media: Any) -> Any:
        self.compute()
        return super().encode(media)

    def loss(self, outputs: Any, batch: Any) -> Any:
        self.compute()
        return super().loss(outputs, batch)

    def compute(self) -> None:
        """What either half passes by in a step."""
        step, training = self.trainer.global_step, self.trainer.training
        self.rank_fault.pass_by("train" if training else "validation", step)
        if training and self.rank_fault.is_waited_for(step):
            time.sleep(1.0)
        elif not self.is_warm:
            self.is_warm = True
            time.sleep(self.rank_fault.settings["first_step"])


class Model(Breaking, Divided):
    """Every layout can divide it, but for experts, which it has not."""


class ModelWithExperts(Breaking, Mixture):
    """Has experts in both halves."""


class Places(L.Callback):
    """The places outside of the module."""

    def __init__(self, rank_fault: RankFault) -> None:
        self.rank_fault = rank_fault

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        self.rank_fault.note("steps", trainer.global_step)
        if trainer.global_step == 1:  # in the first step a hang would count after the longer limit of the start
            self.rank_fault.begin_counting()
        if self.rank_fault.waits(trainer.global_step):
            threading.Timer(0.5, self.rank_fault.pass_by, ("wait", trainer.global_step)).start()

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.rank_fault.pass_by("between", trainer.global_step)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        if self.rank_fault.fault is not None and self.rank_fault.fault.kind == "raise twice":
            raise RuntimeError("another fault of the test") from exception

    def on_save_checkpoint(self, trainer: L.Trainer, *_: Any) -> None:
        step, fsync = trainer.global_step, os.fsync

        def flush(file: int) -> None:
            self.rank_fault.pass_by("save", step)
            fsync(file)

        os.fsync = flush


def main() -> None:
    """Six steps; a checkpoint and a validation after every second one."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have started the tests deaf to Ctrl-C
    leave_out_packing_check(pytest.MonkeyPatch())  # it calls the module, too, before the step that a fault is due in
    rank_fault = RankFault()
    rank_fault.note("pid", os.getpid())
    rank_fault.pass_by("start")
    Breaking.rank_fault = rank_fault
    settings, folder = rank_fault.settings, rank_fault.folder
    hosts = settings["hosts"]
    if hosts is not None:
        enter(HOST_OF[rank_fault.rank], hosts)
    roles = {role: flow.RoleLayout(**wanted) for role, wanted in settings["strategy"].pop("roles", {}).items()}
    trainer = L.Trainer(
        accelerator="cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", settings["ranks"])) if hosts is None else 1,
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", 1)) if hosts is None else settings["ranks"],
        strategy=flow.FlowTrainStrategy(**settings["strategy"], roles=roles),
        default_root_dir=folder,
        max_steps=STEPS,
        val_check_interval=2,
        limit_val_batches=1,
        num_sanity_val_steps=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Places(rank_fault), ModelCheckpoint(folder / "checkpoints", every_n_train_steps=2, save_last=True)],
    )
    loading = {"num_workers": settings["workers"], "augment": rank_fault.augment()}
    data = tiny_data(folder / "data", global_batch_size=SAMPLES, **loading)
    module = ModelWithExperts() if any(wanted.expert > 1 for wanted in roles.values()) else Model()
    trainer.fit(module, data, ckpt_path=settings["ckpt_path"])
    rank_fault.note("finished", trainer.global_step)
    if rank_fault.rank == 0:
        time.sleep(settings["afterwards"])


if __name__ == "__main__":
    main()
