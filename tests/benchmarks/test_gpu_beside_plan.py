"""The one GPU on which training was measured took about as long as its plan says."""

from __future__ import annotations

from benchmarks.gpu_beside_plan import read_runs


def test_measured_steps_are_within_15_percent_of_the_plan_and_inside_its_band():
    runs = read_runs()
    assert [run.name for run in runs] == ["loop", "auto"]
    assert all(abs(run.error) <= 0.15 and run.in_band for run in runs)


def test_they_took_as_much_memory_as_planned():
    assert all(run.memory <= run.plan.peak_bytes <= 1.1 * run.memory for run in read_runs())
