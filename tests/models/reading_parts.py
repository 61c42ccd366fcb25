"""A rank of a job that opens a published folder, and how many bytes of its files it has looked at."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import flowtrain_lightning as flow
from flowtrain_lightning.parallel.ranks.connecting import disconnect_groups
from tests.exactness.data import steps_data
from tests.exactness.layouts import trainer_for
from tests.exactness.train import weights_of
from tests.forks import write_down
from tests.models.tiny import FAMILIES

_MANY = 100_000
_READ_NOTHING = (torch.ops.aten.empty_like, torch.ops.aten.new_empty, torch.ops.aten.set_)


class BytesOfFiles(TorchDispatchMode):
    """Counts how many bytes of mapped files ``.safetensors`` operations read, but for small tensors.

    What is resident says less: a kernel maps more pages than are asked for.

    Attributes:
        read: bytes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.read = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        is_view = any(one.alias_info is not None and not one.alias_info.is_write for one in func._schema.returns)
        on_meta = isinstance(made, Tensor) and made.is_meta
        if not is_view and not on_meta and func.overloadpacket not in _READ_NOTHING:
            self._note(each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor))
        return made

    def _note(self, tensors: Iterator[Tensor]) -> None:
        many = [each for each in tensors if each.numel() >= _MANY and each.device.type == "cpu"]
        files = mapped_files() if many else []
        self.read += sum(each.nbytes for each in many if any(each.data_ptr() in file for file in files))


def mapped_files() -> list[range]:
    """The addresses at which this process sees files of weights."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    ends = (line.split()[0].split("-") for line in lines if line.endswith(".safetensors"))
    return [range(int(first, 16), int(last, 16)) for first, last in ends]


def train(folder: Path, *, data: str, model: str, layout: str, roles: dict[str, Any]) -> None:
    """Begins to train, and writes down what was read until then, and whether this rank's weights are the folder's."""
    seen: dict[str, Any] = {}
    files = BytesOfFiles()

    class Look(L.Callback):
        def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            seen["read"] = files.read
            weights = weights_of(pl_module)
            whole = flow.models.QwenVLM(model)
            whole.configure_model()
            expected = dict(whole.named_parameters())
            seen["has_experts"] = any(".experts." in name for name in weights)
            seen["large"] = sum(expected[name].nbytes for name in weights if expected[name].numel() >= _MANY)
            seen["differ"] = [name for name, weight in weights.items() if not torch.equal(weight, expected[name])]

    trainer = trainer_for(layout, strategy={"roles": roles}, max_steps=1, callbacks=[Look()], default_root_dir=folder)
    module = flow.models.QwenVLM(model)
    module.hparams["processor"] = None  # the folder has weights alone
    settings: dict[str, Any] = {"images": FAMILIES["qwen3_vl_moe"].images, "token_budget": 160}
    with files:
        trainer.fit(module, steps_data(Path(data), **settings))
    write_down(folder, seen)
    disconnect_groups()
