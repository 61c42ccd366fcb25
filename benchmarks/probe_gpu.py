"""What one GPU does that no test asks: streams that hold up others, casts, windows, a full card, events, optimizers.

python -m benchmarks.probe_gpu      a minute; prints a line for each probe, and why one failed
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

from benchmarks.device_events import median_milliseconds
from benchmarks.modules import ROOT
from flowtrain_lightning.attention import varlen_attention
from flowtrain_lightning.compute.copy_stream import CopyStream
from flowtrain_lightning.pool import CudaRuntime
from flowtrain_lightning.trainer.kinds_of_weights import stepping_by_kind

GPU = torch.device("cuda", 0)
QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
PACKAGES = ("torch", "lightning", "transformers", "numba", "pyzmq", "scipy", "torchmetrics", "flash-attn")
_STREAMS_OF_OTHERS = 10
_BUSY_CYCLES = 200_000_000
_GIB = 1 << 30


def main() -> int:
    """Runs all probes; returns 1 where there is no GPU."""
    if not torch.cuda.is_available():
        print("There is no GPU, so nothing was probed.")
        return 1
    if sys.argv[1:] == ["streams"]:
        tell("streams", streams)
        return 0
    print(f"{torch.cuda.get_device_name(GPU)}, CUDA {torch.version.cuda}; {', '.join(map(_version, PACKAGES))}")
    for queues in (None, "32"):  # which a process can be told only before it starts CUDA
        environment = {name: value for name, value in os.environ.items() if name != QUEUES}
        environment |= {} if queues is None else {QUEUES: queues}
        command = [sys.executable, "-m", "benchmarks.probe_gpu", "streams"]
        subprocess.run(command, cwd=ROOT, env=environment, timeout=120, check=False)
    for name, probe in PROBES.items():
        tell(name, probe)
    return 0


def tell(name: str, probe: Callable[[], str]) -> None:
    """Prints what a probe found, or why it failed: the next one runs all the same."""
    try:
        found = probe()
    except Exception as error:  # whatever it is, it is what the probe has found
        found = f"failed: {type(error).__name__}: {str(error)[:300]}"
    print(f"{name}: {found}", flush=True)


def streams() -> str:
    """Which streams of a rank, while they are busy, hold up a kernel of the stream that computes."""
    torch.cuda.set_device(GPU)
    copies = [CopyStream(GPU) for _ in range(9)]  # as many as a rank of both roles has
    of_others = [torch.cuda.Stream(GPU) for _ in range(_STREAMS_OF_OTHERS)]  # type: ignore[no-untyped-call]
    inside: list[Callable[[], AbstractContextManager[Any]]] = [copy.copying for copy in copies]
    inside += [partial(torch.cuda.stream, stream) for stream in (CudaRuntime(GPU).side, *of_others)]
    rows = torch.ones(1 << 20, device=GPU)
    held = [number for number, enter in enumerate(inside) if _is_held_up(enter, rows)]
    told = os.environ.get(QUEUES)
    return f"{len(held)} of {len(inside)} hold up the one that computes, by number {held} ({QUEUES}={told})"


def _is_held_up(enter: Callable[[], AbstractContextManager[Any]], rows: Tensor) -> bool:
    torch.cuda.synchronize()
    with enter():
        # Some 0.1 s. There is no public way to keep a stream busy and the GPU free.
        torch.cuda._sleep(_BUSY_CYCLES)  # type: ignore[no-untyped-call]
    busy, done = (torch.cuda.Event() for _ in range(2))  # type: ignore[no-untyped-call]
    with enter():
        busy.record()  # type: ignore[no-untyped-call]
    rows.add_(1)
    done.record()  # type: ignore[no-untyped-call]
    while not done.query():  # type: ignore[no-untyped-call]
        if busy.query():  # type: ignore[no-untyped-call]
            return True
    return False


def casts() -> str:
    """How long it takes to cast the weights of a 3B once, as bf16-mixed does in each step."""
    weights = [torch.randn(2048, 11008, device=GPU) for _ in range(108)]
    milliseconds = median_milliseconds(lambda: [weight.to(torch.bfloat16) for weight in weights])
    return f"{sum(weight.numel() for weight in weights) / 1e9:.2f} G weights in {milliseconds:.1f} ms"


def windows() -> str:
    """Attention within windows of 64 of 16,384 patches, told how long a window is, or how long an image is."""
    query, key, value = (
        torch.randn(16384, 16, 80, device=GPU, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
    )
    bounds = torch.arange(0, 16385, 64, dtype=torch.int32, device=GPU)
    found = []
    for longest in (64, 1024, 16384):

        def attend(longest: int = longest) -> None:
            varlen_attention(query, key, value, bounds, longest, False).sum().backward()  # type: ignore[no-untyped-call]

        found.append(f"told {longest}: {median_milliseconds(attend):.2f} ms")
    return ", ".join(found)


def full_card() -> str:
    """Whether the pool's block finds room on a card that is full of what PyTorch keeps and nobody uses."""
    runtime = CudaRuntime(GPU)
    free, _ = torch.cuda.mem_get_info(GPU)
    kept = torch.empty(free - _GIB // 2, dtype=torch.uint8, device=GPU)
    del kept
    found = []
    for make_room in (False, True):
        if make_room:
            runtime.make_room()
        try:
            runtime.allocate(2 * _GIB).close()
            found.append("there is room for 2 GiB")
        except RuntimeError as error:
            found.append(f"no room ({error})")
    return f"{found[0]}; once PyTorch has given back what it keeps: {found[1]}"


def events() -> str:
    """How many events a process can make that others can open."""
    runtime = CudaRuntime(GPU)
    made: list[Any] = []
    try:
        while len(made) < 4096:
            made.append(runtime.make_event())
            made[-1].ipc_handle()
    except RuntimeError as error:
        return f"{len(made)}, then: {str(error)[:100]}"
    return f"{len(made)} and more"


def optimizers() -> str:
    """Whether a group of DTensors and plain weights is stepped, by PyTorch alone and with the groups divided."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
    torch.cuda.set_device(GPU)
    dist.init_process_group("nccl", rank=0, world_size=1)
    mesh, found = init_device_mesh("cuda", (1,)), []
    for kernel in ({}, {"fused": True}):
        divided = distribute_tensor(torch.randn(8, 8, device=GPU), mesh, [Replicate()])
        weights = [nn.Parameter(divided), nn.Parameter(torch.randn(8, 8, device=GPU))]
        for weight in weights:
            weight.grad = weight.detach().clone()
        optimizer = torch.optim.AdamW(weights, **kernel)  # type: ignore[arg-type]
        with stepping_by_kind(optimizer):
            optimizer.step()
        try:
            optimizer.step()
            alone = "steps"
        except RuntimeError as error:
            alone = f"does not ({str(error)[:60]})"
        found.append(f"{kernel or 'as it is by itself'}: divided groups step, PyTorch alone {alone}")
    dist.destroy_process_group()
    return "; ".join(found)


PROBES: dict[str, Callable[[], str]] = {
    "casts": casts,
    "windows": windows,
    "full card": full_card,
    "events": events,
    "optimizers": optimizers,
}
"""Name -> what is probed in this process."""


def _version(package: str) -> str:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return f"no {package}"


if __name__ == "__main__":
    sys.exit(main())
