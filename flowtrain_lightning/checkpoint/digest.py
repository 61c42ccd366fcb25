"""Digests by which a reader knows that it has read what was written: BLAKE2b of 16 bytes, in hexadecimal."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

DIGEST_THREADS = 8
"""So many digests are computed at a time: hashlib lets other threads run meanwhile."""


def digest_of(data: bytes | memoryview) -> str:
    """The digest of bytes."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def tensor_digest(tensor: Tensor) -> str:
    """The digest of the bytes of a contiguous CPU tensor, in memory's order."""
    return digest_of(tensor.reshape(-1).view(torch.uint8).numpy().data)
