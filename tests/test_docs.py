"""Links between the pages of the documentation lead somewhere, tests that pages name exist, pictures are up to date."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import flowtrain_lightning as flow
from docs.draw import pictures
from tests.test_architecture import ROOMS

ROOT = Path(__file__).parents[1]
PAGES = {str(page.relative_to(ROOT)): page for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]}
TESTS = "\n".join(file.read_text(encoding="utf-8") for file in (ROOT / "tests").rglob("test_*.py"))


def prose(page: Path) -> str:
    """The page without its code."""
    return re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)


def anchors(page: Path) -> set[str]:
    """What its headings may be called in a link."""
    titles = re.findall(r"^#+ (.*)$", prose(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("name", PAGES)
def test_every_link_leads_somewhere(name):
    page = PAGES[name]
    for link in re.findall(r"\]\(([^):]+)\)", prose(page)):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("name", PAGES)
def test_every_test_that_is_named_exists(name):
    for test in re.findall(r"`(test_\w+)`", prose(PAGES[name])):
        assert f"def {test}(" in TESTS or test == "test_loss", test  # the loss that `test` logs


@pytest.mark.parametrize("name", PAGES)
def test_every_file_of_code_that_is_named_exists(name):
    for path in re.findall(r"`(\w+/[\w/]+\.py)`", prose(PAGES[name])):
        assert (ROOT / path).is_file() or (ROOT / "flowtrain_lightning" / path).is_file(), path


def test_the_pictures_of_the_architecture_are_what_the_script_draws_from_the_code():
    for name, drawn in pictures().items():
        written = (ROOT / "docs" / name).read_text(encoding="utf-8")
        assert written == drawn, f"{name} is out of date: run `python docs/draw.py`"


def test_every_room_has_its_line_on_the_page_about_architecture():
    page = prose(PAGES["docs/architecture.md"])
    assert [room for room in ROOMS if f"| [{room}](../flowtrain_lightning/{room}" not in page] == []


def test_the_version_is_one_and_its_changes_are_told():
    version = re.search(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), flags=re.MULTILINE)
    assert version is not None
    assert flow.__version__ == version[1]
    assert f"\nversion: {version[1]}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {version[1]}" in PAGES["CHANGELOG.md"].read_text(encoding="utf-8")
