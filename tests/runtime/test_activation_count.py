"""Activations within a limit of bytes: what autograd holds on a rank never exceeds it, as counted tensor by tensor."""

from __future__ import annotations

import json
import weakref
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from flowtrain_lightning import FlowTrainStrategy
from flowtrain_lightning.allocator import Allocation, Layout
from flowtrain_lightning.parallel.offloading import is_of_weights
from flowtrain_lightning.runtime.activation_count import ActivationCount
from flowtrain_lightning.runtime.timeline import AGAIN
from tests.exactness.data import GLOBAL_BATCH, steps_data, write_steps
from tests.exactness.modules import Deep
from tests.tiny import write_records

MOST = 600_000.0


class Held:
    """Bytes of the storages that autograd keeps for backwards, weights left out: now, and at most."""

    def __init__(self) -> None:
        self.most = 0
        self._times = Counter[int]()  # address of a storage -> how many saved tensors lie in it
        self._nbytes: dict[int, int] = {}

    def pack(self, tensor: Tensor) -> Saved:
        saved = Saved(tensor)
        if not is_of_weights(tensor):
            storage = tensor.untyped_storage()
            self._times[storage.data_ptr()] += 1
            self._nbytes[storage.data_ptr()] = storage.nbytes()
            self.most = max(self.most, sum(self._nbytes[each] for each, times in self._times.items() if times))
            weakref.finalize(saved, self._freed, storage.data_ptr())
        return saved

    def _freed(self, address: int) -> None:
        self._times[address] -= 1


class Saved:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class Recorder(L.Callback):
    """Notes what was held at most after the first step, and what was computed there."""

    def __init__(self, held: Held) -> None:
        self._held = held
        self.computed: Counter[str] = Counter()

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == 1:
            self._held.most = 0

    def on_fit_end(self, trainer: L.Trainer, *_: Any) -> None:
        spans = trainer.strategy.runner.timeline.spans
        self.computed.update(f"{span.lane}: {span.name}" for span in spans if span.step > 0)


def allocated(most: float | None) -> Allocation:
    both = {"encoder": Layout(), "backbone": Layout()}
    return Allocation("colocated", both, dict.fromkeys(both, (0,)), order="searched", activation_bytes=most)


class FrozenBackbone(Deep):
    """Only its encoder trains."""

    def configure_backbone(self) -> None:
        super().configure_backbone()
        self.backbone.requires_grad_(False)


def trained(data: Path, most: float | None, kind: type[Deep] = Deep) -> tuple[int, Counter[str]]:
    """The most bytes that one rank's autograd keeps after its first step, and what the rank computed there."""
    held = Held()
    recorder = Recorder(held)
    trainer = L.Trainer(
        strategy=FlowTrainStrategy(allocation=allocated(most), encoder_activations=20),
        accelerator="cpu",
        devices=1,
        max_steps=4,
        limit_val_batches=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        callbacks=[recorder],
        default_root_dir=data,
    )
    module = kind()
    module.mark_checked()  # the check leaves graphs without going backward
    with saved_tensors_hooks(held.pack, lambda saved: saved.tensor):
        trainer.fit(module, steps_data(data, token_budget=128, encoder_budget=70))
    return held.most, recorder.computed


def test_no_more_than_the_limit_is_held_and_what_has_room_is_kept(tmp_path):
    write_steps(tmp_path)
    free, all_kept = trained(tmp_path, None)
    most, computed = trained(tmp_path, MOST)
    assert most <= MOST < free
    assert not all_kept[f"encoder: {AGAIN}"]
    assert 0 < computed[f"encoder: {AGAIN}"] < computed["encoder: backward"]


def test_nor_is_it_where_the_first_step_of_a_frozen_backbone_kept_nothing(tmp_path):
    pictures = [0] * GLOBAL_BATCH + [1, 0, 2, 1, 0, 3, 1, 1, 0, 2, 1, 0] * 3
    write_records(tmp_path, len(pictures), pictures_of=pictures)
    free, _ = trained(tmp_path, None, FrozenBackbone)
    most, _ = trained(tmp_path, 0.7 * free, FrozenBackbone)
    assert most <= 0.7 * free


def test_a_limit_in_which_one_batch_alone_has_no_room_ends_the_first_step(tmp_path):
    write_steps(tmp_path)
    with pytest.raises(
        ValueError,
        match=r"one batch alone finds no room. Raise it, or set (encoder|token)_budget",
    ):
        trained(tmp_path, 100_000.0)


@pytest.mark.parametrize(("most", "known"), [(1e9, {"backbone": 7.0}), (2e9, {})])
def test_a_run_that_goes_on_in_its_allocation_knows_what_batches_keep(most, known):
    one, other = (ActivationCount(SimpleNamespace(allocation=allocated(each))) for each in (1e9, most))
    one.outdate(SimpleNamespace(row_bytes={}), ["encoder"])
    one.row_bytes = {"backbone": 7.0}
    other.load_state({**allocated(1e9).state_dict(), "activations": json.loads(json.dumps(one.state_dict()))})
    assert other.row_bytes == known
    assert other.outdate(SimpleNamespace(row_bytes={}), ["encoder"]) == bool(known)
    assert other.outdate(SimpleNamespace(row_bytes=known), ["encoder", "other"]) == bool(known)
    assert other.row_bytes == {}, "other weights train"
