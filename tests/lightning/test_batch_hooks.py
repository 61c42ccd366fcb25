"""What changes a batch, or features, when its step begins: no encoder rank encodes such a batch before its step."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch

from flowtrain_lightning import FlowDataModule
from flowtrain_lightning.compute.bound_to_step import bound_to_step
from flowtrain_lightning.data import KeepFeatures, PackedMedia, StepBatch
from tests.lightning.run_context import Recorder, RunContext, numbers
from tests.tiny import TinyVLM

pytestmark = pytest.mark.timeout(600)


def brightened(batch: StepBatch) -> StepBatch:
    """The batch with other pixels, as kornia and its like make them on the device."""
    media = {
        role: tuple(each and each.with_patches(3 * each.patches + 1) for each in of) for role, of in batch.media.items()
    }
    batch.media = media
    return batch


class Brightening(TinyVLM):
    """Changes pixels in a hook of the module."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return brightened(batch)


class BrighteningData(FlowDataModule):
    """Changes pixels in a hook of the data module."""

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        return brightened(super().transfer_batch_to_device(batch, device, dataloader_idx))


class Annealing(TinyVLM):
    """Features grow from step to step."""

    def encode(self, media: PackedMedia) -> tuple[torch.Tensor, ...]:
        return tuple(level * self.strength() for level in super().encode(media))

    def strength(self) -> int:
        return 1 + self.global_step


class AnnealingToo(Annealing):
    """Reads the number of the step in a method that it inherits."""

    def encode(self, media: PackedMedia) -> tuple[torch.Tensor, ...]:
        return super().encode(media)


class AnnealingByProperty(TinyVLM):
    """Reads the number of the step in a property."""

    @property
    def strength(self) -> int:
        return 1 + self.global_step

    def encode(self, media: PackedMedia) -> tuple[torch.Tensor, ...]:
        return tuple(level * self.strength for level in super().encode(media))


class AnnealingInHook(TinyVLM):
    """Reads what a hook sets in every step."""

    strength = 1

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.strength = 1 + batch_idx

    def encode(self, media: PackedMedia) -> tuple[torch.Tensor, ...]:
        return tuple(level * self.strength for level in super().encode(media))


class StrengthOfEpochs(AnnealingInHook):
    """Reads what a hook sets in every epoch."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.last_batch = batch_idx

    def on_train_epoch_start(self) -> None:
        self.strength = 1 + self.current_epoch


class Strengthening(L.Callback):
    """Sets what a module reads in `encode`."""

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *_: Any) -> None:
        pl_module.strength = 1 + trainer.global_step


KINDS: dict[str, tuple[type[TinyVLM], type[FlowDataModule]]] = {
    "hook of the module": (Brightening, FlowDataModule),
    "hook of the data": (TinyVLM, BrighteningData),
    "number of the step": (Annealing, FlowDataModule),
    "hook that sets": (AnnealingInHook, FlowDataModule),
}


def change_batches(context: RunContext) -> None:
    for name, (kind, of_data) in KINDS.items():
        for frozen in (True, False):
            L.seed_everything(7, verbose=False)
            recorder, module = Recorder(), kind(freeze_encoder=frozen)
            trainer = context.trainer(max_epochs=1, callbacks=[recorder], enable_checkpointing=False)
            trainer.fit(module, context.data(kind=of_data))
            losses = [event[2] for event in recorder.events if event[0] == "train"]
            context.notes[f"{name} {frozen}"] = [losses, numbers(trainer.callback_metrics)]


class InPlace(TinyVLM):
    """Writes into the patches that it is given."""

    def encode(self, media: PackedMedia) -> tuple[torch.Tensor, ...]:
        media.patches.mul_(3.0).add_(1.0)
        return super().encode(media)


def write_into_patches(context: RunContext) -> None:
    recorder = Recorder()
    strategy = context.strategy() if context.layout == "auto" else context.strategy(encoder_activations=0)
    settings = {"precision": "32-true", "max_epochs": 1, "limit_val_batches": 0, "enable_checkpointing": False}
    context.trainer(strategy=strategy, callbacks=[recorder], **settings).fit(InPlace(), context.data())
    context.notes["losses"] = [event[2] for event in recorder.events if event[0] == "train"]


LAYOUTS_OF_RUNS = {change_batches: ("auto", "1+1"), write_into_patches: ("auto", "1+1")}


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("name", KINDS)
def test_features_are_those_of_the_batch_as_it_is_in_its_step(layout_runs, name, frozen):
    losses, metrics = layout_runs.notes(change_batches, "auto")[0][f"{name} {frozen}"]
    for rank in layout_runs.notes(change_batches, "1+1"):
        assert rank[f"{name} {frozen}"][0] == pytest.approx(losses, rel=1e-9)
        assert rank[f"{name} {frozen}"][1] == pytest.approx(metrics, rel=1e-6)


def test_patches_in_which_encode_writes_are_found_as_they_were_when_it_runs_again(layout_runs):
    (plain,) = layout_runs.notes(write_into_patches, "auto")
    for rank in layout_runs.notes(write_into_patches, "1+1"):
        assert rank["losses"] == pytest.approx(plain["losses"], rel=1e-5)


@pytest.mark.parametrize(
    ("module", "others", "said"),
    [
        (TinyVLM(), (), None),
        (TinyVLM(), (FlowDataModule(token_budget=1), [Strengthening()]), None),
        (StrengthOfEpochs(), (), None),
        (StrengthOfEpochs(), (None, [Strengthening()]), "Strengthening.on_train_batch_end sets `strength`"),
        (AnnealingInHook(), (), "on_train_batch_start sets `strength`, which AnnealingInHook.encode reads"),
        (AnnealingByProperty(), (), "AnnealingByProperty.encode reads `global_step`"),
        (Brightening(), (), "Brightening overrides `on_after_batch_transfer`"),
        (TinyVLM(), (BrighteningData(token_budget=1),), "BrighteningData overrides `transfer_batch_to_device`"),
        (Annealing(), (), "Annealing.encode reads `global_step`"),
        (AnnealingToo(), (), "AnnealingToo.encode reads `global_step`"),
    ],
)
def test_it_is_said_what_binds_features_to_their_step(module, others, said):
    found = bound_to_step(module, *others)
    assert found is None if said is None else said in found


def test_features_that_are_bound_to_their_step_are_not_kept(data_folder, tmp_path, caplog):
    context = RunContext("one", tmp_path, data_folder)
    trainer = context.trainer(max_steps=1, limit_val_batches=0, enable_checkpointing=False)
    with caplog.at_level("INFO", logger="lightning.pytorch"):
        trainer.fit(Annealing(freeze_encoder=True), context.data(keep_features=KeepFeatures(tmp_path / "kept")))
    assert "are not kept: Annealing.encode reads `global_step`" in caplog.text
