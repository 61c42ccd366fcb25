"""Optimizers, clipping and learning-rate schedulers: the same weights as under plain Lightning."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn, optim
from torch.optim import lr_scheduler

from tests.lightning.run_context import Recorder, RunContext, flat, half_lengths
from tests.tiny import TinyVLM

pytestmark = pytest.mark.timeout(600)

Parameters = Iterable[nn.Parameter]

OPTIMIZERS: dict[str, Callable[[Parameters], optim.Optimizer]] = {
    "ASGD": optim.ASGD,
    "Adadelta": optim.Adadelta,
    "Adafactor": optim.Adafactor,
    "Adagrad": optim.Adagrad,
    "Adam": optim.Adam,
    "AdamW": optim.AdamW,
    "AdamW fused": lambda parameters: optim.AdamW(parameters, fused=True),
    "AdamW foreach": lambda parameters: optim.AdamW(parameters, foreach=True),
    "Adagrad fused": lambda parameters: optim.Adagrad(parameters, fused=True),
    "Adamax": optim.Adamax,
    "Muon": lambda parameters: optim.Muon([p for p in parameters if p.ndim == 2]),
    "NAdam": optim.NAdam,
    "RAdam": optim.RAdam,
    "RMSprop": optim.RMSprop,
    "Rprop": optim.Rprop,
    "SGD": lambda parameters: optim.SGD(parameters, lr=0.1, momentum=0.9),
}


def _cycle(optimizer: optim.Optimizer, trainer: L.Trainer) -> dict[str, Any]:
    steps = int(trainer.estimated_stepping_batches)
    return {"scheduler": lr_scheduler.OneCycleLR(optimizer, [0.01, 0.02], total_steps=steps), "interval": "step"}


SCHEDULERS: dict[str, Callable[[optim.Optimizer, L.Trainer], dict[str, Any]]] = {
    "per step": _cycle,
    "per epoch": lambda optimizer, _: {"scheduler": lr_scheduler.ExponentialLR(optimizer, 0.5)},
    "every second step": lambda optimizer, _: {
        "scheduler": lr_scheduler.StepLR(optimizer, 1, 0.5),
        "interval": "step",
        "frequency": 2,
    },
    "on plateau": lambda optimizer, _: {
        "scheduler": lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", patience=0),
        "monitor": "val_loss",
    },
    "on plateau per step": lambda optimizer, _: {
        "scheduler": lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", patience=1),
        "monitor": "train_loss",
        "interval": "step",
    },
}

CLIPPING: dict[str, dict[str, Any]] = {
    "norm": {"gradient_clip_val": 0.05},
    "value": {"gradient_clip_val": 0.001, "gradient_clip_algorithm": "value"},
    "off": {},
}


class Chosen(TinyVLM):
    """Trains with the optimizer and scheduler that a test names; notes the gradients' largest parts per half."""

    def __init__(self, optimizer: str = "SGD", scheduler: str | None = None) -> None:
        super().__init__()
        self.chosen = (optimizer, scheduler)
        self.largest: list[dict[str, float]] = []

    def configure_optimizers(self) -> Any:
        name, scheduler = self.chosen
        if scheduler is None:
            return OPTIMIZERS[name](self.parameters())
        groups = [{"params": list(self.encoder.parameters()), "lr": 0.01}, {"params": list(self.backbone.parameters())}]
        optimizer = optim.SGD(groups, lr=0.02, momentum=0.9)
        return {"optimizer": optimizer, "lr_scheduler": SCHEDULERS[scheduler](optimizer, self.trainer)}

    def on_before_optimizer_step(self, optimizer: optim.Optimizer) -> None:
        if self.trainer.gradient_clip_val is not None:
            return
        self._note_gradients()

    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        super().configure_gradient_clipping(*args, **kwargs)
        self._note_gradients()

    def _note_gradients(self) -> None:
        found = {}
        for half in ("encoder", "backbone"):
            gradients = [p.grad for p in getattr(self, half).parameters() if p.grad is not None]
            if gradients and not gradients[0].is_meta:
                found[half] = float(torch.stack([g.abs().max() for g in gradients]).max())
        self.largest.append(found)


def every_optimizer(context: RunContext) -> None:
    for name in OPTIMIZERS:
        L.seed_everything(7, verbose=False)
        module = Chosen(name)
        trainer = context.trainer(max_steps=3, limit_val_batches=0, enable_checkpointing=False)
        trainer.fit(module, context.data())
        context.notes[name] = half_lengths(module)


def every_scheduler(context: RunContext) -> None:
    for name in SCHEDULERS:
        L.seed_everything(7, verbose=False)
        module, recorder = Chosen(scheduler=name), Recorder()
        trainer = context.trainer(max_epochs=3, enable_checkpointing=False, callbacks=[recorder])
        trainer.fit(
            module,
            context.data(),
        )
        rates = [event[3] for event in recorder.events if event[0] == "train"]
        context.notes[name] = {"rates": rates, "lengths": half_lengths(module)}


def every_clipping(context: RunContext) -> None:
    for name, settings in CLIPPING.items():
        L.seed_everything(7, verbose=False)
        module = Chosen()
        trainer = context.trainer(max_steps=3, limit_val_batches=0, enable_checkpointing=False, **settings)
        trainer.fit(module, context.data())
        context.notes[name] = {"largest": module.largest, "lengths": half_lengths(module)}


LAYOUTS_OF_RUNS = {
    every_optimizer: ("auto", "1+1"),
    every_scheduler: ("auto", "1+1"),
    every_clipping: ("auto", "1+1", "1+2", "colocated"),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_gives_the_weights_that_it_gives_under_plain_lightning(layout_runs, name):
    (plain,) = layout_runs.notes(every_optimizer, "auto")
    backbone, encoder = layout_runs.notes(every_optimizer, "1+1")
    assert {**backbone[name], **encoder[name]} == pytest.approx(plain[name], rel=1e-9)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_gives_the_learning_rates_and_weights_of_plain_lightning(layout_runs, name):
    plain = layout_runs.notes(every_scheduler, "auto")[0][name]
    assert len({tuple(rates) for rates in plain["rates"]}) > 1
    for rank in layout_runs.notes(every_scheduler, "1+1"):
        assert flat(rank[name]["rates"]) == pytest.approx(flat(plain["rates"]), rel=1e-12)
        for half, length in rank[name]["lengths"].items():
            assert length == pytest.approx(plain["lengths"][half], rel=1e-9)


@pytest.mark.parametrize("layout", ["1+1", "1+2", "colocated"])
@pytest.mark.parametrize("name", CLIPPING)
def test_clipping_is_that_of_the_whole_module(layout_runs, layout, name):
    (plain,) = layout_runs.notes(every_clipping, "auto")
    for rank in layout_runs.notes(every_clipping, layout):
        for own, expected in zip(rank[name]["largest"], plain[name]["largest"], strict=True):
            assert own == pytest.approx({half: expected[half] for half in own}, rel=1e-9)
        for half, length in rank[name]["lengths"].items():
            assert length == pytest.approx(plain[name]["lengths"][half], rel=1e-9)
    assert plain["norm"]["largest"][0]["backbone"] < plain["off"]["largest"][0]["backbone"]
    assert max(plain["value"]["largest"][0].values()) == pytest.approx(0.001)


class Wrapping(optim.Optimizer):
    """Steps another optimizer, as Lookahead and its like do."""

    def __init__(self, optimizer: optim.Optimizer) -> None:
        self.optimizer = optimizer
        super().__init__(optimizer.param_groups, {})
        self._share()

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)
        self._share()

    def _share(self) -> None:
        self.state, self.param_groups = self.optimizer.state, self.optimizer.param_groups


def test_an_optimizer_that_wraps_another_one_is_saved_and_goes_on_from_there(one_rank):
    saved = one_rank.folder / "step2.ckpt"

    class Wrapped(TinyVLM):
        def configure_optimizers(self) -> optim.Optimizer:
            return Wrapping(optim.SGD(self.parameters(), lr=0.1, momentum=0.9))

        def on_train_batch_end(self, *_: Any) -> None:
            if self.trainer.global_step == 2:
                self.trainer.save_checkpoint(saved)

    straight, resumed = Wrapped(), Wrapped()
    for module, checkpoint in ((straight, None), (resumed, saved)):
        L.seed_everything(7, verbose=False)
        trainer = one_rank.trainer(max_steps=4, limit_val_batches=0, enable_checkpointing=False)
        trainer.fit(module, one_rank.data(), ckpt_path=checkpoint)
    assert half_lengths(resumed) == half_lengths(straight)
