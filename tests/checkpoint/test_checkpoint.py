"""A checkpoint directory: what is in it, what a kill leaves, what is refused."""

from __future__ import annotations

import shutil
import warnings
from collections import Counter
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO
from safetensors import safe_open

from flowtrain_lightning.allocator import default_allocation
from flowtrain_lightning.checkpoint import load_checkpoint, read_checkpoint, save_checkpoint
from flowtrain_lightning.checkpoint.index_file import FORMAT
from tests.checkpoint.conftest import saved_alone
from tests.checkpoint.index_edits import read_text, write_text
from tests.checkpoint.saving import MOMENTS, NothingHeld
from tests.checkpoint.test_resume import same
from tests.forks import Job, run_jobs

SAVE = "tests.checkpoint.saving:save"
ENCODER = ("before its half", "in the middle of its half")
DEATHS = [(moment, 0) for moment in MOMENTS if not moment.startswith("nowhere")] + [(moment, 1) for moment in ENCODER]


def value_in(checkpoint):
    """The one number of which a checkpoint is full; an AssertionError if it holds several."""
    weights, (optimizer,) = checkpoint["state_dict"], checkpoint["optimizer_states"]
    found = {float(weights[name].mean()) for name in ("encoder.a", "backbone.a", "head.b")}
    found |= {weights[name]["value"] for name in ("encoder.a.extra_state", "backbone.a.extra_state")}
    found |= {
        float(entry) for state in optimizer["state"].values() for entry in (state["step"], state["exp_avg"][0, 0])
    }
    found |= {float(checkpoint["epoch"]), float(weights["calls"]), optimizer["param_groups"][0]["lr"]}
    assert len(optimizer["state"]) == 3
    (value,) = found
    return value


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder in which two ranks saved ``last.ckpt``, full of 1."""
    folder = tmp_path_factory.mktemp("directory")
    run_jobs(folder, [Job("saving", SAVE, 2, {"paths": [str(folder / "last.ckpt")], "value": 1})])["saving"].check()
    return folder


@pytest.fixture
def directory(saved, tmp_path):
    """A copy of ``last.ckpt`` to spoil."""
    return Path(shutil.copytree(saved / "last.ckpt", tmp_path / "last.ckpt"))


@pytest.fixture(scope="module")
def killed(saved, tmp_path_factory):
    """For each moment: the folder in which ``last.ckpt`` was to be replaced, as the kill left it."""
    folders, jobs = {}, []
    root = tmp_path_factory.mktemp("killed")
    for moment, victim in [*DEATHS, ("nowhere, without exchange", 0)]:
        folder = root / f"{moment} of rank {victim}"
        shutil.copytree(saved / "last.ckpt", folder / "last.ckpt")
        arguments = {"paths": [str(folder / "last.ckpt")], "value": 2, "moment": moment, "victim": victim}
        jobs.append(Job(folder.name, SAVE, 2, arguments))
        folders[moment, victim] = folder
    done = run_jobs(root / "jobs", jobs)
    left = {key: shutil.copytree(folder, root / "left" / folder.name) for key, folder in folders.items()}
    again = {"paths": [str(folder / "last.ckpt") for folder in folders.values()], "value": 3}
    run_jobs(root / "jobs", [Job("again", SAVE, 2, again)])["again"].check()
    return {key: (done[folder.name], left[key], folder) for key, folder in folders.items()}


# ---- contents -------------------------------------------------------------------------------------------------------


def test_a_directory_has_a_folder_per_role_and_is_read_back_as_it_was(saved):
    found = sorted(str(path.relative_to(saved / "last.ckpt")) for path in (saved / "last.ckpt").rglob("*"))
    files = ["backbone/rank-00000.safetensors", "encoder/rank-00001.safetensors"]
    assert found == sorted(["index.json", "random_states.json", "backbone", "encoder", *files])
    checkpoint = read_checkpoint(saved / "last.ckpt")
    assert value_in(checkpoint) == 1
    assert checkpoint["state_dict"]["encoder.a"].dtype == torch.float64
    state = checkpoint["optimizer_states"][0]["state"]["head.b"]
    assert state["exp_avg"].dtype == torch.bfloat16
    assert state["step"].shape == ()
    assert state["buffer"] is None
    assert checkpoint["optimizer_states"][0]["param_groups"][1] == {"lr": 0.1, "params": ["head.b"]}
    assert checkpoint["flowtrain"]["ranks"] == {"encoder": [1], "backbone": [0]}


def test_each_tensor_lies_in_the_folder_of_its_role_under_its_name(saved):
    with safe_open(saved / "last.ckpt/encoder/rank-00001.safetensors", "pt") as file:
        names = {"weights.encoder.a[0,0]", "optimizer.0.encoder.a#step[]", "optimizer.0.encoder.a#exp_avg[0,0]"}
        assert set(file.keys()) == names
        assert torch.equal(file.get_tensor("weights.encoder.a[0,0]"), torch.ones(3, 2, dtype=torch.float64))


def test_a_part_can_be_read_alone(saved):
    checkpoint = read_checkpoint(saved / "last.ckpt", lambda name: name.startswith("head."), optimizers=False)
    assert set(checkpoint["state_dict"]) == {"head.b", "calls"}
    assert "optimizer_states" not in checkpoint


# ---- kills ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("moment", "victim"), DEATHS)
def test_a_kill_leaves_the_former_or_the_new_checkpoint_whole(killed, moment, victim):
    done, left, _ = killed[moment, victim]
    assert done.codes[victim] == -9, done.log
    between = moment == "without exchange, between the steps"
    renamed = moment in (
        "after the exchange",
        "in the middle of the removal",
        "without exchange, after the second step",
    )
    assert (left / "last.ckpt").exists() != between
    assert value_in(read_checkpoint(left / ("last.former.ckpt" if between else "last.ckpt"))) == 1 + renamed


@pytest.mark.parametrize(("moment", "victim"), DEATHS)
def test_the_next_save_removes_what_the_kill_left(killed, moment, victim):
    _, left, folder = killed[moment, victim]
    assert len(list(left.iterdir())) > 1
    assert [path.name for path in folder.iterdir()] == ["last.ckpt"]
    assert value_in(read_checkpoint(folder / "last.ckpt")) == 3


def test_a_directory_is_replaced_where_the_file_system_cannot_exchange_names(killed):
    _, left, _ = killed["nowhere, without exchange", 0]
    assert [path.name for path in left.iterdir()] == ["last.ckpt"]
    assert value_in(read_checkpoint(left / "last.ckpt")) == 2


# ---- what is refused ------------------------------------------------------------------------------------------------


def test_what_json_cannot_hold_comes_back_as_it_was_from_a_file_of_its_own(tmp_path, alone):
    rest = {"loops": {1: (0.5, None)}, "data_folder": tmp_path, "best": torch.tensor(0.25)}
    objects = {"milestones": Counter([2, 2]), "average": {"weight": torch.ones(20_000)}}
    path = saved_alone(tmp_path / "last.ckpt", alone, **rest, **objects)
    assert torch.load(path / "objects.pt", weights_only=True).keys() == objects.keys()
    checkpoint = read_checkpoint(path)
    for key, value in {**rest, **objects}.items():
        assert type(checkpoint[key]) is type(value)
        assert same(checkpoint[key], value)


def test_without_such_values_there_is_no_pickle(saved):
    assert {path.suffix for path in (saved / "last.ckpt").rglob("*") if path.is_file()} == {".json", ".safetensors"}


def test_objects_are_reported_on_saving_and_refused_unless_the_user_trusts_them(tmp_path, alone):
    with pytest.warns(UserWarning, match=r"no tensors or plain data: fractions\.Fraction.*weights_only=False must be"):
        path = saved_alone(tmp_path / "last.ckpt", alone, hyper_parameters={"share": Fraction(1, 3)})
    with pytest.raises(
        ValueError, match=r"objects.pt holds objects that .*\(fractions\.Fraction\).*Pass weights_only=F"
    ):
        read_checkpoint(path)
    assert read_checkpoint(path, weights_only=False)["hyper_parameters"] == {"share": Fraction(1, 3)}


def test_another_format_is_refused(directory):
    write_text(directory, read_text(directory), FORMAT + 1)
    with pytest.raises(ValueError, match=f"has format {FORMAT + 1}, but .* reads format {FORMAT}. Use the version"):
        read_checkpoint(directory)


def test_another_directory_is_refused(directory):
    with pytest.raises(
        ValueError, match=r"is a directory without flowtrain's index\.json: no checkpoint\. Give another"
    ):
        read_checkpoint(directory / "encoder")


def test_a_resume_with_another_seed_or_layout_says_what_that_means(saved, alone, monkeypatch, caplog):
    monkeypatch.setenv("PL_GLOBAL_SEED", "9")
    arguments = (saved / "last.ckpt", NothingHeld(), default_allocation(1), alone, TorchCheckpointIO())
    with (
        caplog.at_level("INFO"),
        pytest.warns(UserWarning, match=r"seed 0, but this run has 9: .*seed_everything\(0\)"),
    ):
        assert value_in(load_checkpoint(*arguments)) == 1
    assert "was saved on another allocation (separate: encoder on rank 1 (" in caplog.text
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_checkpoint(*arguments, resumes=False)


def test_a_url_is_refused_on_every_rank_before_anything_is_written(alone):
    with pytest.raises(ValueError, match=r"'s3://bucket/last\.ckpt' is a URL, .* Give a plain path"):
        save_checkpoint({}, "s3://bucket/last.ckpt", {}, default_allocation(1), alone)
