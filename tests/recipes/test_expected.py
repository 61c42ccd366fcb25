"""What the page of recipes says of time and memory is what the planner says."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import yaml

from flowtrain_lightning.cli import main

RECIPES = Path(__file__).parents[2] / "recipes"
PAGE = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text(encoding="utf-8")
ROW = r"^\| (.*?) \| (\d+) \| ([\d.]+) s \| (\d+) \| ([\d.]+) to ([\d.]+) s \| (\d+) \| `(--model .*)` \|$"
ROWS = re.findall(ROW, PAGE, flags=re.MULTILINE)


LONGER = [pytest.param(row, marks=pytest.mark.full) for row in ROWS[2:]]


@pytest.mark.parametrize("row", [*ROWS[:2], *LONGER], ids=lambda row: row[0])
def test_a_recipe_takes_what_the_page_says(capsys, monkeypatch, row):
    *written, arguments = row[1:]
    monkeypatch.setattr("sys.argv", ["flowtrain", "plan", "--device", "h100", *shlex.split(arguments), "--json"])
    main()
    report = json.loads(capsys.readouterr().out)
    best = report["plans"][report["recommended"]]
    told = [
        best["devices"],
        best["step_seconds"],
        best["samples_per_second"],
        *best["step_seconds_band"],
        best["peak_bytes"] / 1e9,
    ]
    assert [float(figure) for figure in written] == pytest.approx(told, rel=0.05)
    planned = {role: (one["layout"]["shard"], one["recompute"]) for role, one in best["roles"].items()}
    assert layouts_of(row[0]).items() <= planned.items(), "the recipe has another layout than the page's figures"


def layouts_of(recipe: str) -> dict[str, tuple[str, str]]:
    """Role -> how its ranks hold weights and what is computed again, where the recipe says it."""
    name, _, file = recipe.replace("`", "").partition(", ")
    config = yaml.safe_load((RECIPES / name / (file or "config.yaml")).read_text(encoding="utf-8"))
    strategy = config["trainer"]["strategy"]
    roles = strategy["init_args"].get("roles", {}) if isinstance(strategy, dict) else {}
    again = "full" if config.get("model", {}).get("init_args", {}).get("recompute") else "none"
    return {role: (wanted["shard"], wanted.get("recompute", again)) for role, wanted in roles.items()}


def test_every_recipe_of_its_own_size_is_on_the_page():
    assert len(ROWS) == 8
