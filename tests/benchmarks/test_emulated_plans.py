"""Plans beside ranks that sleep: a step takes what was planned, and the table says of how many cells that holds."""

from __future__ import annotations

import pytest

from benchmarks.emulated_plans import text
from benchmarks.plan_cells import CONTEXT, MIXED, drawn_cells, measure

MACHINE = dict.fromkeys(("date", "commit", "cpu", "cores", "load", "python", "torch", "lightning"), "1")


def cell(kind, planned, step):
    figures = {"planned": planned, "simulated": planned, "step": step, "cores": 0.1}
    return {"kind": kind, "what": "a model.", "plan": "ranks", "machine": MACHINE, **figures}


def test_cells_within_a_tenth_are_counted_by_kind():
    told = text({"a": cell(MIXED, 1.0, 1.09), "b": cell(MIXED, 1.0, 0.8), "c": cell(CONTEXT, 2.0, 2.0)})
    assert "- mixed: 1 of 2 within 10 %, the farthest 20.0%." in told
    assert "- colocated, context: 1 of 1 within 10 %, the farthest 0.0%." in told


@pytest.mark.full
@pytest.mark.parametrize("kind", [MIXED, CONTEXT])
def test_real_ranks_take_what_is_planned_for_them(tmp_path, kind):
    (first,) = drawn_cells(kind, tmp_path, 1, seed=0)
    found = measure(first, seconds=3.0)
    assert found["step"] == pytest.approx(found["simulated"], rel=0.1)
    assert found["step"] == pytest.approx(first.planned, rel=0.15)  # other steps of the same records
