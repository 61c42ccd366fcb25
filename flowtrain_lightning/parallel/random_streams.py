"""Random streams by name: what a half draws never depends on the layout, the timing or the other half."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def global_seed() -> int:
    """The seed that ``lightning.seed_everything`` set, or 0."""
    return int(os.environ.get("PL_GLOBAL_SEED", "0"))


def stream_seed(*name: object) -> int:
    """A 63-bit seed for the stream with this name, for example ``stream_seed(seed, "encoder", epoch, step, 3)``."""
    digest = hashlib.sha256("/".join(map(str, name)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


@contextmanager
def own_streams() -> Iterator[None]:
    """Inside, torch's generators may be seeded freely; the user's own streams go on afterwards as if untouched."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        yield


def enter_stream(*name: object) -> None:
    """Seeds torch's generators with the stream of this name. Call inside ``own_streams``."""
    seed = stream_seed(*name)
    # torch.manual_seed would note the call stack for every kind of accelerator that is not there: milliseconds.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)
