"""What `benchmarks/gpu.py` measures by itself: attention kernels, the loss, and the pool in and between processes."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from benchmarks.device_events import median_milliseconds
from benchmarks.gpu_variants import Run
from benchmarks.pool_device import measure_device
from benchmarks.pool_passing import SIZES, TINY_SIZES, measure_passing
from flowtrain_lightning import attention
from flowtrain_lightning.compute.cross_entropy import summed_cross_entropy

_SAMPLES = 10
_HEADS, _KEY_HEADS, _HEAD_DIM = 12, 2, 128


def kernels(run: Run) -> None:
    """Writes milliseconds and TFLOP/s of each attention kernel that is there, and milliseconds and GiB of the loss.

    Sizes are those of a Qwen2-VL-2B, forward and backward, of as many tokens as a microbatch has; on a CPU tiny ones.
    """
    tokens, device = run.work.token_budget, torch.device("cuda", 0) if run.on_gpu else torch.device("cpu")
    sizes = (1536, 151_936) if run.on_gpu else (32, 256)
    _write(run, {"attention": _attention(tokens, device), "loss": _loss(tokens, *sizes, device)})


def pool(run: Run) -> None:
    """Writes how fast entries are put into GPU memory, beside copies there; nothing on a CPU."""
    _write(run, {"sizes": measure_device(_SAMPLES) if run.on_gpu else []})


def passing(run: Run) -> None:
    """Writes how fast entries pass between two processes on one GPU, beside copies there; on a CPU of host memory."""
    rank, device = int(os.environ["LOCAL_RANK"]), torch.device("cuda", 0) if run.on_gpu else torch.device("cpu")
    if run.on_gpu:
        torch.cuda.set_device(device)
    _write(run, {"sizes": measure_passing(rank, run.folder, device, SIZES if run.on_gpu else TINY_SIZES)}, rank)


def _attention(tokens: int, device: torch.device) -> dict[str, dict[str, float]]:
    lengths = [tokens // 8] * 8
    bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    shapes = [(sum(lengths), heads, _HEAD_DIM) for heads in (_HEADS, _KEY_HEADS, _KEY_HEADS)]
    inputs = [torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for shape in shapes]
    # Forward and backward, of the pairs that see each other.
    flops = 3.5 * 4 * _HEADS * _HEAD_DIM * sum(length**2 for length in lengths) / 2
    found = {}
    for name, kernel in _kernels(device).items():
        forward = partial(kernel, *inputs, bounds, max(lengths), True)
        seconds = _timed(forward, device)
        found[name] = {"milliseconds": 1e3 * seconds, "teraflops": flops / seconds / 1e12}
    return found


def _kernels(device: torch.device) -> dict[str, Callable[..., Tensor]]:
    if device.type != "cuda":
        return {"one sequence after another": attention.varlen_attention}
    chosen = attention.kernel_for(device)
    kernels: dict[str, Callable[..., Tensor]] = {f"{chosen} (chosen)": attention.varlen_attention}
    if chosen != "torch":
        kernels["torch"] = attention.torch_attention()
    return kernels


def _loss(targets: int, width: int, vocabulary: int, device: torch.device) -> dict[str, float]:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    head = torch.nn.Linear(width, vocabulary, bias=False, device=device, dtype=dtype)
    hidden = torch.randn(targets, width, device=device, dtype=dtype, requires_grad=True)
    labels = torch.randint(vocabulary, (targets,), device=device)
    forward = partial(summed_cross_entropy, head, hidden, labels)
    _timed(forward, device)  # the gradients are there from now on
    before = 0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    seconds = _timed(forward, device)
    peak = torch.cuda.max_memory_allocated() - before if device.type == "cuda" else 0
    return {"targets": targets, "milliseconds": 1e3 * seconds, "GiB": peak / 2**30}


def _timed(forward: Callable[[], Tensor], device: torch.device) -> float:
    """Seconds of a forward and its backward, a median; on a GPU by events, which are read at the end."""

    def work() -> None:
        forward().sum().backward()  # type: ignore[no-untyped-call]

    if device.type != "cuda":
        start = time.monotonic()
        work()
        return time.monotonic() - start
    return median_milliseconds(work) / 1e3


def _write(run: Run, found: dict[str, Any], rank: int = 0) -> None:
    (run.folder / f"rank{rank}.json").write_text(json.dumps(found))
