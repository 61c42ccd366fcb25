"""The README promises nothing that is not there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import flowtrain_lightning
from flowtrain_lightning.cli.command_table import COMMANDS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


@pytest.mark.parametrize("target", sorted(set(re.findall(r"^make ([\w-]+)", README, flags=re.MULTILINE))))
def test_every_make_target_exists(target):
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)


@pytest.mark.parametrize("command", sorted(set(re.findall(r"(?<![\w.])flowtrain ([a-z]+) ", README))))
def test_every_command_exists(command):
    assert command in COMMANDS


def test_the_example_uses_names_that_exist():
    used = {
        node.attr
        for node in ast.walk(ast.parse("\n".join(BLOCKS)))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "flow"
    }
    assert used >= {"FlowModule", "FlowDataModule"}
    assert [name for name in used if not hasattr(flowtrain_lightning, name)] == []


def test_the_example_defines_methods_that_a_module_has():
    (module,) = (node for node in ast.walk(ast.parse("\n".join(BLOCKS))) if isinstance(node, ast.ClassDef))
    methods = [node.name for node in module.body if isinstance(node, ast.FunctionDef)]
    assert [name for name in methods if not hasattr(flowtrain_lightning.FlowModule, name)] == []
