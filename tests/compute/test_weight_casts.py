"""Under bf16-mixed a weight is cast once in a step, and trains as if it were cast in every forward."""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import nullcontext
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from flowtrain_lightning.compute.weight_casts import WeightCasts, casts_keep_gradients
from flowtrain_lightning.parallel.blocks import recompute_in_backward
from tests.exactness.layouts import trainer_for
from tests.exactness.modules import KINDS
from tests.tiny import tiny_data, write_records

WIDTH = 8
needs_kept_gradients = pytest.mark.skipif(not casts_keep_gradients(), reason="this PyTorch's casts lose gradients")


class CastWeights(TorchDispatchMode):
    """Counts how often each weight is cast."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self._module = module
        self._names: dict[int, str] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default:
            if not self._names:
                self._names = {id(weight): name for name, weight in self._module.named_parameters()}
            if id(args[0]) in self._names:
                self.counts[self._names[id(args[0])]] += 1
        return func(*args, **(kwargs or {}))


class NotesCasts(L.Callback):
    """Keeps the casts of each step, and how many microbatches it had."""

    def __init__(self, casts: CastWeights) -> None:
        self._casts = casts
        self.steps: list[Counter[str]] = []
        self.microbatches: list[int] = []

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        self._casts.counts.clear()

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.steps.append(Counter(self._casts.counts))
        self.microbatches.append(len(batch.microbatches))


@needs_kept_gradients
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_each_step_casts_each_weight_once(tmp_path, recompute):
    write_records(tmp_path, 24, pictures_of=[1, 0, 2] * 8)
    module = KINDS["deep"]()
    casts = CastWeights(module)
    notes = NotesCasts(casts)
    roles = {role: {"recompute": recompute} for role in ("encoder", "backbone")}
    trainer = trainer_for(
        "colocated 1",
        strategy={"roles": roles},
        precision="bf16-mixed",
        max_steps=2,
        limit_val_batches=0,
        callbacks=[notes],
        default_root_dir=tmp_path,
    )
    with casts:
        trainer.fit(module, datamodule=tiny_data(tmp_path, shuffle=False, global_batch_size=12))
    assert min(notes.microbatches) > 1
    products = {f"{name}.weight" for name, part in module.named_modules() if isinstance(part, nn.Linear)}
    assert all(step.keys() >= products - {"backbone.head.weight"} for step in notes.steps)
    assert [set(step.values()) for step in notes.steps] == [{1}, {1}]


class Stack(nn.Module):
    """Layers, each used once in a forward: of one that is used twice, bfloat16 gradients are summed before the cast."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))

    def forward(self, rows: Tensor) -> Tensor:
        for layer in self.layers:
            rows = layer(rows)
        return rows


def gradients_of_three_batches(recompute: str, *, kept: bool, elsewhere: bool) -> tuple[list[Tensor], Counter[str]]:
    """Gradients, and casts of weights; backwards run in this thread or, as on a GPU, in another one."""
    torch.manual_seed(0)
    stack = Stack()
    for block in stack.layers:
        recompute_in_backward(block, recompute)  # type: ignore[arg-type]
    casts = WeightCasts("cpu")
    with CastWeights(stack) as counted, torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        for number in range(3):
            with casts.kept() if kept else nullcontext():
                loss = stack(torch.randn(4 + number, WIDTH)).float().square().sum()
            if kept:
                casts.keep_in_backward([loss])
            if elsewhere:
                thread = threading.Thread(target=_backward, args=(loss, counted))
                thread.start()
                thread.join()
            else:
                loss.backward()
        casts.clear()
    return [weight.grad for weight in stack.parameters() if weight.grad is not None], counted.counts


def _backward(loss: Tensor, counted: CastWeights) -> None:
    with counted:
        loss.backward()


@needs_kept_gradients
@pytest.mark.parametrize("elsewhere", [False, True], ids=["in one thread", "backwards in another"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_gradients_are_to_the_bit_those_of_weights_that_are_cast_each_time(recompute, elsewhere):
    found, once = gradients_of_three_batches(recompute, kept=True, elsewhere=elsewhere)
    expected, each_time = gradients_of_three_batches(recompute, kept=False, elsewhere=False)
    assert len(found) == 6
    assert all(one.equal(other) for one, other in zip(found, expected, strict=True))
    assert set(once.values()) == {1}
    assert min(each_time.values()) >= 3


@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
def test_a_weight_that_was_first_cast_without_gradients_has_one_afterwards(without):
    layer, rows = nn.Linear(WIDTH, WIDTH), torch.randn(3, WIDTH)
    casts = WeightCasts("cpu")
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False), casts.kept():
        with without():
            layer(rows)
        layer(rows).float().sum().backward()
    assert layer.weight.grad is not None


@needs_kept_gradients
def test_what_this_pytorch_does_may_be_asked_in_an_evaluation():
    casts_keep_gradients.cache_clear()
    with torch.inference_mode():
        assert casts_keep_gradients()


def test_weights_that_have_changed_are_cast_anew_in_the_next_step():
    layer, rows = nn.Linear(WIDTH, WIDTH, bias=False), torch.eye(WIDTH)
    casts = WeightCasts("cpu")
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():  # somebody else's, which lasts for ever
        for number in range(2):
            layer.weight.fill_(number)
            with casts.kept():
                assert float(layer(rows).max()) == number
            casts.clear()


def test_nothing_is_kept_without_autocast():
    with WeightCasts("cpu").kept():
        assert not torch.is_autocast_enabled("cpu")
