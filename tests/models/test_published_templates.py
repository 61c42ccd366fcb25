"""The command that compares words with a published processor's, on folders: equal, different, and out of reach."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from tests.models import published_templates
from tests.models.both_processors import Both
from tests.models.processors import PUBLISHED


@pytest.fixture
def compare(monkeypatch, capsys):
    """Runs the command; answers with its exit code and what it printed."""

    def run(*names):
        monkeypatch.setattr(sys, "argv", ["published_templates", *map(str, names)])
        return published_templates.main(), capsys.readouterr().out

    return run


def saved(folder: Path, family: str) -> Path:
    """A folder with all that belongs to a processor, as a model is published in."""
    PUBLISHED[family].save(folder).save_pretrained(folder)
    return folder


def test_every_folder_is_compared_with_its_own_processor(compare, tmp_path):
    folders = [saved(tmp_path / family, family) for family in ("gemma3", "llava")]
    code, text = compare(*folders)
    equal = "8 conversations and their prompts are, token for token, its processor's"
    assert text.splitlines() == [f"{folder}: {equal}" for folder in folders]
    assert code == 0


def test_what_differs_is_told_with_its_tokens(compare, tmp_path, monkeypatch):
    plain = Both.expected

    def with_one_more(both, record, **settings):
        found = plain(both, record, **settings)
        if record.turns[0].text == "" and not settings["prompt"]:
            found["input_ids"][2] += 1
        return found

    monkeypatch.setattr(Both, "expected", with_one_more)
    code, text = compare(saved(tmp_path, "llava"))
    assert text.startswith(f"{tmp_path}: 'empty turns' differs at token 2: [")
    assert len(text.splitlines()) == 1
    assert code == 1


def test_a_hub_that_cannot_be_reached_and_a_name_that_is_none_are_told(compare, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    code, text = compare("nobody/nothing", tmp_path)
    out_of_reach, empty = text.splitlines()
    assert out_of_reach.startswith("nobody/nothing: not compared: the Hugging Face Hub cannot be reached")
    assert empty.startswith(f"{tmp_path}: not compared: its processor cannot be opened here")
    assert code == 1
