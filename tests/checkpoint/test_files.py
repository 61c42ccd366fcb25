"""A finished file or directory takes its name, and loses it, in one step."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flowtrain_lightning.checkpoint import read_checkpoint
from flowtrain_lightning.checkpoint.files import remove, take_name, temporary_name, written_together
from flowtrain_lightning.parallel.ranks.cross_group import CrossGroup
from tests.checkpoint.conftest import seen_by
from tests.checkpoint.training import STEPS
from tests.forks import Job, read_down, run_jobs

HOST = socket.gethostname()
SPACE = os.stat("/proc/self/ns/pid").st_ino
HERE = f"{HOST}-{SPACE}"


def make(path, text, directory=True):
    if directory:
        (path / "inner").mkdir(parents=True)
        (path / "inner/text").write_text(text)
    else:
        path.write_text(text)
    return path


def content(path):
    return (path / "inner/text" if path.is_dir() else path).read_text()


@pytest.fixture
def dead():
    """The number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@pytest.mark.parametrize("new", [True, False])
@pytest.mark.parametrize("former", [True, False, None])
def test_a_file_or_directory_replaces_whatever_has_the_name(tmp_path, new, former):
    path = tmp_path / "last.ckpt"
    if former is not None:
        make(path, "former", former)
    take_name(make(temporary_name(path), "new", new), path)
    assert content(path) == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_is_replaced_and_its_target_stays(tmp_path):
    target, path = make(tmp_path / "step=1.ckpt", "target"), tmp_path / "last.ckpt"
    path.symlink_to(target.name)
    take_name(make(temporary_name(path), "new"), path)
    assert content(path) == "new"
    assert not path.is_symlink()
    assert content(target) == "target"


def test_a_link_that_leads_nowhere_is_replaced(tmp_path):
    path = tmp_path / "last.ckpt"
    path.symlink_to("gone.ckpt")
    take_name(make(temporary_name(path), "new"), path)
    assert content(path) == "new"


def test_only_leftovers_of_the_same_name_and_of_dead_processes_are_removed(tmp_path, dead):
    gone = [f".last.ckpt.partial-elsewhere-1-{os.getppid()}-0", f".other.ckpt.partial-{HERE}-{dead}-3"]
    kept = [f".other.ckpt.partial-{HERE}-{os.getppid()}-0", f".other.ckpt.partial-elsewhere-{SPACE}-{dead}-3"]
    kept += [f".other.ckpt.partial-{HOST}-{SPACE + 1}-{process}-3" for process in (dead, os.getpid())]  # in a container
    kept += [".hidden", ".last.ckpt.partial", "x.partial-host-1-1-0", "[0].ckpt", ".last.ckpt.partial-host-1-12-x"]
    kept += ["last.ckpt"]
    for name in (*gone, *kept):
        make(tmp_path / name, name)
    temporary_name(tmp_path / "last.ckpt")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(kept)


def test_removing_takes_files_links_and_directories_and_is_content_with_none(tmp_path):
    target = make(tmp_path / "target.ckpt", "target")
    (tmp_path / "link.ckpt").symlink_to(target)
    for path in (make(tmp_path / "a.ckpt", "a"), make(tmp_path / "b.ckpt", "b", False), tmp_path / "link.ckpt"):
        remove(path)
    remove(tmp_path / "none.ckpt")
    assert list(tmp_path.iterdir()) == [target]


def test_removing_takes_the_name_first(tmp_path, monkeypatch):
    path = make(tmp_path / "last.ckpt", "text")

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("shutil.rmtree", interrupted)
    with pytest.raises(KeyboardInterrupt):
        remove(path)
    assert not path.exists()


def test_all_ranks_name_those_that_do_not_see_the_folder_and_nothing_is_left_in_it(tmp_path):
    job = Job("blind", "tests.checkpoint.saving:save_where_rank_1_is_blind", 2)
    done = run_jobs(tmp_path, [job])["blind"].check()
    kept = done.folder / "kept"
    for rank in range(2):
        said = (done.folder / f"said{rank}.txt").read_text()
        assert said.startswith(f"Rank 1 cannot see what rank 0 writes into {kept}, ")
        assert "Trainer(default_root_dir=...)" in said
    assert [path.name for path in kept.iterdir()] == ["last.ckpt"]
    assert (kept / "last.ckpt" / "index.json").is_file()


@pytest.mark.parametrize(("victim", "most_bytes"), [(0, 0), (1, 100), (0, 300)])
def test_all_ranks_name_the_one_without_room_and_a_later_save_succeeds(tmp_path, victim, most_bytes):
    arguments = {"victim": victim, "most_bytes": most_bytes}
    job = Job("full", "tests.checkpoint.saving:save_where_no_room_is_left", 2, arguments)
    done = run_jobs(tmp_path, [job])["full"].check()
    path = done.folder / "kept" / "last.ckpt"
    for seen in read_down(done.folder):
        assert seen["told"].startswith(f"The checkpoint {path} was not saved; rank {victim} could not write its part: ")
        assert f" MB are free in {path.parent}). Nothing is left of it, and earlier checkpoints" in seen["told"]
        assert (
            'ModelCheckpoint(dirpath=...)), and go on from the one before: fit(..., ckpt_path="last").' in seen["told"]
        )
        assert (seen["left"], seen["kept"]) == (["last.ckpt"], 1)
    assert read_checkpoint(path)["epoch"] == 3


def test_an_error_that_is_not_about_writing_waits_for_nobody(tmp_path):
    nobody: Any = None  # whom it would have to ask
    with (
        pytest.raises(RuntimeError, match="DataLoader worker"),
        written_together(tmp_path, nobody),
    ):
        raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed.")


def test_an_error_of_the_system_is_about_writing_whatever_it_says(tmp_path):
    cross = CrossGroup(dist.HashStore(), 0, 1, timedelta(seconds=5))
    with (
        pytest.raises(OSError, match=r"was not saved; rank 0 could not write its part: of no errno \("),
        written_together(tmp_path / "last.ckpt", cross),
    ):
        raise OSError("of no errno")


@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.full)])
def test_a_run_ends_with_that_sentence_and_goes_on_from_the_checkpoint_before(runs, rank):
    ended = runs.job(f"full on rank {rank}", "train_until_the_disk_is_full", 2, rank=rank)
    assert ended.codes == [1, 1], ended.log
    assert [path.name for path in (ended.folder / "kept").iterdir()] == ["last.ckpt"]
    assert {path.suffix for path in ended.folder.glob("fault-*")} == {".txt"}
    for file in ended.folder.glob("fault-*"):
        assert f"last.ckpt was not saved; rank {rank} could not write its part: " in file.read_text()
    assert read_checkpoint(ended.folder / "kept" / "last.ckpt")["global_step"] == 2
    went_on = runs.job(f"after full on rank {rank}", "go_on_after_fault", 2, killed=str(ended.folder)).check()
    straight = seen_by(runs.straight("adamw", "1+1"))
    assert list(seen_by(went_on.folder)["steps"]) == list(range(3, STEPS + 1))
    for name, weight in seen_by(went_on.folder)["weights"].items():
        assert torch.equal(weight, straight["weights"][name])
