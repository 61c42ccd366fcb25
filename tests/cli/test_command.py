"""The command ``flowtrain``."""

from __future__ import annotations

import errno
import json
import re
import subprocess
import sys
from contextlib import redirect_stdout
from importlib.metadata import version
from pathlib import Path

import pyarrow.parquet
import pytest
import torch

from flowtrain_lightning.cli import doctor_command, main
from flowtrain_lightning.cli.command_table import COMMANDS

TOKENIZER = Path(__file__).parents[2] / "recipes/quickstart/tokenizer.json"

MODULE = """
import torch
from flowtrain_lightning import FlowModule

class Bigrams(FlowModule):
    def __init__(self, vocabulary: int):
        super().__init__()
        self.vocabulary = vocabulary

    def configure_encoder(self):
        self.encoder = torch.nn.Linear(4, self.vocabulary)

    def configure_backbone(self):
        self.backbone = torch.nn.Embedding(self.vocabulary, self.vocabulary)

    def merge(self, batch, features):
        return {"input": batch.tokens}

    def loss(self, outputs, batch):
        loss = torch.nn.functional.cross_entropy(outputs, batch.labels, reduction="sum")
        return loss, int((batch.labels >= 0).sum())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())
"""

CONFIG = """
model: {class_path: bigrams.Bigrams, init_args: {vocabulary: 1024}}
data: {train: train.jsonl, tokenizer: TOKENIZER, token_budget: 64, global_batch_size: 2}
trainer: {accelerator: cpu, devices: 1, strategy: auto, max_epochs: 1, enable_progress_bar: false, logger: false}
"""


@pytest.fixture
def flowtrain(monkeypatch):
    """Runs a command line in this process."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["flowtrain", *arguments])
        main()

    return run


def test_the_installed_command_lists_every_command():
    installed = Path(sys.executable).with_name("flowtrain")
    done = subprocess.run([installed], capture_output=True, text=True, timeout=300, check=True)
    for name in ("fit", "validate", "test", "predict", "export", "doctor"):
        assert f"\n  {name} " in done.stdout
    assert "flowtrain fit --config config.yaml" in done.stdout


def test_the_command_says_its_version(flowtrain, capsys):
    flowtrain("--version")
    assert capsys.readouterr().out == f"flowtrain-lightning {version('flowtrain-lightning')}\n"


LIGHT = [
    "--help",
    "plan --help",
    "pack --help",
    "simulate --help",
    "export --help",
    "plan --model smolvlm-2.2b --devices 2 --json",
    "pack lengths.parquet --token-budget 64 --ranks 1 --global-batch-size 2 --out p",
]
RUN_ALL = """
import sys
from flowtrain_lightning.cli import main
for command in sys.argv[1:]:
    sys.argv = ["flowtrain", *command.split()]
    try:
        main()
    except SystemExit as end:
        assert not end.code, (command, end.code)
    heavy = sorted({name.partition(".")[0] for name in sys.modules} & {"torch", "lightning"})
    assert not heavy, f"{command} imports {heavy}"
"""


def test_planning_and_packing_import_neither_torch_nor_lightning(tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"tokens": [20, 30]}), tmp_path / "lengths.parquet")
    subprocess.run([sys.executable, "-c", RUN_ALL, *LIGHT], cwd=tmp_path, timeout=600, check=True)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(name, flowtrain, capsys):
    with pytest.raises(SystemExit) as end:
        flowtrain(name, "--help")
    assert end.value.code == 0
    said = capsys.readouterr().out
    assert "usage: " in said
    assert COMMANDS[name].module != "train_command" or said.startswith("An example")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["fitt"], "there is no command 'fitt'. Did you mean 'fit'? Choose from fit, validate, "),
        (["dance"], "there is no command 'dance'. Choose from fit, validate, "),
        (
            ["export", "nowhere", "out.ckpt"],
            "flowtrain export: There is no nowhere; give the path of a checkpoint directory",
        ),
        (["export", __file__, "out.ckpt"], "is a file, but flowtrain's checkpoints are directories."),
        (["export", "/", __file__], "exists; choose another name."),
        (["export", "/", "out.ckpt"], "flowtrain export: / is a directory without"),
    ],
)
def test_a_mistake_ends_with_a_sentence(arguments, words, flowtrain):
    with pytest.raises(SystemExit) as end:
        flowtrain(*arguments)
    assert words in str(end.value.code)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), 1),  # `flowtrain doctor | head -1`
        (KeyboardInterrupt(), 130),
        (
            OSError(errno.ENOSPC, "No space left on device"),
            "flowtrain doctor: what it prints cannot be read or written: No space left on device.",
        ),
        (
            PermissionError(errno.EACCES, "Permission denied", "plan.yaml"),
            "flowtrain doctor: plan.yaml cannot be read or written: Permission denied.",
        ),
    ],
)
def test_what_interrupts_a_command_shows_no_traceback(error, code, flowtrain, tmp_path, monkeypatch):
    def interrupted():
        raise error

    monkeypatch.setattr(doctor_command, "examine", interrupted)
    with (
        open(tmp_path / "printed", "w") as terminal,
        redirect_stdout(terminal),
        pytest.raises(SystemExit) as end,
    ):
        flowtrain("doctor")
    assert end.value.code == code


def test_letters_that_a_terminal_does_not_know_become_question_marks(flowtrain, tmp_path, monkeypatch):
    monkeypatch.setattr(doctor_command, "examine", lambda: ["1, 2 … devices"])
    with open(tmp_path / "printed", "w", encoding="ascii") as terminal, redirect_stdout(terminal):
        flowtrain("doctor")
    assert (tmp_path / "printed").read_text() == "1, 2 ? devices\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["export", "only-one"], "the following arguments are required: out"),
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


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A user's folder, and the current one: a module, its configuration and four records."""
    (tmp_path / "bigrams.py").write_text(MODULE)
    (tmp_path / "config.yaml").write_text(CONFIG.replace("TOKENIZER", str(TOKENIZER)))
    turns = [{"role": "user", "content": "What flies?"}, {"role": "assistant", "content": "A bird."}]
    (tmp_path / "train.jsonl").write_text(4 * (json.dumps({"images": [], "messages": turns}) + "\n"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


def test_fit_trains_a_module_of_the_current_folder_as_the_yaml_says(project, flowtrain):
    flowtrain("fit", "--config", "config.yaml")
    (checkpoint,) = project.glob("checkpoints/*.ckpt")
    assert torch.load(checkpoint, weights_only=True)["global_step"] == 2


def test_data_that_cannot_be_used_end_with_a_sentence(project, flowtrain):
    with pytest.raises(SystemExit, match=r"flowtrain fit: .*token"):
        flowtrain("fit", "--config", "config.yaml", "--data.token_budget", "8")
