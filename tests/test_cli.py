"""The command ``flowtrain``."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from flowtrain_lightning.cli import COMMANDS, main


@pytest.fixture
def flowtrain(monkeypatch):
    """Runs a command line in this process."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["flowtrain", *arguments])
        main()

    return run


def test_the_installed_command_lists_every_command():
    installed = Path(sys.executable).with_name("flowtrain")
    done = subprocess.run([installed], capture_output=True, text=True, timeout=60, check=True)
    for command in ("fit", "validate", "test", "predict", "export", "doctor"):
        assert f"\n  {command} " in done.stdout
    assert "flowtrain fit --config config.yaml" in done.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command, flowtrain, capsys):
    with pytest.raises(SystemExit) as end:
        flowtrain(command, "--help")
    assert end.value.code == 0
    assert "usage: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["fitt"], "there is no command 'fitt'. Did you mean 'fit'? Choose from fit, validate, "),
        (["dance"], "there is no command 'dance'. Choose from fit, validate, "),
        (["export", "nowhere", "out.ckpt"], "flowtrain export: nowhere is no checkpoint directory."),
        (["export", "/", __file__], "exists; choose another name."),
        (["export", "/", "/nowhere/out.ckpt"], "there is no folder /nowhere to write out.ckpt into."),
    ],
)
def test_a_mistake_ends_with_a_sentence(arguments, words, flowtrain):
    with pytest.raises(SystemExit) as end:
        flowtrain(*arguments)
    assert words in str(end.value.code)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["export", "only-one"], "the following arguments are required: out.ckpt"),
        (["doctor", "--fast"], "unrecognized arguments: --fast"),
        (["fit", "--config", "nowhere.yaml"], "nowhere.yaml"),
    ],
)
def test_wrong_options_end_with_what_is_wrong_with_them(arguments, words, flowtrain, capsys):
    with pytest.raises(SystemExit) as end:
        flowtrain(*arguments)
    assert end.value.code == 2
    printed = capsys.readouterr().err
    assert words in printed
    assert len(printed.splitlines()) <= 3


def test_doctor_says_of_everything_whether_it_is_there_and_what_it_means(flowtrain, capsys):
    flowtrain("doctor")
    lines = capsys.readouterr().out.splitlines()
    assert all(re.match(r"\S.* +(ok|absent) +\S", line) for line in lines)
    names = {re.split(r" {2,}", line)[0] for line in lines}
    assert {"python", "torch", "lightning", "processor", "threads", "CUDA", "gloo", "memfd", "pidfd"} <= names
    assert {"abstract sockets", "descriptor passing", "flash-attn", "varlen_attn", "SDPA"} <= names
