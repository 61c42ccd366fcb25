"""Every command that a text tells to install by works from a clone, without an index that has this package."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import metadata

import pytest

from tests.paths import ROOT

EXTRAS = set(metadata("flowtrain-lightning").get_all("Provides-Extra") or ())
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("recipes/*/README.md")]
CODE = [*(ROOT / "flowtrain_lightning").rglob("*.py"), *(ROOT / "recipes").rglob("*.py")]


def test_pages_install_what_lies_beside_them_and_extras_that_there_are():
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert "pip install flowtrain" not in text, f"{page} names what is on no index"
        for extras in re.findall(r'pip install -e "\.\[(.*?)\]"', text):
            assert set(extras.split(",")) <= EXTRAS, f"{page} installs {extras}"


def test_messages_name_extras_that_there_are_in_quotes_that_every_shell_needs():
    found = [match for file in CODE for match in re.findall(r"(.)flowtrain-lightning\[(.*?)\]", file.read_text())]
    assert len(found) > 10
    assert {quote for quote, _ in found} <= {"'", '"'}
    assert {extra for _, extra in found} - {"{extra}"} <= EXTRAS


@pytest.mark.full
@pytest.mark.parametrize("command", ["-e .[cli,data,transformers]", "flowtrain-lightning[plot]"])
def test_pip_finds_all_of_it_beside_the_clone(command):
    offline = ["--dry-run", "--no-index", "--no-build-isolation"]
    install = [sys.executable, "-m", "pip", "install", *command.split(), *offline]
    subprocess.run(install, cwd=ROOT, check=True, timeout=600)
