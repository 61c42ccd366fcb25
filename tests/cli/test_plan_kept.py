"""What a plan says of features that are kept: how fast steps are that read them, and how fast disks must be."""

from __future__ import annotations

import json
import sys

import pytest

from flowtrain_lightning.cli import main

MODEL = ("--model", "qwen2.5-vl-3b", "--device", "h200", "--devices", "8", "--batch", "64")


@pytest.fixture
def plan(monkeypatch, tmp_path, capsys):
    """Plans in this process, in a folder of its own; answers with what was printed."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["flowtrain", "plan", *MODEL, *arguments])
        main()
        return capsys.readouterr().out

    return run


def test_steps_that_read_features_are_faster_by_what_the_tower_takes(plan):
    found = json.loads(plan("--freeze", "encoder", "--json"))
    kept, encoding = found["kept_features"], found["plans"][found["recommended"]]
    assert kept["gain"] == pytest.approx(encoding["step_seconds"] / kept["step_seconds"])
    assert 1.1 < kept["gain"] < 2
    rows, width = 1024 * 64 / 4, 2048  # about as many rows of bfloat16, as typical data have
    assert kept["bytes_of_a_sample"] == pytest.approx(2 * rows * width / 64, rel=0.5)
    assert kept["least_bytes_per_second"] < kept["bytes_per_second"]
    assert kept["backbone"]["data"] == 8


def test_the_line_says_what_each_node_must_read_and_a_trained_tower_has_none(plan):
    printed = plan("--freeze", "tower", "--nodes", "2")
    (line,) = (each for each in printed.splitlines() if each.startswith("  kept "))
    for words in ("with keep_features", "times as fast", "all devices on the backbone (8 devices", "each node reads"):
        assert words in line
    assert "keep_features" not in plan()
    assert json.loads(plan("--json"))["kept_features"] is None
