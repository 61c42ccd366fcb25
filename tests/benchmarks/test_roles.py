"""Placements of two encoders, a backbone and a generator: which are run, and when the choice is near enough."""

from __future__ import annotations

import json

import pytest

from benchmarks.roles import KINDS, OWN, TOGETHER, UNIFORM, text
from tests.benchmarks.running import run

MACHINE = dict.fromkeys(("date", "commit", "cpu", "cores", "load", "python", "torch", "lightning"), "1")


def cell(chosen: str | None, **steps: float) -> dict:
    named = {OWN: steps["own"], TOGETHER: steps["together"], UNIFORM: steps["uniform"]}
    runs = {kind: {"layout": kind, "simulated": each, "step": each, "cores": 0.2} for kind, each in named.items()}
    return {"what": "a mix", "machine": MACHINE, "runs": runs, "chosen": {"as": chosen, "layout": "it", "simulated": 1}}


@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        (TOGETHER, "- small: the automatic choice (colocated) is 2.0% behind the fastest; reached."),
        (OWN, "- small: the automatic choice (own ranks) is 50.0% behind the fastest; missed."),
    ],
)
def test_a_choice_that_is_within_three_per_cent_reaches_the_aim(chosen, words):
    assert words in text({"small": cell(chosen, own=1.5, together=1.02, uniform=1.0)})


def test_what_is_only_simulated_has_a_dash():
    simulated = cell(TOGETHER, own=1.5, together=1.02, uniform=1.0)
    for each in simulated["runs"].values():
        del each["step"], each["cores"]
    table = text({"small": simulated})
    assert "automatic choice (colocated)" not in table
    assert table.count("|          - |") >= 3


@pytest.mark.full
def test_every_placement_is_run(tmp_path):
    run("roles.py", tmp_path, "--mixes", "all fit")
    runs = json.loads((tmp_path / "roles.json").read_text())["all fit"]["runs"]
    assert set(runs) >= set(KINDS)
    assert all(found["step"] > 0 for found in runs.values())
