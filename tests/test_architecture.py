"""The house rules that a machine can check: imports run downward, planning needs no torch, tests have short names."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy
import pytest
import scipy

PACKAGE = Path(__file__).parents[1] / "flowtrain_lightning"
NAME = PACKAGE.name

PLANNING = {"packing", "allocator"}
RANKS = {*PLANNING, "pool", "data", "parallel", "compute"}
RUNS = {*RANKS, "checkpoint", "packing_check", "module", "runtime"}
STARTS = {*RUNS, "placement", "trainer", "strategy"}

ROOMS = {
    "attention": set(),
    "ports": set(),
    "packing": set(),
    "allocator": {"packing"},
    "pool": {"ports"},
    "data": {"packing"},
    "parallel": {"allocator", "attention", "ports"},
    "compute": RANKS,
    "checkpoint": RANKS - {"pool", "compute"},
    "packing_check": RANKS - {"allocator", "pool"},
    "module": RUNS - {"packing", "pool", "runtime"},
    "runtime": RUNS - {"checkpoint"},
    "placement": RUNS - {"pool"},
    "trainer": {*RUNS, "placement"},
    "strategy": STARTS,
    "registration": {"strategy"},
    "metrics": STARTS,
    "callbacks": {*STARTS, "metrics"},
    "models": {"allocator", "attention", "data", "parallel", "compute", "packing_check", "module"},
    "cli": {*STARTS, "attention", "callbacks", "models"},
}
"""Each room, or module beside the rooms, and the rooms that it may import; from below."""

OUTSIDE = {
    "packing": {"numba", "numpy", "scipy"},
    "allocator": {"jsonargparse", "numpy", "scipy", "yaml"},
    "pool": {"nixl", "numpy", "torch", "zmq"},
    "parallel": {"deepspeed", "numpy", "torch"},
}
"""What rooms may import from outside the package; rooms that are not named here are free."""


def imports(file: Path) -> Iterator[str]:
    """The dotted names that a file imports: at its top, inside of functions, and for the type checker alone."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} imports relatively; write the whole name"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room_of(file: Path) -> str:
    return file.relative_to(PACKAGE).with_suffix("").parts[0]


FILES = [file for file in sorted(PACKAGE.rglob("*.py")) if file != PACKAGE / "__init__.py"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_imports_run_downward_only(file):
    room = room_of(file)
    allowed = ROOMS[room] | {room}
    within = {name.split(".")[1] for name in imports(file) if name.startswith(f"{NAME}.")}
    assert within <= allowed, f"may import {sorted(allowed)}, but imports {sorted(within - allowed)} too"


@pytest.mark.parametrize("room", sorted(OUTSIDE))
def test_a_room_leans_on_nothing_but_what_the_design_names(room):
    for file in (PACKAGE / room).rglob("*.py"):
        top = {name.split(".")[0] for name in imports(file)} - set(sys.stdlib_module_names) - {NAME}
        assert top <= OUTSIDE[room], f"{file.name} imports {sorted(top - OUTSIDE[room])}"


def test_names_of_tests_fit_on_a_line_of_a_report():
    for file in Path(__file__).parent.rglob("test_*.py"):
        for name in re.findall(r"^ *def (test_\w+)", file.read_text(encoding="utf-8"), re.MULTILINE):
            assert len(name) <= 80, f"{file.name}: {name} has {len(name)} characters"


def private_names(files: Iterable[Path]) -> set[str]:
    """What modules and classes call their own: names that begin with one underscore, but for that of named tuples."""
    found = set()
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            match node:
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.Attribute(attr=name, ctx=ast.Store()):
                    found.add(name)
                case ast.Name(id=name, ctx=ast.Store()):
                    found.add(name)
    return {name for name in found if name.startswith("_") and not name.startswith("__")} - {"_", "_replace"}


def names_reached(file: Path) -> Iterator[str]:
    """Names that a file takes from something else than ``self``, or names in a string, as `monkeypatch` is told."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls")):
                pass
            case ast.Attribute(attr=name) | ast.alias(name=name) | ast.Constant(value=str(name)):
                yield name


TEST_FILES = sorted(Path(__file__).parent.rglob("*.py"))


def test_no_test_reaches_into_what_the_package_keeps_to_itself():
    private = private_names(FILES)
    for file in TEST_FILES:
        if file.name != "test_private.py":  # which holds what the package needs of Lightning's own
            reached = private.intersection(names_reached(file))
            assert not reached, f"{file.name} reaches {sorted(reached)}"


def test_models_of_hugging_face_cost_nothing_before_one_is_built():
    for file in (PACKAGE / "models").rglob("*.py"):
        for statement in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(statement, ast.Import | ast.ImportFrom):
                assert "transformers" not in ast.unparse(statement), file.name


def test_planning_for_a_thousand_ranks_works_where_there_is_no_torch(tmp_path):
    for package in (numpy, scipy):
        folder = Path(package.__file__).parent
        for part in (folder, folder.with_name(f"{folder.name}.libs")):
            if part.exists():
                (tmp_path / part.name).symlink_to(part)
    (tmp_path / NAME).symlink_to(PACKAGE)
    script = """if True:
        import importlib.util
        assert importlib.util.find_spec("torch") is None and importlib.util.find_spec("lightning") is None
        import numpy as np
        from flowtrain_lightning.allocator import default_allocation
        from flowtrain_lightning.packing import SampleSizes
        from flowtrain_lightning.packing.step_planner import plan_step
        allocation = default_allocation(1000, devices_per_node=8)
        count = 1000
        ones = np.ones(count, dtype=np.int64)
        sizes = SampleSizes(ones * 100, ones, np.arange(count + 1), ones * 50, ones * 200)
        plan = plan_step(sizes, np.arange(count), allocation.step_members(), token_budget=400)
        print(len(plan.microbatches), len(plan.batches["encoder"]))
    """
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-S", "-c", script], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stderr == ""
    assert done.stdout.split() == ["750", "250"]
