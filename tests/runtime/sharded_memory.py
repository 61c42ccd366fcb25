"""What a rank does in the test of the memory of shards: trains on a half of large blocks, and weighs itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from flowtrain_lightning.parallel.ranks.connecting import disconnect_groups
from tests.exactness.data import steps_data
from tests.exactness.layouts import trainer_for
from tests.forks import write_down
from tests.processes import memory_of_process
from tests.tiny import WIDTH, Backbone, TinyVLM


class LargeBlock(nn.Module):
    """A square matrix that is much wider than what comes in."""

    def __init__(self, side: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(side, side) / side)

    def forward(self, x: Tensor) -> Tensor:
        return x + linear(pad(x, (0, len(self.weight) - WIDTH)), self.weight)[:, :WIDTH]


class LargeBackbone(Backbone):
    """Large blocks before the small one."""

    def __init__(self, blocks: int, side: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(LargeBlock(side) for _ in range(blocks))

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return super().forward(x, *args, **kwargs)


class LargeVLM(TinyVLM):
    """A small encoder and a large backbone."""

    def __init__(self, blocks: int, side: int) -> None:
        super().__init__()
        self.save_hyperparameters()

    def configure_backbone(self) -> None:
        self.backbone = LargeBackbone(self.hparams["blocks"], self.hparams["side"])


def measure(folder: Path, *, data: str, ranks: int, blocks: int, side: int, steps: int = 3) -> None:
    """Writes down by how many bytes this process grew at most while it trained, from before it built anything."""
    trainer = trainer_for(
        f"colocated {ranks}",
        strategy={"roles": {"backbone": {"shard": "fsdp"}}},
        max_steps=steps,
        limit_val_batches=0,
        default_root_dir=folder,
    )
    module, data_module = LargeVLM(blocks, side), steps_data(Path(data))
    Path("/proc/self/clear_refs").write_text("5")  # the most that was resident counts anew from here
    before = memory_of_process("VmRSS")
    trainer.fit(module, datamodule=data_module)
    write_down(folder, memory_of_process("VmHWM") - before)
    disconnect_groups()
