"""On what the packing check computes: a device and its memory, and all cores of a host."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path

import torch

CPU = torch.device("cpu")


def free_memory(device: torch.device) -> int | None:
    """Bytes of a device's memory, or the host's, that are free; None where nobody says."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    with suppress(OSError, ValueError, IndexError):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    return None


def made_on(device: torch.device) -> AbstractContextManager[object]:
    """Inside, tensors are made on a device where nothing else is said; it costs nothing where that is so anyway."""
    return nullcontext() if device == CPU and torch.get_default_device() == CPU else device


@contextmanager
def many_threads() -> Iterator[None]:
    """Inside, PyTorch computes on all cores: the other ranks of the host wait for the one that checks."""
    before = torch.get_num_threads()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(max(before, cores))
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def memory_given_back() -> Iterator[None]:
    """Afterwards a GPU's memory that nobody uses any more is free for others than PyTorch."""
    try:
        yield
    finally:
        torch.cuda.empty_cache()
