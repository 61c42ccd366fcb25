"""The README promises nothing that is not there."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest

import flowtrain_lightning
from flowtrain_lightning.cli.command_table import COMMANDS
from tests.exactness.layouts import trainer_for
from tests.ways.pasting import adapted

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


@pytest.mark.full
def test_the_five_lines_train_on_rows_as_the_hub_has_them(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    from tests.models.test_pretrained import published  # which imports transformers

    monkeypatch.chdir(tmp_path)
    picture = {"bytes": (ROOT / "docs/packing.png").read_bytes(), "path": "bars.png"}
    pair = {"user": "What is drawn?", "assistant": "Bars.", "source": "ai2d"}
    rows = datasets.Dataset.from_list([{"images": [picture], "texts": [pair]}] * 8)
    rows.cast_column("images", [datasets.Image()]).save_to_disk("rows")
    own = {'"Qwen/Qwen2-VL-2B-Instruct"': f'"{published(tmp_path / "model", "qwen2_5_vl")}", max_pixels=50_000'}
    own['"HuggingFaceM4/the_cauldron", config="ai2d"'] = '"rows"'
    block = re.sub(r"L\.Trainer\(.*?\)", "trainer", adapted(BLOCKS[0], own))
    names: dict[str, Any] = {"trainer": trainer_for("auto", max_steps=2, default_root_dir=tmp_path)}
    exec(block, names)
    assert 0 < float(names["trainer"].callback_metrics["train_loss"]) < 10


def test_the_example_defines_methods_that_a_module_has():
    (module,) = (node for node in ast.walk(ast.parse("\n".join(BLOCKS))) if isinstance(node, ast.ClassDef))
    methods = [node.name for node in module.body if isinstance(node, ast.FunctionDef)]
    assert [name for name in methods if not hasattr(flowtrain_lightning.FlowModule, name)] == []
