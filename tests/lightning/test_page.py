"""The page on compatibility names everything that Lightning and PyTorch offer, and only tests that exist."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch import callbacks

from flowtrain_lightning.trainer.callback_refusals import REFUSED_CALLBACKS
from flowtrain_lightning.trainer.refusals import PRECISIONS

PAGE = (Path(__file__).parents[2] / "docs" / "compatibility.md").read_text()
PROMISES, TESTED = PAGE.split("\n## Where it is tested\n")
QUOTED = set(re.findall(r"`([^`]+)`", PAGE))

ARGUMENTS = [name for name in inspect.signature(L.Trainer.__init__).parameters if name != "self"]
OPTIMIZERS = [
    name
    for name, found in vars(torch.optim).items()
    if isinstance(found, type) and issubclass(found, torch.optim.Optimizer) and found is not torch.optim.Optimizer
]


@pytest.mark.parametrize("name", ARGUMENTS)
def test_every_argument_of_the_trainer_has_a_row(name):
    assert re.search(rf"^\| [^|]*`{name}`[^|]* \| \S[^|]* \|$", PROMISES, re.MULTILINE)


@pytest.mark.parametrize("name", callbacks.__all__)
def test_every_built_in_callback_has_a_row(name):
    assert re.search(rf"^\| [^|]*`{name}`[^|]* \| (work|refused)", PROMISES, re.MULTILINE)


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_every_optimizer_has_a_row(name):
    assert re.search(rf"^\| [^|]*`{name}`[^|]* \| (work|refused)", PROMISES, re.MULTILINE)


def test_what_the_code_refuses_is_refused_on_the_page():
    for callback in REFUSED_CALLBACKS:
        assert re.search(rf"^\| [^|]*`{callback.__name__}`[^|]* \| refused", PROMISES, re.MULTILINE)
    assert {f'"{precision}"' for precision in PRECISIONS} <= QUOTED


def test_every_test_that_the_page_names_exists():
    files = Path(__file__).parents[1].rglob("test_*.py")
    there = {name for file in files for name in re.findall(r"^def (test_\w+)", file.read_text(), re.MULTILINE)}
    named = {name for name in QUOTED if name.startswith("test_")}
    assert len(named) > 30
    assert named <= there


def test_every_row_has_a_test_that_runs():
    runs = {name for file in Path(__file__).parents[1].rglob("test_*.py") for name in names_that_run(file)}
    tested = list(rows_of_tests())
    for section, row, promise in promised_rows():
        tests = [tests for where, beginning, tests in tested if where == section and row.startswith(beginning)]
        elsewhere = "](#" in promise
        assert tests or elsewhere, f"{section}: {row}"
        for cell in tests:
            assert set(re.findall(r"`(test_\w+)`", cell)) & runs or cell == "every test", f"{section}: {row}"


def test_every_line_of_tests_belongs_to_a_row():
    there = [(section, row) for section, row, _ in promised_rows()]
    for section, beginning, _ in rows_of_tests():
        assert any(section == where and row.startswith(beginning) for where, row in there), f"{section}: {beginning}"


def promised_rows() -> Iterator[tuple[str, str, str]]:
    """Section, first and second cell of every row of the tables of promises."""
    for section in re.split(r"^## ", PROMISES, flags=re.MULTILINE)[1:]:
        for table in re.findall(r"(?:^\|.*\n)+", section, flags=re.MULTILINE):
            for row, promise in cells(table)[2:]:
                yield section.splitlines()[0], row, promise


def rows_of_tests() -> Iterator[tuple[str, str, str]]:
    """Section, beginning of a row's first cell, and tests: every line of the last table, for each row that it names."""
    section = ""
    for rows, tests in cells(TESTED)[2:]:
        if rows.startswith("**"):
            section = rows.strip("*")
            continue
        for beginning in rows.split(", "):
            yield section, beginning, tests


def cells(table: str) -> list[tuple[str, str]]:
    lines = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("|")]
    return [(first.strip(), second.strip()) for first, second in lines]


def names_that_run(file: Path) -> set[str]:
    """Those that `make test` or `make test-all` runs: not left out on every machine."""
    tree = ast.parse(file.read_text())
    marks = [node.value for node in tree.body if isinstance(node, ast.Assign) and "pytestmark" in ast.unparse(node)]
    if any(is_left_out(mark) for mark in marks):
        return set()
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    return {node.name for node in functions if not any(map(is_left_out, node.decorator_list))}


def is_left_out(mark: ast.expr) -> bool:
    """Whether a mark, or each parameter that it gives, takes the test out of both."""
    text = ast.unparse(mark)
    if isinstance(mark, ast.Call) and text.startswith("pytest.mark.parametrize") and isinstance(mark.args[1], ast.List):
        return all(re.search(r"pytest\.mark\.skip\b", ast.unparse(each)) for each in mark.args[1].elts)
    return bool(re.search(r"^\[?pytest\.mark\.skip\b", text))
