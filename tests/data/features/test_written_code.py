"""The name of what is kept changes with the code of the classes that made it, wherever that is written."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from flowtrain_lightning.data import RankShard
from flowtrain_lightning.data.features.feature_keeping import keeping_of
from flowtrain_lightning.data.features.feature_store import KeepFeatures
from flowtrain_lightning.packing.step_members import StepMembers

PROCESSOR = """
from dataclasses import dataclass
import tables
from flowtrain_lightning.data import ImageProcessor
from helpers import LEAST, scaled

@dataclass(frozen=True)
class Own(ImageProcessor):
    def values(self, image, grid, size):
        return scaled(super().values(image, grid, size)).clip(LEAST, tables.MOST)
"""
FILES = {
    "processor": PROCESSOR,
    "helpers": (
        "from constants import LEAST\nfrom curves import bent\n\n"
        "def scaled(values, by=1):\n    return bent(values) * by\n"
    ),
    "curves": "TABLE = [1, 2]\n\ndef bent(values):\n    return values * TABLE[0]\n",
    "constants": "LEAST = 0\n",
    "tables": "MOST = 255\n",
}


class Model:
    """Its encoder stays as it is."""

    def encoder_fingerprint(self, role: str) -> str:
        return role


@pytest.fixture
def name(tmp_path, monkeypatch) -> Callable[..., str]:
    """The name of all that a processor makes, after texts in its files were replaced by others."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def found(file: str = "processor", old: str = "", new: str = "") -> str:
        for each, content in FILES.items():
            Path(tmp_path / f"{each}.py").write_text(content.replace(old, new) if each == file and old else content)
            sys.modules.pop(each, None)
        importlib.invalidate_caches()
        processor = importlib.import_module("processor").Own()
        keeping = keeping_of(KeepFeatures(tmp_path), Model(), RankShard(StepMembers({}), {}), [processor, None])
        assert keeping is not None
        return keeping.processors

    return found


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("processor", "return scaled(", "return 255 - scaled("),
        ("helpers", "by=1", "by=2"),
        ("curves", "TABLE = [1", "TABLE = [3"),
        ("constants", "LEAST = 0", "LEAST = 9"),
        ("tables", "MOST = 255", "MOST = 200"),
    ],
    ids=["method", "default of a helper", "table of a helper's helper", "constant", "constant of a module"],
)
def test_other_code_of_a_processor_makes_other_names(name, file, old, new):
    before = name()
    assert name(file, old, new) != before
    assert name() == before
