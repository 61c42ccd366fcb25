"""On a Mac one plans, packs and debugs: the package is there, `auto` trains, and flowtrain says that it needs Linux."""

import os
import subprocess
import sys

import pytest

from tests.paths import python_path

pytestmark = pytest.mark.full  # two fresh interpreters

WITHOUT_LINUX = """
import fcntl, mmap, multiprocessing, os, select, signal, socket, sys, types

names = {fcntl: "F_SEAL_", mmap: "MAP_POPULATE", signal: "pidfd_send_signal", select: ("EPOLL", "epoll"),
         os: ("EFD_", "MFD_", "eventfd", "memfd_create", "pidfd_open", "sched_"),
         socket: ("SO_PEERCRED", "MSG_CMSG_CLOEXEC")}
for module, begins in names.items():
    for name in [name for name in dir(module) if name.startswith(begins)]:
        delattr(module, name)
"""
"""Takes away what is there on Linux alone."""

PROGRAM = """
if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")  # as on a Mac
    from pathlib import Path
    import lightning as L
    from flowtrain_lightning.cli import main
    from flowtrain_lightning.trainer import refusals
    from tests.tiny import TinyVLM, tiny_data, write_records

    for arguments in (["plan", "--model", "qwen2-vl-2b", "--devices", "8"], ["doctor"]):
        sys.argv[1:] = arguments
        main()
        print("ended", *arguments)
    folder = Path.cwd()
    write_records(folder, 16)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = L.Trainer(strategy="auto", accelerator="cpu", devices=1, max_steps=2, **quiet)
    trainer.fit(TinyVLM(), tiny_data(folder, num_workers=1))
    print("loss", float(trainer.callback_metrics["train_loss"]))
    refusals.platform = types.SimpleNamespace(system=lambda: "Darwin")
    L.Trainer(strategy="flowtrain", accelerator="cpu", devices=2)
"""


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """The program when it has ended; a fresh interpreter, since imports are part of what is tried."""
    folder = tmp_path_factory.mktemp("elsewhere")
    (folder / "program.py").write_text(WITHOUT_LINUX + PROGRAM)
    environment = {**os.environ, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "program.py"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, env=environment)


@pytest.mark.parametrize("command", ["plan", "doctor"])
def test_a_command_works(ended, command):
    assert f"\nended {command}" in ended.stdout, ended.stderr


def test_auto_trains_and_flowtrain_says_that_it_needs_linux(ended):
    assert "loss " in ended.stdout, ended.stderr
    assert ended.returncode == 1
    assert "only Linux has, and this is Darwin. Debug here with strategy='auto'" in ended.stderr.splitlines()[-1]
