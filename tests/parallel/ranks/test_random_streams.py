"""Random streams leave GPUs alone that a process does not use, and the user's own; slices have masks of their own."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from flowtrain_lightning.parallel.ranks.random_streams import (
    enter_stream,
    own_streams,
    random_states,
    restore_random_states,
)
from tests.exactness.data import write_steps
from tests.forks import Job, read_down, run_jobs


def test_a_run_on_cpus_makes_no_context_on_the_gpus_of_its_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("CUDA was started")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("init", "current_device", "get_rng_state", "set_rng_state", "manual_seed_all"):
        monkeypatch.setattr(torch.cuda, name, refuse)
    with own_streams():
        enter_stream("encoder", 0, 0, 1)
        states = random_states()
        restore_random_states(states | {"cuda": torch.zeros(16, dtype=torch.uint8)})
    assert states["cuda"] is None


def draw() -> tuple[float, float, float]:
    return float(torch.rand(())), random.random(), float(np.random.random())


def test_a_stream_repeats_all_generators_draws_and_keeps_the_users_own():
    with own_streams():
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)
        of_user = [draw(), draw()]
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)
        assert draw() == of_user[0]
        of_stream = []
        for name in ("one", "two", "one"):
            with own_streams():
                enter_stream(name)
                of_stream.append(draw())
        assert draw() == of_user[1]
    assert of_stream[0] == of_stream[2]
    assert not {*of_stream[0]} & {*of_stream[1]}


def test_context_ranks_draw_masks_of_their_own_but_decide_and_merge_alike(tmp_path: Path):
    write_steps(tmp_path / "data")
    arguments = {"data": str(tmp_path / "data"), "layout": "1+2", "roles": {"backbone": {"context": 2}}}
    job = Job("masks", "tests.parallel.drawn_masks:train", 3, arguments)
    first, second = (found for found in read_down(run_jobs(tmp_path, [job])["masks"].check().folder) if found["masks"])
    assert first["merged"] == second["merged"]
    assert first["decided"] == second["decided"]
    for mask, other in zip(first["masks"], second["masks"], strict=True):
        count = min(len(mask), len(other))
        assert sum(one == another for one, another in zip(mask, other, strict=False)) < 0.6 * count
