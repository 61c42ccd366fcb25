"""Random numbers in the user's methods: whether any are drawn from the generators of the process."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

from flowtrain_lightning.parallel.ranks.random_streams import random_states, restore_random_states


@contextmanager
def kept_random_states() -> Iterator[None]:
    """Afterwards all generators of this process go on as if untouched."""
    states = random_states()
    try:
        yield
    finally:
        restore_random_states(states)


def seed_all(seed: int) -> None:
    """Seeds torch's generators on the CPU and on this process's GPU, Python's and numpy's."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def draws_random_numbers(run: Callable[[], object]) -> bool:
    """Whether a run takes numbers from a generator of the process.

    A run that seeds the generator itself, from the sample say, leaves it in one state whatever it found; that is no
    draw. Nor are those from a generator of the run's own.
    """
    left: list[tuple[object, ...]] = []
    changed: set[int] = set()
    for seed in (0, 1):
        seed_all(seed)
        before = _states()
        run()
        left.append(_states())
        changed = {number for number, state in enumerate(left[-1]) if state != before[number]}
        if not changed:
            return False
    return any(left[0][number] != left[1][number] for number in changed)


def _states() -> tuple[object, ...]:
    """Of each generator."""
    _, keys, position, *_ = np.random.get_state(legacy=True)
    on_gpu = [torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    of_torch = [bytes(state.numpy()) for state in (torch.get_rng_state(), *on_gpu)]
    return *of_torch, random.getstate(), (bytes(np.asarray(keys)), position)
