"""Random streams and their states leave GPUs alone that this process does not compute on."""

from __future__ import annotations

import pytest
import torch

from flowtrain_lightning.parallel.ranks.random_streams import (
    enter_stream,
    own_streams,
    random_states,
    restore_random_states,
)


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
