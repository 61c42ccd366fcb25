"""What the processes of these tests train: one module with several optimizers, a short run that can be resumed."""

from __future__ import annotations

import os
import random
import signal
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import nn

from flowtrain_lightning import FlowCheckpointIO, FlowTrainStrategy, RoleLayout
from flowtrain_lightning.allocator import Allocation, Layout
from flowtrain_lightning.data import PackingConfig
from flowtrain_lightning.packing import CostModel
from tests.checkpoint.saving import MOMENTS, leave_room_for
from tests.exactness.modules import FourDivided
from tests.tiny import TinyVLM, tiny_data, write_records

STEPS_OF_AN_EPOCH = 5
STEPS = 8
SAVED_AT = 3  # in mid-epoch, and mid-way between the validations after steps 2 and 4

CASES: dict[str, dict[str, Any]] = {
    "adamw": {},
    "dropout": {"dropout": 0.3},
    "frozen": {"freeze_encoder": True, "optimizer": "sgd"},
    "sgd": {"optimizer": "sgd"},
    "adagrad": {"optimizer": "adagrad"},
    "four blocks": {"dropout": 0.3},
    "four blocks, no dropout": {},
}
"""Arguments of the module."""

SEARCHED = Allocation(
    "colocated",
    {"encoder": Layout(data=2), "backbone": Layout(data=2)},
    {"encoder": (0, 1), "backbone": (0, 1)},
    order="searched",
)

LIMITED = replace(SEARCHED, activation_bytes=400_000.0, offload={"encoder": "activations"})
"""Some batches of a step are kept, some computed again or moved."""

STAGED: dict[str, tuple[int, dict[str, Any]]] = {
    "stages": (2, {}),
    "stages of shards": (4, {"shard": "fsdp"}),
    "stages of replicas": (8, {"shard": "fsdp", "replicas": 2}),
    "stages, tensor": (4, {"tensor": 2}),
    "stages, context": (4, {"context": 2}),
    "stages, virtual": (2, {"virtual": 2}),
    "stages, zb-h1": (2, {"schedule": "zb-h1"}),
    "stages, zb-v": (2, {"schedule": "zb-v"}),
}
"""Ranks of two stages of the backbone, and how they are laid out, of a module of four blocks; and an encoder rank."""

LAYOUTS: dict[str, tuple[int, dict[str, Any] | None]] = {
    "1+1": (2, {"encoder_ranks": 1}),
    "1+2": (3, {"encoder_ranks": 1}),
    "1+2 sharded": (3, {"encoder_ranks": 1, "roles": {"backbone": RoleLayout(shard="fsdp")}}),
    "2+1": (3, {"encoder_ranks": 2}),
    "mixed 1+2": (3, {"placement": "mixed", "encoder_ranks": 1}),
    "colocated": (2, {"placement": "colocated"}),
    "searched order": (2, {"allocation": SEARCHED}),
    "searched order, limited": (2, {"allocation": LIMITED}),
    "alone": (1, {"placement": "colocated"}),
    "auto": (1, None),
    "ddp": (2, None),
    **{
        name: (1 + ranks, {"encoder_ranks": 1, "roles": {"backbone": RoleLayout(pipeline=2, **more)}})
        for name, (ranks, more) in STAGED.items()
    },
}
"""Number of processes, and arguments of the strategy (None: plain Lightning)."""


class TrainedVLM(TinyVLM):
    """TinyVLM with other optimizers.

    Args:
        optimizer: ``"adamw"`` and ``"adagrad"`` have a group per half, so that one is empty on each rank; the groups
            of ``"sgd"`` hold parameters of both halves in turn, one group with momentum and one without.
        settings: as in TinyVLM.
    """

    def __init__(self, optimizer: str = "adamw", **settings: Any) -> None:
        super().__init__(**settings)
        self.save_hyperparameters()

    def configure_optimizers(self) -> Any:
        if self.hparams["optimizer"] == "adamw":
            return super().configure_optimizers()
        if self.hparams["optimizer"] == "adagrad":
            halves: list[nn.Module] = [self.encoder, self.backbone]
            rates = zip(halves, (1e-2, 2e-2), strict=True)
            optimizer: Any = torch.optim.Adagrad([{"params": list(h.parameters()), "lr": lr} for h, lr in rates])
        else:
            backbone, encoder = list(self.backbone.parameters()), list(self.encoder.parameters())
            mixed = [p for pair in zip(backbone, encoder, strict=False) for p in pair]
            rest = [p for p in self.parameters() if all(p is not other for other in mixed)]
            groups = [{"params": mixed[::3], "momentum": 0.9}, {"params": [*mixed[1::3], *mixed[2::3], *rest]}]
            optimizer = torch.optim.SGD(groups, lr=0.1)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), "interval": "step"},
        }


class DividedVLM(TrainedVLM, FourDivided):
    """The same with a backbone of four blocks, which ranks can divide."""


def make_module(case: str) -> TrainedVLM:
    return (DividedVLM if case.startswith("four blocks") else TrainedVLM)(**CASES[case])


class Recorder(L.Callback):
    """Notes what a run computed and what user code would have drawn, and saves after some steps.

    Args:
        folder: where ``stepN.ckpt`` is saved.
        saves: after which steps.
    """

    def __init__(self, folder: Path, saves: tuple[int, ...] = ()) -> None:
        self.folder = folder
        self.saves = saves
        self.ahead = 0
        self.steps: dict[int, Any] = {}
        self.validations: dict[int, float] = {}

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        self.drawn = (torch.rand(2).tolist(), random.random(), float(np.random.rand()))

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
        loss = float(trainer.callback_metrics["train_loss"])
        self.steps[trainer.global_step] = {"loss": loss, "rates": rates, "drawn": self.drawn}
        if trainer.global_step in self.saves:
            trainer.save_checkpoint(self.folder / f"step{trainer.global_step}.ckpt")
            if isinstance(trainer.strategy, FlowTrainStrategy):
                spans = [span for span in trainer.strategy.runner.timeline.spans if span.stage == "train"]
                self.ahead = max(span.step for span in spans) + 1 - trainer.global_step

    def on_validation_end(self, trainer: L.Trainer, *_: Any) -> None:
        if not trainer.sanity_checking:
            self.validations[trainer.global_step] = float(trainer.callback_metrics["val_loss"])

    def save(self, trainer: L.Trainer) -> None:
        """Writes ``rankN.pt``: what this rank saw and ended with."""
        (optimizer,) = trainer.optimizers
        seen = {
            "steps": self.steps,
            "validations": self.validations,
            "ahead": self.ahead,
            "weights": trainer.strategy.lightning_module_state_dict(),
            "optimizer": trainer.strategy.optimizer_state(optimizer),
            "scheduler": trainer.lr_scheduler_configs[0].scheduler.state_dict(),
            "epoch": trainer.current_epoch,
        }
        torch.save(seen, self.folder / f"rank{trainer.global_rank}.pt")


def write_data(folder: Path) -> None:
    """Records for ``STEPS_OF_AN_EPOCH`` steps, and some to validate."""
    write_records(folder, 4 * STEPS_OF_AN_EPOCH)
    write_records(folder, 6, "val.jsonl", seed=1)


def make_data(folder: str, *, much_to_encode: bool = False, **settings: Any) -> Any:
    packing = PackingConfig(media_costs={"encoder": CostModel(4.0, 0.0, 0.0)}) if much_to_encode else PackingConfig()
    return tiny_data(Path(folder), global_batch_size=4, packing=packing, **settings)


def make_trainer(layout: str, callbacks: list[L.Callback], **settings: Any) -> L.Trainer:
    """A quiet Trainer; plain Lightning gets the plugin that reads directories."""
    L.seed_everything(7)
    processes, arguments = LAYOUTS[layout]
    plain = arguments is None
    return L.Trainer(
        accelerator="cpu",
        devices=processes,
        strategy=layout if plain else FlowTrainStrategy(**arguments or {}, hang_timeout=60),
        plugins=[FlowCheckpointIO()] if plain else None,
        callbacks=callbacks,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_steps": STEPS, "val_check_interval": 2, "enable_checkpointing": False, **settings},
    )


# ---- what the processes do ------------------------------------------------------------------------------------------


def train(
    folder: Path, data: str, case: str, layout: str, resume: str | None = None, saves: tuple[int, ...] = ()
) -> None:
    """Trains a case to its end; saves on the way, and twice when all is over."""
    recorder = Recorder(folder, saves)
    trainer = make_trainer(layout, [recorder], default_root_dir=folder)
    # On mixed ranks as much as makes all of them encode; where activations are limited, no more than has room.
    settings = {"encoder_budget": 256} if layout.endswith("limited") else {}
    data_module = make_data(data, much_to_encode=layout.startswith("mixed"), **settings)
    trainer.fit(make_module(case), data_module, ckpt_path=resume)
    recorder.save(trainer)
    if saves:
        trainer.save_checkpoint(folder / "ended.ckpt")
        trainer.save_checkpoint(folder / "weights.ckpt", weights_only=True)


def keep_the_best(folder: Path, data: str) -> None:
    """ModelCheckpoint keeps the best and a link to the last; the same Trainer validates; another one goes on."""

    def trainer(**settings: Any) -> L.Trainer:
        keeper = ModelCheckpoint(folder / "kept", "{step}", "val_loss", save_top_k=1, save_last="link")
        callbacks = [Recorder(folder), keeper]
        return make_trainer("1+1", callbacks, default_root_dir=folder, enable_checkpointing=True, **settings)

    fitted, model = trainer(), TrainedVLM()
    fitted.fit(model, make_data(data))
    seen: dict[str, Any] = {"score": float(fitted.checkpoint_callback.best_model_score)}
    seen["kept"] = sorted(path.name for path in (folder / "kept").iterdir())
    seen["link"] = os.readlink(folder / "kept/last.ckpt")
    for chosen in ("best", "last", str(folder / "kept/last.ckpt")):
        (result,) = fitted.validate(model, make_data(data), ckpt_path=chosen, verbose=False)
        seen[Path(chosen).name if "/" in chosen else chosen] = result["val_loss"]
    seen["drawn"] = []
    for chosen in (None, "last"):
        fitted.validate(model, make_data(data), ckpt_path=chosen, verbose=False)
        seen["drawn"].append(torch.rand(2).tolist())
    following = trainer(max_steps=10)
    following.fit(TrainedVLM(), make_data(data), ckpt_path="last")
    seen["went on to"] = following.global_step
    torch.save(seen, folder / f"rank{fitted.global_rank}.pt")


def resume_another_module(folder: Path, data: str, checkpoint: str) -> None:
    """Writes what is said when the module is not the one that was saved."""
    trainer = make_trainer("alone", [], default_root_dir=folder)
    try:
        trainer.fit(TrainedVLM(levels=2), make_data(data), ckpt_path=checkpoint)
    except RuntimeError as error:
        (folder / "said.txt").write_text(str(error))


class Asker(L.Callback):
    """Asks one rank to end (SIGTERM) in the first step of the validation after a training step."""

    def __init__(self, rank: int, step: int) -> None:
        self.rank = rank
        self.step = step

    def on_validation_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if (trainer.global_rank, trainer.global_step) == (self.rank, self.step) and not trainer.sanity_checking:
            os.kill(os.getpid(), signal.SIGTERM)


def train_until_asked_to_end(folder: Path, data: str, case: str, rank: int, step: int, max_steps: int) -> None:
    """Is asked to end in a validation, and leaves ``preempted.ckpt``."""
    recorder = Recorder(folder)
    trainer = make_trainer("1+1", [recorder, Asker(rank, step)], default_root_dir=folder, max_steps=max_steps)
    with suppress(SIGTERMException):
        trainer.fit(TrainedVLM(**CASES[case]), make_data(data))
        raise AssertionError("fit ended as if nothing had been asked")
    recorder.save(trainer)


class Killer(L.Callback):
    """Kills one rank in the save after the third step.

    Args:
        rank: which.
        moment: when, a key of ``MOMENTS``.
    """

    def __init__(self, rank: int, moment: str) -> None:
        self.rank = rank
        self.moment = moment

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == 2 and trainer.global_rank == self.rank:
            MOMENTS[self.moment]()


def train_until_killed(folder: Path, data: str, rank: int, moment: str) -> None:
    """Saves ``last.ckpt`` after every step and is killed in the third time."""
    callbacks = [Killer(rank, moment), _keep_last(folder)]
    trainer = make_trainer("1+1", callbacks, default_root_dir=folder, enable_checkpointing=True)
    trainer.fit(TrainedVLM(), make_data(data))


class DiskFiller(L.Callback):
    """After the second step there is no more room for what one rank writes."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == 2 and trainer.global_rank == self.rank:
            leave_room_for(16_000)


def train_until_the_disk_is_full(folder: Path, data: str, rank: int) -> None:
    """Saves ``last.ckpt`` after every step, for which there is no room in the third time."""
    callbacks = [DiskFiller(rank), _keep_last(folder)]
    trainer = make_trainer("1+1", callbacks, default_root_dir=folder, enable_checkpointing=True)
    trainer.fit(TrainedVLM(), make_data(data))


def go_on_after_fault(folder: Path, data: str, killed: str) -> None:
    """Trains to the end from what such a run left."""
    recorder = Recorder(folder)
    callbacks = [recorder, _keep_last(Path(killed))]
    trainer = make_trainer("1+1", callbacks, default_root_dir=folder, enable_checkpointing=True)
    trainer.fit(TrainedVLM(), make_data(data), ckpt_path="last")
    recorder.save(trainer)


def _keep_last(folder: Path) -> ModelCheckpoint:
    return ModelCheckpoint(folder / "kept", every_n_train_steps=1, save_top_k=0, save_last=True)
