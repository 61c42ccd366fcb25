"""Tensors in files: they come back as they were, whole or in part, in pieces of bounded size."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from flowtrain_lightning.checkpoint import tensor_files
from flowtrain_lightning.checkpoint.tensor_files import read_tensors, write_tensors
from flowtrain_lightning.parallel.regions import Region, whole

FILE = "encoder/rank-00000.safetensors"

TENSORS = {
    "double": torch.randn(3, 4, dtype=torch.float64),
    "half": torch.randn(5).to(torch.bfloat16),
    "eighth": torch.randn(5).to(torch.float8_e4m3fn),
    "turned": torch.randn(3, 4).t(),
    "stretched": torch.ones(1).expand(5),
    "step": torch.tensor(7),
    "flags": torch.tensor([True, False]),
    "empty": torch.empty(0, 3),
    "parameter": torch.nn.Parameter(torch.randn(2)),
}
TENSORS["tied"] = TENSORS["double"]
TENSORS["view"] = TENSORS["double"][1:]


def bits(tensor):
    return tensor.detach().contiguous().view(-1).view(torch.uint8) if tensor.ndim else tensor


@pytest.mark.parametrize("piece_bytes", [1, 40, 1 << 20])
def test_tensors_come_back_to_the_bit(tmp_path, monkeypatch, piece_bytes):
    monkeypatch.setattr(tensor_files, "PIECE_BYTES", piece_bytes)
    index = write_tensors(tmp_path, FILE, TENSORS)
    found = read_tensors(tmp_path, index, {key: whole(tensor.shape) for key, tensor in TENSORS.items()})
    assert found.keys() == TENSORS.keys()
    for key, tensor in TENSORS.items():
        assert (found[key].dtype, found[key].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(bits(found[key]), bits(tensor))


@pytest.mark.parametrize("piece_bytes", [1, 40, 1 << 20])
def test_a_part_is_read_as_if_it_were_cut_from_the_whole(tmp_path, monkeypatch, piece_bytes):
    monkeypatch.setattr(tensor_files, "PIECE_BYTES", piece_bytes)
    numbers = torch.randn(7, 5, 3)
    index = write_tensors(tmp_path, FILE, {"numbers": numbers})
    region = Region((2, 1, 0), (4, 3, 2))
    assert torch.equal(read_tensors(tmp_path, index, {"numbers": region})["numbers"], numbers[2:6, 1:4, :2])


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_others_may_read_a_file_as_far_as_the_umask_lets_them(tmp_path, umask):
    before = os.umask(umask)
    try:
        write_tensors(tmp_path, FILE, TENSORS)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / FILE).stat().st_mode) == 0o666 & ~umask
    assert [file.name for file in (tmp_path / FILE).parent.iterdir()] == [Path(FILE).name]


def test_large_tensors_lie_in_pieces_that_a_reader_can_check_one_by_one(tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_files, "PIECE_BYTES", 64)
    write_tensors(tmp_path, FILE, {"numbers": torch.randn(10, 4)})
    stored = load_file(tmp_path / FILE)
    assert {key: tuple(piece.shape) for key, piece in stored.items()} == {
        "numbers[0,0]": (4, 4),
        "numbers[4,0]": (4, 4),
        "numbers[8,0]": (2, 4),
    }


def test_without_numbers_there_is_no_file(tmp_path):
    index = write_tensors(tmp_path, FILE, {"empty": torch.empty(0, 3)})
    assert index.files == {}
    assert list(tmp_path.iterdir()) == []
    assert read_tensors(tmp_path, index, {"empty": whole((0, 3))})["empty"].shape == (0, 3)


def test_a_file_that_cannot_be_written_raises_what_the_system_said(tmp_path):
    (tmp_path / "encoder").write_text("in the way")
    with pytest.raises(OSError, match="exists"):
        write_tensors(tmp_path, FILE, {"a": torch.ones(2)})
    (tmp_path / "encoder").unlink()
    (tmp_path / FILE).mkdir(parents=True)
    with pytest.raises(IsADirectoryError):
        write_tensors(tmp_path, FILE, {"a": torch.ones(2)})
