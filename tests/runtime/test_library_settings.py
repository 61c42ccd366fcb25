"""What a rank sets of the libraries under PyTorch: freed memory goes back, and streams have queues of their own."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import pytest
import torch

from flowtrain_lightning.runtime import library_settings
from flowtrain_lightning.runtime.library_settings import ask_for_hardware_queues, give_back_freed_memory
from tests.exactness.data import write_steps
from tests.forks import Job, read_down, run_jobs

GPU = torch.device("cuda")
NAME = "CUDA_DEVICE_MAX_CONNECTIONS"


def test_a_gpu_is_asked_for_more_hardware_queues_unless_the_user_has_said_how_many(monkeypatch):
    monkeypatch.delenv(NAME, raising=False)
    ask_for_hardware_queues(GPU)
    assert os.environ[NAME] == "32"
    monkeypatch.setenv(NAME, "1")
    ask_for_hardware_queues(GPU)
    assert os.environ[NAME] == "1"


@pytest.mark.parametrize(
    "answer", [None, "", "musl 1.2", OSError(22, "Invalid argument"), ValueError("unrecognized configuration name")]
)
def test_other_c_libraries_are_left_alone(monkeypatch, answer):
    def confstr(name: str) -> str | None:
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(library_settings.os, "confstr", confstr)
    assert not give_back_freed_memory()


def test_what_the_user_has_set_stands(monkeypatch):
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
    assert not give_back_freed_memory()


@pytest.mark.full
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_ranks_that_share_weights_grow_by_little_more_than_their_share(tmp_path: Path):
    write_steps(tmp_path / "data")
    ranks, blocks, side = 4, 68, 1024
    arguments = {"data": str(tmp_path / "data"), "ranks": ranks, "side": side}
    grown = {}
    for count in (1, blocks):
        job = Job(f"{count} blocks", "tests.runtime.sharded_memory:measure", ranks, {**arguments, "blocks": count})
        grown[count] = read_down(run_jobs(tmp_path, [job])[job.name].check().folder)
    # What a run takes whatever its weights (code that is read, the pool's segments) is in both, so in no difference.
    block = side * side * 4
    share = 4 * (blocks - 1) * block // ranks  # weights, gradients, two moments
    for little, much in zip(grown[1], grown[blocks], strict=True):
        assert much - little <= 1.2 * share + block
