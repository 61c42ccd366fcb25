"""Operations of chosen steps and ranks, recorded by PyTorch's profiler."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import lightning as L
import pytest
import torch

from flowtrain_lightning.allocator import default_allocation
from flowtrain_lightning.callbacks import StepProfiler
from tests.tiny import TinyVLM, tiny_data, write_records


def train(folder: Path, profiler: StepProfiler, strategy: str = "flowtrain") -> None:
    """Three steps on one rank, which has both roles."""
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    settings = {
        "accelerator": "cpu",
        "devices": 1,
        "max_steps": 3,
        "logger": False,
        "default_root_dir": folder,
        **quiet,
    }
    trainer = L.Trainer(strategy=strategy, callbacks=[profiler], **settings)
    trainer.fit(TinyVLM(), tiny_data(folder, global_batch_size=4))


def optimizer_steps(folder: Path) -> int:
    """How many the trace of rank 0 has."""
    events = json.loads((folder / "profile" / "rank0.json").read_text())["traceEvents"]
    assert any(event["name"] == "aten::addmm" for event in events)
    return sum(event["name"].startswith("Optimizer.step#") for event in events)


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    folder = tmp_path_factory.mktemp("records")
    write_records(folder, 16)
    return folder


@pytest.mark.parametrize(("strategy", "first", "steps", "recorded"), [("flowtrain", 1, 1, 1), ("auto", 1, 9, 2)])
def test_the_chosen_steps_are_recorded_as_far_as_the_run_has_them(records, tmp_path, strategy, first, steps, recorded):
    train(records, StepProfiler(first, steps, folder=tmp_path), strategy)
    assert optimizer_steps(tmp_path) == recorded


@pytest.mark.parametrize(("roles", "is_recorded"), [(["encoder"], False), (["encoder", "backbone"], True)])
def test_a_rank_is_recorded_if_it_has_one_of_the_roles(tmp_path, roles, is_recorded):
    job = SimpleNamespace(roles=("backbone",), allocation=default_allocation(2))
    strategy = SimpleNamespace(job=job, root_device=torch.device("cpu"), broadcast=lambda folder: folder)
    rank = SimpleNamespace(strategy=strategy, global_step=0, global_rank=3)
    profiler = StepProfiler(0, 1, roles=roles, folder=tmp_path)
    profiler.on_train_start(rank, None)
    profiler.on_train_batch_start(rank, None, None, 0)
    profiler.on_train_end(rank, None)
    assert [file.name for file in tmp_path.glob("profile/*")] == ["rank3.json"] * is_recorded


@pytest.mark.parametrize(
    ("settings", "said"),
    [({"first": -1}, "at least 0"), ({"steps": 0}, "at least 1"), ({"roles": []}, "name some")],
)
def test_settings_that_record_nothing_are_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        StepProfiler(**settings)


def test_a_role_that_the_run_does_not_have_is_refused(tmp_path):
    job = SimpleNamespace(roles=("backbone",), allocation=default_allocation(2))
    strategy = SimpleNamespace(job=job, root_device=torch.device("cpu"), broadcast=lambda folder: folder)
    with pytest.raises(ValueError, match="name some of encoder, backbone"):
        StepProfiler(roles=["decoder"]).on_train_start(SimpleNamespace(strategy=strategy), None)


def test_pytorch_records_memory_by_the_functions_that_are_used():
    assert callable(torch.cuda.memory._record_memory_history)
    assert callable(torch.cuda.memory._dump_snapshot)
