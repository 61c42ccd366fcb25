"""The page on compatibility names everything that Lightning and PyTorch offer, and only tests that exist."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch import callbacks

from flowtrain_lightning.trainer.callback_refusals import REFUSED_CALLBACKS
from flowtrain_lightning.trainer.refusals import PRECISIONS

PAGE = (Path(__file__).parents[2] / "docs" / "compatibility.md").read_text()
QUOTED = set(re.findall(r"`([^`]+)`", PAGE))

ARGUMENTS = [name for name in inspect.signature(L.Trainer.__init__).parameters if name != "self"]
OPTIMIZERS = [
    name
    for name, found in vars(torch.optim).items()
    if isinstance(found, type) and issubclass(found, torch.optim.Optimizer) and found is not torch.optim.Optimizer
]


@pytest.mark.parametrize("name", ARGUMENTS)
def test_every_argument_of_the_trainer_has_a_row(name):
    assert re.search(rf"^\| `{name}` \| \S.* \|.*\|$", PAGE, re.MULTILINE)


@pytest.mark.parametrize("name", callbacks.__all__)
def test_every_built_in_callback_has_a_row(name):
    assert re.search(rf"^\| .*`{name}`.* \| (work|refused)", PAGE, re.MULTILINE)


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_every_optimizer_has_a_row(name):
    assert re.search(rf"^\| .*`{name}`.* \| (work|refused)", PAGE, re.MULTILINE)


def test_what_the_code_refuses_is_refused_on_the_page():
    for callback in REFUSED_CALLBACKS:
        assert re.search(rf"^\| .*`{callback.__name__}`.* \| refused", PAGE, re.MULTILINE)
    assert {f'"{precision}"' for precision in PRECISIONS} <= QUOTED


def test_every_test_that_the_page_names_exists():
    files = Path(__file__).parents[1].rglob("test_*.py")
    there = {name for file in files for name in re.findall(r"^def (test_\w+)", file.read_text(), re.MULTILINE)}
    named = {name for name in QUOTED if name.startswith("test_")}
    assert len(named) > 30
    assert named <= there
