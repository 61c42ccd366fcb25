"""Random streams by name, which no layout, timing or other half can change; and the state of the user's own streams."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def global_seed() -> int:
    """The seed that ``lightning.seed_everything`` set, or 0."""
    return int(os.environ.get("PL_GLOBAL_SEED", "0"))


@contextmanager
def own_streams() -> Iterator[None]:
    """Inside, generators of the process may be seeded freely: torch's, Python's and numpy's.

    The user's own streams go on afterwards as if untouched.
    """
    if torch.get_default_device().type == "cuda" and torch.cuda.is_available():
        # Else its generator could not be seeded before the first weights are drawn there.
        torch.cuda.init()  # type: ignore[no-untyped-call]
    devices = [torch.cuda.current_device()] if _uses_cuda() else []
    of_python, of_numpy = random.getstate(), np.random.get_state(legacy=False)
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            random.setstate(of_python)
            np.random.set_state(of_numpy)


def enter_stream(*name: object) -> None:
    """Seeds torch's, Python's and numpy's generators with the stream of this name: ``"encoder", epoch, step, 3``.

    Call it inside ``own_streams``. The seed is 63 bits of a hash of the global seed and the name.
    """
    seed = _hashed(global_seed(), *name)
    # torch.manual_seed would note the call stack for every kind of accelerator that is not there: milliseconds.
    torch.default_generator.manual_seed(seed)
    if _uses_cuda():
        torch.cuda.manual_seed_all(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)  # all 63 bits would take it five times as long


def part_stream(part: int) -> None:
    """Goes on with masks of this rank's own, where ranks that have drawn alike come to parts of one tensor.

    All of them call it, in one stream. What GPUs draw differs from here on. What a host draws beside GPUs stays alike,
    as do Python's and numpy's numbers, since all ranks must skip the same layers.

    Args:
        part: which of the parts this rank has; the first goes on in the common stream.
    """
    common = int(torch.randint(1 << 62, (), device="cpu"))
    if part == 0:
        return
    seed = _hashed(common, part)
    if _uses_cuda():
        torch.cuda.manual_seed_all(seed)
    else:
        torch.default_generator.manual_seed(seed)


def random_states() -> dict[str, Any]:
    """The states of torch (CPU and this rank's GPU), Python's ``random`` and numpy."""
    version, numbers, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if _uses_cuda() else None,
        "python": (version, list(numbers), gauss),
        "numpy": (str(kind), [int(key) for key in keys], int(position), int(has_gauss), float(cached)),
    }


def restore_random_states(states: Mapping[str, Any]) -> None:
    """Takes up what ``random_states`` gave."""
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None and _uses_cuda():
        torch.cuda.set_rng_state(states["cuda"])
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))


def _hashed(*name: object) -> int:
    """63 bits."""
    digest = hashlib.sha256("/".join(map(str, name)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def _uses_cuda() -> bool:
    """Whether this process computes on GPUs. A run on CPUs never makes a context on one, which forks could not use."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
