"""A folder of tensors: written by several ranks, read whole by one, without unpickling."""

from __future__ import annotations

import json

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from flowtrain_lightning.checkpoint.tensors import load_tensors, save_tensors
from tests.forks import Job, run_jobs

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

TENSORS = {
    "weights.a": torch.randn(3, 4, dtype=torch.float64),
    "weights.half": torch.randn(5).to(torch.bfloat16),
    "weights.turned": torch.randn(3, 4).t(),
    "optimizer.0.a#step": torch.tensor(7),
    "weights.flags": torch.tensor([True, False]),
    "weights.empty": torch.empty(0, 3),
}


def every(name):
    return True


@pytest.fixture
def folder(tmp_path):
    save_tensors(tmp_path / "saved", TENSORS)
    return tmp_path / "saved"


def test_tensors_come_back_as_they_were(folder):
    loaded = load_tensors(folder, every)
    assert loaded.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor)


def test_only_the_wanted_ones_are_read(folder):
    assert set(load_tensors(folder, lambda name: name == "weights.a")) == {"weights.a"}
    assert load_tensors(folder, lambda name: False) == {}


def test_a_role_without_tensors_has_a_folder_too(tmp_path):
    save_tensors(tmp_path / "saved", {})
    assert load_tensors(tmp_path / "saved", every) == {}


def test_torchs_own_tools_read_the_folder(folder, tmp_path):
    dcp_to_torch_save(folder, tmp_path / "plain.pt")
    assert torch.equal(torch.load(tmp_path / "plain.pt")["weights.a"], TENSORS["weights.a"])


def test_parts_of_several_ranks_make_a_whole_and_what_all_hold_is_written_once(tmp_path):
    job = Job("sharded", "tests.checkpoint.saving:save_sharded", 2)
    folder = run_jobs(tmp_path, [job])["sharded"].check().folder / "saved"
    loaded = load_tensors(folder, every)
    assert torch.equal(loaded["rows"], torch.arange(10.0).view(5, 2))
    assert torch.equal(loaded["same"], torch.ones(10_000))
    index = json.loads((folder / "index.json").read_text())
    assert [chunk["sizes"] for chunk in index["rows"]["chunks"]] == [[3, 2], [2, 2]]
    assert sum(file.stat().st_size for file in folder.glob("*.distcp")) < 60_000  # bytes; twice would be 80 000
