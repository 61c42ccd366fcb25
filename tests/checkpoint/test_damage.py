"""What is damaged never loads: the error names file and tensor, and the checkpoint before it."""

from __future__ import annotations

import os
from collections import Counter

import pytest
import torch

from flowtrain_lightning.checkpoint import DamagedCheckpointError, read_checkpoint, tensor_files
from tests.checkpoint.conftest import saved_alone
from tests.checkpoint.damage import files_of
from tests.checkpoint.damaged import Bench, benches
from tests.checkpoint.index_edits import rewrite_index
from tests.checkpoint.test_resume import same


@pytest.fixture
def kept(tmp_path, alone, monkeypatch):
    """A folder of two checkpoints, ``last.ckpt`` after 7 steps and ``other.ckpt`` after 5."""
    monkeypatch.setattr(tensor_files, "PIECE_BYTES", 48)
    for name, steps in (("last.ckpt", 7), ("other.ckpt", 5)):
        weights = {"encoder.a": torch.randn(6, 3), "backbone.a": torch.randn(4, 3).bfloat16(), "head.b": torch.ones(2)}
        state = {name: {"step": torch.tensor(float(steps)), "exp_avg": torch.randn(6, 3)} for name in weights}
        optimizer = {"state": state, "param_groups": [{"lr": 0.1, "params": list(weights)}]}
        saved_alone(
            tmp_path / name,
            alone,
            global_step=steps,
            state_dict=weights,
            optimizer_states=[optimizer],
            milestones=Counter([steps]),
        )
    return tmp_path


def test_of_200_damaged_checkpoints_none_loads(kept, tmp_path, alone):
    bench = Bench.of(kept / "last.ckpt", kept / "other.ckpt", tmp_path / "bench", alone)
    became = Counter(bench.trial(seed) for seed in range(200))
    assert became["refused"] >= 195, became


@pytest.mark.full
def test_of_those_that_runs_of_many_ranks_saved_none_loads_either(tmp_path):
    for bench in benches(tmp_path):
        assert {bench.trial(seed) for seed in range(100)} <= {"refused", "read as it was"}


def test_the_error_names_file_and_tensor(kept):
    file = kept / "last.ckpt" / "encoder" / "rank-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(DamagedCheckpointError, match=r"is damaged: \S+encoder.a\S*\[4,0\] is not what was") as raised:
        read_checkpoint(kept / "last.ckpt")
    assert str(raised.value).startswith(str(file))


def test_who_does_not_read_the_damaged_part_may_go_on(kept):
    for file in (kept / "last.ckpt" / "encoder").glob("*.safetensors"):
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    assert "head.b" in read_checkpoint(kept / "last.ckpt", lambda name: name.startswith("head."))["state_dict"]
    with pytest.raises(DamagedCheckpointError):
        read_checkpoint(kept / "last.ckpt", lambda name: name.startswith("encoder."))


def test_what_is_no_part_of_a_checkpoint_changes_nothing(kept):
    path = kept / "last.ckpt"
    whole = read_checkpoint(path)
    (path / "README.txt").write_text("of the best run")
    (path / "encoder" / ".nfs0001").touch()
    for file in files_of(path):
        os.utime(file, (0, 0))
        file.chmod(0o400)
    assert same(read_checkpoint(path.rename(kept / "best.ckpt")), whole)


def test_what_is_damaged_in_another_way_is_told_apart(kept):
    def said():
        with pytest.raises(DamagedCheckpointError) as raised:
            read_checkpoint(kept / "last.ckpt")
        return str(raised.value)

    rewrite_index(kept / "last.ckpt", lambda index: index["tensors"]["weights.encoder.a"]["pieces"].clear())
    assert "the pieces of weights.encoder.a (6, 3) are not the whole of it, each number once." in said()
    (kept / "last.ckpt" / "objects.pt").unlink()
    assert said().startswith(f"{kept / 'last.ckpt' / 'objects.pt'} is missing.")
    (kept / "last.ckpt" / "index.json").write_text("{}")
    assert "index.json does not begin as the index of a checkpoint does." in said()


# ---- the checkpoint before it ---------------------------------------------------------------------------------------


def offered(path):
    (path / "objects.pt").unlink()
    with pytest.raises(DamagedCheckpointError) as raised:
        read_checkpoint(path)
    return str(raised.value)


def test_the_newest_one_before_it_is_offered(kept, alone):
    saved_alone(kept / "older.ckpt", alone, global_step=3)
    saved_alone(kept / "newer.ckpt", alone, global_step=9)
    saved_alone(kept / ".last.ckpt.partial-host-1-1-0", alone, global_step=6)
    (kept / "lightning_logs").mkdir()
    (kept / "link.ckpt").symlink_to("last.ckpt")
    advice = f"The checkpoint before it that has all its files is {kept / 'other.ckpt'}: pass that as ckpt_path."
    assert offered(kept / "last.ckpt").endswith(advice)


def test_one_that_lacks_a_file_or_a_part_of_one_is_not_offered(kept):
    file = files_of(kept / "other.ckpt")[-1]
    file.write_bytes(file.read_bytes()[:-1])
    assert offered(kept / "last.ckpt").endswith(
        "No other checkpoint in that folder has all its files: copy it there again from where it is whole."
    )
