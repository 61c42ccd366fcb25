"""The search for a token budget."""

from __future__ import annotations

import sys
import time

import pytest

from flowtrain_lightning.allocator.public_models import CONFIGS
from flowtrain_lightning.cli import main

IN_THE_LONG_FORM = [pytest.param(model, marks=pytest.mark.full) for model in CONFIGS if model != "qwen2.5-vl-72b"]


@pytest.mark.full
@pytest.mark.parametrize("model", ["qwen2.5-vl-72b", *IN_THE_LONG_FORM])
def test_the_best_budget_for_16384_devices_is_found_in_seconds(monkeypatch, capsys, model):
    search = ("--token-budget", "search", "--batch", "16384")
    monkeypatch.setattr(sys, "argv", ["flowtrain", "plan", "--model", model, "--devices", "16384", *search])
    start = time.process_time()
    main()
    assert time.process_time() - start < 7  # 3 to 4 s alone on a core, and more where others want its caches
    assert "on 16384 h100" in capsys.readouterr().out
