"""A rank's part in a step of which it measures how many bytes autograd keeps for the backward."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor

from flowtrain_lightning.parallel.ranks.connecting import disconnect_groups
from tests.exactness.layouts import trainer_for
from tests.forks import write_down
from tests.tiny import TinyVLM, tiny_data


class SavedTensors:
    """Bytes that autograd keeps for backwards: now, and at most."""

    def __init__(self) -> None:
        self.now = 0
        self.most = 0

    def pack(self, tensor: Tensor) -> _Saved:
        return _Saved(tensor, self)

    def unpack(self, saved: _Saved) -> Tensor:
        return saved.tensor


class _Saved:
    def __init__(self, tensor: Tensor, counter: SavedTensors) -> None:
        self.tensor = tensor
        counter.now += tensor.nbytes
        counter.most = max(counter.most, counter.now)
        weakref.finalize(self, self._freed, counter, tensor.nbytes)

    @staticmethod
    def _freed(counter: SavedTensors, nbytes: int) -> None:
        counter.now -= nbytes


KEPT_BATCHES = 4
"""Encoder batches whose activations a rank keeps by default."""


def measure_saved_tensors(folder: Path, *, data: str, layout: str, global_batch_size: int) -> None:
    """Writes how many bytes autograd kept at most, how many microbatches a step had, and its heaviest batches."""
    saved = SavedTensors()
    microbatches, heaviest = 0, 0

    class Count(L.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            nonlocal microbatches, heaviest
            plan = batch.plan
            microbatches = len(plan.microbatches[0])
            patches = sorted(int(plan.sizes.media_patches[media].sum()) for media in plan.batches["encoder"][0])
            heaviest = sum(patches[-KEPT_BATCHES:])

    trainer = trainer_for(layout, max_steps=1, limit_val_batches=0, callbacks=[Count()], default_root_dir=folder)
    module = TinyVLM()
    module.mark_checked()  # the check leaves graphs without going backward, of which these hooks would make circles
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, saved.unpack):
        trainer.fit(module, datamodule=tiny_data(Path(data), global_batch_size=global_batch_size))
    write_down(folder, {"most": saved.most, "left": saved.now, "microbatches": microbatches, "heaviest": heaviest})
    disconnect_groups()
