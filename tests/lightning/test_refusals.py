"""What flowtrain cannot do is refused before the first step, in a sentence that says what to do instead."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch import callbacks
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger, WandbLogger
from lightning.pytorch.plugins import AsyncCheckpointIO, HalfPrecision, MixedPrecision, TorchCheckpointIO
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.tuner import Tuner
from torch import optim
from torch.utils.data import DataLoader

import flowtrain_lightning as flow
from tests.tiny import TinyVLM

SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "accumulate_grad_batches": ({"accumulate_grad_batches": 2}, r"accumulate_grad_batches=2.*global_batch_size"),
    "num_nodes": ({"num_nodes": 2}, r"num_nodes=2.* no MASTER_ADDR and no MASTER_PORT and no NODE_RANK.*by torchrun"),
    "sync_batchnorm": ({"sync_batchnorm": True}, r"sync_batchnorm=True.*LayerNorm"),
    "val_check_interval": ({"val_check_interval": "00:00:10:00"}, r"val_check_interval.*number of steps"),
    "precision 16-true": ({"precision": "16-true"}, r"precision='16-true'.*'bf16-mixed'"),
    "precision 16-mixed": (
        {"precision": None, "plugins": [MixedPrecision("16-mixed", "cpu")]},
        r"precision='16-mixed'.*'bf16-mixed'",
    ),
    "a precision plugin": (
        {"precision": None, "plugins": [type("Own", (HalfPrecision,), {})("bf16-true")]},
        r"precision='bf16-true'.*bf16-mixed",
    ),
    "model_registry": ({"model_registry": "mine"}, r"model_registry.*flowtrain export"),
    "a logger that uploads": ({"logger": WandbLogger(log_model=True)}, r"WandbLogger.*log_model=False.*export"),
    "default_root_dir": ({"default_root_dir": "memory://bucket"}, r"default_root_dir 'memory://bucket' is a URL.*copy"),
    "a folder for checkpoints": (
        {"callbacks": [callbacks.ModelCheckpoint("memory://bucket/run")]},
        r"ModelCheckpoint's folder 'memory://bucket/run' is a URL.*Give a plain path",
    ),
    "a logger's folder, where checkpoints go": (
        {"logger": CSVLogger("memory://bucket/logs")},
        r"ModelCheckpoint's folder 'memory://bucket/logs' is a URL.*Give a plain path",
    ),
    "a checkpoint plugin": ({"plugins": [AsyncCheckpointIO()]}, r"AsyncCheckpointIO.*Remove the plugin"),
    "a subclass of Lightning's own checkpoint plugin": (
        {"plugins": [type("Mine", (TorchCheckpointIO,), {})()]},
        r"Mine.*Remove the plugin",
    ),
}


@pytest.mark.parametrize(("settings", "words"), SETTINGS.values(), ids=SETTINGS)
def test_a_setting_is_refused(one_rank, settings, words):
    with pytest.raises(ValueError, match=words):
        one_rank.trainer(max_epochs=1, **settings).fit(TinyVLM(), one_rank.data())


CALLBACKS: dict[str, tuple[Callable[[Path], L.Callback], str]] = {
    "BackboneFinetuning": (lambda _: callbacks.BackboneFinetuning(1), "on_train_epoch_start"),
    "BatchSizeFinder": (lambda _: callbacks.BatchSizeFinder(), "token_budget"),
    "EMAWeightAveraging": (lambda _: callbacks.EMAWeightAveraging(), "callbacks.AverageWeights"),
    "GradientAccumulationScheduler": (
        lambda _: callbacks.GradientAccumulationScheduler({1: 1}),
        "global_batch_size",
    ),
    "LearningRateFinder": (lambda _: callbacks.LearningRateFinder(), "strategy='auto'"),
    "ModelCheckpoint": (lambda _: callbacks.ModelCheckpoint(save_on_exception=True), "every_n_train_steps"),
    "ModelPruning": (lambda _: callbacks.ModelPruning("l1_unstructured"), "Prune an exported checkpoint"),
    "OnExceptionCheckpoint": (lambda folder: callbacks.OnExceptionCheckpoint(folder), "every_n_train_steps"),
    "StochasticWeightAveraging": (lambda _: callbacks.StochasticWeightAveraging(0.1), "callbacks.AverageWeights"),
    "WeightAveraging": (lambda _: callbacks.WeightAveraging(), "callbacks.AverageWeights"),
}


@pytest.mark.parametrize("name", CALLBACKS)
def test_a_callback_is_refused(one_rank, name):
    make, words = CALLBACKS[name]
    trainer = one_rank.trainer(max_epochs=1, callbacks=[make(one_rank.folder)])
    with pytest.raises(ValueError, match=f"{name}.* does not work under flowtrain: .*{words}"):
        trainer.fit(TinyVLM(), one_rank.data())


def test_a_callback_that_the_module_brings_is_refused_as_well(one_rank):
    class Averaging(TinyVLM):
        def configure_callbacks(self) -> list[L.Callback]:
            return [callbacks.WeightAveraging()]

    with pytest.raises(ValueError, match="WeightAveraging"):
        one_rank.trainer(max_epochs=1).fit(Averaging(), one_rank.data())


@pytest.mark.parametrize(
    ("method", "words"),
    [("lr_find", "LearningRateFinder does not work"), ("scale_batch_size", "not supported with distributed")],
)
def test_the_tuner_is_refused(one_rank, method, words):
    trainer = one_rank.trainer(max_epochs=1)
    with pytest.raises(ValueError, match=words):
        getattr(Tuner(trainer), method)(TinyVLM(), datamodule=one_rank.data())


def test_the_advice_to_find_a_learning_rate_under_plain_lightning_holds(one_rank):
    settings = {"logger": False, "enable_progress_bar": False, "default_root_dir": one_rank.folder}
    trainer = L.Trainer(accelerator="cpu", devices=1, strategy="auto", max_epochs=1, **settings)
    found = Tuner(trainer).lr_find(TinyVLM(), datamodule=one_rank.data(), num_training=5)
    assert len(found.results["loss"]) == 5


class Manual(TinyVLM):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Backward(TinyVLM):
    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward()


class ZeroGrad(TinyVLM):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: optim.Optimizer) -> None:
        optimizer.zero_grad(set_to_none=True)


class Several(TinyVLM):
    def configure_optimizers(self) -> Any:
        return [optim.SGD(self.encoder.parameters(), 0.1), optim.SGD(self.backbone.parameters(), 0.1)]


class Foreign(TinyVLM):
    def configure_optimizers(self) -> Any:
        return optim.SGD([torch.nn.Parameter(torch.zeros(3))], 0.1)


class Nothing(TinyVLM):
    def configure_optimizers(self) -> Any:
        return None


def _with(optimizer: Callable[..., optim.Optimizer]) -> TinyVLM:
    class Own(TinyVLM):
        def configure_optimizers(self) -> Any:
            return optimizer(self.parameters())

    return Own()


MODULES: dict[str, tuple[Callable[[], L.LightningModule], type[Exception], str]] = {
    "no FlowModule": (BoringModel, TypeError, r"BoringModel.*Derive it from FlowModule"),
    "manual optimization": (Manual, ValueError, r"automatic_optimization=False.*Remove it"),
    "own backward": (Backward, TypeError, r"overrides `backward`.*Remove it"),
    "own optimizer_zero_grad": (ZeroGrad, TypeError, r"overrides `optimizer_zero_grad`.*Remove it"),
    "LBFGS": (lambda: _with(optim.LBFGS), TypeError, r"LBFGS.*such as AdamW"),
    "SparseAdam": (lambda: _with(optim.SparseAdam), TypeError, r"SparseAdam.*Use AdamW"),
    "several optimizers": (Several, RuntimeError, r"multiple optimizers"),
    "an optimizer of other parameters": (Foreign, ValueError, r"Pass parameters of `self`"),
    "no optimizer": (Nothing, TypeError, r"returned no optimizer.*both halves"),
}


@pytest.mark.parametrize(("make", "error", "words"), MODULES.values(), ids=MODULES)
def test_a_module_is_refused(one_rank, make, error, words):
    with pytest.raises(error, match=words):
        one_rank.trainer(max_epochs=1).fit(make(), one_rank.data())


class Frozen(TinyVLM):
    """Of which nothing trains."""

    def configure_backbone(self) -> None:
        super().configure_backbone()
        self.backbone.requires_grad_(False)


@pytest.mark.parametrize("strategy", ["auto", "flowtrain"])
def test_a_module_of_which_nothing_trains_is_validated_but_not_fitted(one_rank, strategy):
    module = Frozen(freeze_encoder=True)
    given = {"strategy": "auto"} if strategy == "auto" else {}
    assert one_rank.trainer(max_epochs=1, **given).validate(module, one_rank.data(), verbose=False)
    with pytest.raises(ValueError, match=r"All weights of Frozen are frozen, .* add adapters, or call Trainer"):
        one_rank.trainer(max_epochs=1, **given).fit(module, one_rank.data())


def test_a_compiled_module_is_refused_by_lightning(one_rank):
    with pytest.raises(RuntimeError, match=r"compiled model is incompatible.*FlowTrainStrategy"):
        one_rank.trainer(max_epochs=1).fit(torch.compile(TinyVLM(), backend="eager"), one_rank.data())


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"encoder_ranks": 1}, ValueError, "at least 2 devices"),
        ({"placement": "separate"}, ValueError, "at least 2 devices"),
        ({"placement": "colocated", "encoder_ranks": 1}, ValueError, "encoder_ranks"),
        ({"placement": "elsewhere"}, ValueError, "elsewhere"),
    ],
)
def test_roles_that_the_devices_cannot_take_are_refused(one_rank, settings, error, words):
    with pytest.raises(error, match=words):
        one_rank.trainer(strategy=flow.FlowTrainStrategy(**settings)).fit(TinyVLM(), one_rank.data())


@pytest.mark.parametrize(
    ("settings", "module", "words"),
    [
        ({"accumulate_grad_batches": 2}, TinyVLM, "accumulate_grad_batches=2"),
        ({"default_root_dir": "memory://bucket"}, TinyVLM, "is a URL"),
        ({"strategy": flow.FlowTrainStrategy(encoder_ranks=2)}, TinyVLM, "leave no backbone rank"),
        ({}, BoringModel, "Derive it from FlowModule"),
    ],
)
def test_no_other_rank_is_started_in_vain(one_rank, settings, module, words, monkeypatch):
    monkeypatch.setattr(sys, "argv", [__file__])  # a script, as a process of pytest-xdist is not
    trainer = L.Trainer(**{"accelerator": "cpu", "devices": 2, "strategy": "flowtrain", "logger": False, **settings})
    with pytest.raises((ValueError, TypeError), match=words):
        trainer.fit(module(), one_rank.data())
    assert trainer.strategy.launcher.procs == []


@pytest.mark.parametrize("stage", ["fit", "validate", "test", "predict"])
def test_a_loader_without_steps_is_refused(one_rank, stage):
    loader = DataLoader([torch.zeros(3)] * 2)
    given = {"train_dataloaders": loader} if stage == "fit" else {"dataloaders": loader}
    with pytest.raises(TypeError, match=r"the loader gave Tensor.*FlowDataModule"):
        getattr(one_rank.trainer(max_epochs=1), stage)(TinyVLM(), **given)


@pytest.mark.parametrize("place", ["encode", "generate"])
def test_logging_where_other_ranks_cannot_hear_it_is_refused(one_rank, place):
    class Loud(TinyVLM):
        def encode(self, media: Any) -> Any:
            if place == "encode":
                self.log("loud", 1.0)
            return super().encode(media)

        def generate(self, batch: Any, features: Any) -> Any:
            self.log("loud", 1.0)

    trainer = one_rank.trainer(max_epochs=1)
    with pytest.raises(RuntimeError, match=r"log\('loud'\).*Log in `merge`, `loss`"):
        (trainer.fit if place == "encode" else trainer.predict)(Loud(), one_rank.data())


@pytest.mark.parametrize(
    ("value", "options", "error", "words"),
    [
        (torch.zeros(2), {}, TypeError, "a tensor of one element"),
        (1.0, {"reduce_fx": "max"}, ValueError, "token-weighted mean only"),
    ],
)
def test_what_cannot_be_averaged_over_microbatches_is_refused(one_rank, value, options, error, words):
    class Odd(TinyVLM):
        def loss(self, outputs: Any, batch: Any) -> Any:
            self.log("odd", value, **options)
            return super().loss(outputs, batch)

    with pytest.raises(error, match=words):
        one_rank.trainer(max_epochs=1).fit(Odd(), one_rank.data())


@pytest.mark.parametrize("strategy", ["auto", "flowtrain"])
def test_what_is_no_number_of_target_tokens_is_refused(one_rank, strategy):
    class Odd(TinyVLM):
        def loss(self, outputs: Any, batch: Any) -> Any:
            return super().loss(outputs, batch)[0], -1

    trainer = one_rank.trainer(max_epochs=1, **({"strategy": "auto"} if strategy == "auto" else {}))
    with pytest.raises(ValueError, match="returned -1 as its number of target tokens"):
        trainer.fit(Odd(), one_rank.data())


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"accumulate_grad_batches": 2}, ValueError, "accumulate_grad_batches=2.*global_batch_size"),
        ({"strategy": ModelParallelStrategy()}, TypeError, "ModelParallelStrategy"),
    ],
)
def test_plain_lightning_refuses_what_a_flow_module_cannot_do_there(one_rank, settings, error, words):
    given = {"strategy": "auto", "max_steps": 1, "logger": False, "default_root_dir": one_rank.folder, **settings}
    with pytest.raises(error, match=words):
        L.Trainer(accelerator="cpu", devices=1, **given).fit(TinyVLM(), one_rank.data())


def test_a_time_between_checkpoints_is_decided_by_rank_zero(one_rank):
    """A time interval that all ranks agree on is no reason to refuse."""
    timed = callbacks.ModelCheckpoint(one_rank.folder, train_time_interval=timedelta(hours=1))
    one_rank.trainer(max_steps=1, limit_val_batches=0, callbacks=[timed]).fit(TinyVLM(), one_rank.data())


def test_options_for_a_storage_plugin_are_refused(one_rank):
    trainer = one_rank.trainer(max_steps=1, limit_val_batches=0, enable_checkpointing=False)
    trainer.fit(TinyVLM(), one_rank.data())
    with pytest.raises(TypeError, match=r"storage_options=\{'retries': 3\} was given, .* Leave them out"):
        trainer.save_checkpoint(one_rank.folder / "a.ckpt", storage_options={"retries": 3})
    assert list(one_rank.folder.iterdir()) == []
