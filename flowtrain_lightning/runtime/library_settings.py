"""Settings of the libraries under PyTorch that a rank makes; those of the user's environment stand."""

from __future__ import annotations

import ctypes
import os

import torch

_MMAP_THRESHOLD = -3  # of mallopt(3)
_LEAST_MAPPED_BYTES = 128 << 10  # with which glibc begins
_HARDWARE_QUEUES = "32"


def ask_for_hardware_queues(device: torch.device) -> None:
    """Lets the streams of a GPU wait for other ranks without holding up each other. Before CUDA starts.

    A rank has about a dozen streams, those of NCCL and FSDP2 among them. With the usual 8 queues, one that waits may
    share its queue with the stream that computes.
    """
    if device.type == "cuda":
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", _HARDWARE_QUEUES)


def give_back_freed_memory() -> bool:
    """Lets the C library give the memory of each freed tensor back to the system: for ranks that share weights.

    glibc does so at first, but learns from what is freed to keep blocks of up to 32 MiB for later. Gathered weights and
    gradients are of other sizes than what was freed before them, and a rank comes to hold several times its share. The
    price is that memory of a new tensor is asked of the system again, so ranks with whole copies are left alone.

    Returns:
        Whether it was told: there must be glibc, and no environment variable that says otherwise.
    """
    if "MALLOC_MMAP_THRESHOLD_" in os.environ or not _is_glibc():
        return False
    return bool(ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, _LEAST_MAPPED_BYTES))


def _is_glibc() -> bool:
    try:
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc")
    except (OSError, ValueError):  # musl has no answer, and macOS does not know the name
        return False
