"""What a rank does in the tests of halves of DeepSpeed that are stepped in host memory; it writes down what it saw."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW

from flowtrain_lightning.parallel.deepspeed_half import DeepSpeedHalf
from flowtrain_lightning.parallel.deepspeed_shards import DeepSpeedShardedHalf
from tests.forks import write_down

STEPS = 3


def compare(folder: Path) -> None:
    """Trains by each stage of ZeRO, with the optimizer's states on the device and on the host."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    found = {}
    for stage in (1, 2, 3):
        (kept, _), (offloaded, seen) = _train(stage, on_host=False), _train(stage, on_host=True)
        found[str(stage)] = {**seen, "same": all(map(torch.equal, kept, offloaded))}
    write_down(folder, found)
    dist.destroy_process_group()


def _train(stage: Any, *, on_host: bool) -> tuple[list[Tensor], dict[str, Any]]:
    """What the optimizer has made of this rank's part of the weights, and what left and returned."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 30), nn.Tanh(), nn.Linear(30, 5))
    weights = list(module.parameters())
    elements = sum(weight.numel() for weight in weights)
    settings: dict[str, Any] = {"group": None, "device": torch.device("cpu"), "optimizer_on_host": on_host}
    half: DeepSpeedHalf
    if stage == 3:
        half = DeepSpeedShardedHalf({"half": module}, fill=lambda keep: None, **settings)
    else:
        half = DeepSpeedHalf({"half": module}, stage=stage, **settings)
    shares = half.take_optimizer(optimizer := AdamW(weights, lr=0.1)).values()
    for step in range(STEPS):
        half.begin_step()
        for last in (False, True):
            rows = torch.ones(3, 8) * (1 + step + dist.get_rank())
            loss = half.call(lambda rows=rows: module(rows).square().sum())
            with half.backward(last=last):
                loss.backward()
        half.finish_gradients(0.5)
        optimizer.step()
    stepped = [share.of(share.flat.detach()).clone() for share in shares]  # without what DeepSpeed fills up with
    states = [entry for state in optimizer.state.values() for entry in state.values() if entry.ndim]
    seen: dict[str, Any] = {"elements": elements, "stepped": sum(flat.numel() for flat in half.parameters)}
    seen["states"] = sum(entry.numel() for entry in states)
    if half.on_host is not None:
        seen |= {"left": half.on_host.bytes_left, "returned": half.on_host.bytes_returned}
        half.begin_step()  # takes the weights from where they compute: they are those that were stepped
        seen["back"] = all(torch.equal(share.of(share.flat), one) for share, one in zip(shares, stepped, strict=True))
    half.release()
    return stepped, seen
