"""What the page of recipes says of time and memory is what the planner says."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from flowtrain_lightning.cli import main

PAGE = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (.*?) \| \d+ \| ([\d.]+) s \| .* \| (\d+) \| `(--model .*)` \|$", PAGE, flags=re.MULTILINE)


@pytest.mark.full
@pytest.mark.parametrize(("recipe", "seconds", "gigabytes", "arguments"), ROWS)
def test_a_recipe_takes_what_the_page_says(capsys, monkeypatch, recipe, seconds, gigabytes, arguments):
    monkeypatch.setattr("sys.argv", ["flowtrain", "plan", "--device", "h100", *shlex.split(arguments), "--json"])
    main()
    report = json.loads(capsys.readouterr().out)
    best = report["plans"][report["recommended"]]
    assert best["step_seconds"] == pytest.approx(float(seconds), rel=0.1)
    assert best["peak_bytes"] / 1e9 == pytest.approx(float(gigabytes), rel=0.1)


def test_every_recipe_of_its_own_size_is_on_the_page():
    assert len(ROWS) == 8
