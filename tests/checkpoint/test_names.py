"""A finished file or directory takes its name, and loses it, in one step."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from flowtrain_lightning.checkpoint.names import remove, take_name, temporary_name

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


def test_leftovers_of_the_same_name_and_of_dead_processes_are_removed_and_nothing_else(tmp_path, dead):
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
