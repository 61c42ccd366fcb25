"""Throughput matching, held against brute force."""

from __future__ import annotations

import ctypes
import os
import time
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowtrain_lightning.allocator import SearchSpace
from flowtrain_lightning.allocator.candidates import CandidateTable, candidates
from flowtrain_lightning.allocator.role_problem import Family
from flowtrain_lightning.allocator.silenced import silenced_output
from flowtrain_lightning.allocator.solver import TIE, match_throughputs
from tests.allocator.problems import problems


def table_of(role, entries):
    """A table whose candidates have the given (devices, seconds)."""
    devices, seconds = (np.array(column, dtype=float) for column in zip(*entries, strict=True))
    numbers = np.arange(len(entries))
    families = (Family(devices),)
    zero = np.zeros(len(entries))
    return CandidateTable(role, families, np.zeros(len(entries), dtype=np.int64), numbers, devices, seconds, zero, zero)


def brute_force(tables, devices):
    """The least seconds of the slowest role, and the fewest devices that nearly reach them."""
    choices = [list(zip(table.devices, table.seconds, strict=True)) for table in tables.values()]
    fitting = [
        (max(seconds for _, seconds in chosen), sum(count for count, _ in chosen))
        for chosen in product(*choices)
        if sum(count for count, _ in chosen) <= devices
    ]
    if not fitting:
        return None
    fastest = min(seconds for seconds, _ in fitting)
    return fastest, min(count for seconds, count in fitting if seconds <= fastest * (1 + TIE))


def check(tables, devices):
    expected, found = brute_force(tables, devices), match_throughputs(tables, devices)
    if expected is None:
        assert found is None
        return
    fastest, fewest = expected
    assert sum(one.devices for one in found.values()) == fewest
    assert max(one.seconds for one in found.values()) <= fastest * (1 + TIE) * (1 + 1e-9)


ENTRIES = st.lists(st.tuples(st.integers(1, 64), st.floats(0.01, 100)), min_size=1, max_size=20)


@settings(max_examples=150, deadline=None)
@given(st.lists(ENTRIES, min_size=2, max_size=3), st.integers(1, 64))
def test_any_choice_equals_brute_force(entries, devices):
    check({f"role {number}": table_of(f"role {number}", one) for number, one in enumerate(entries)}, devices)


@pytest.mark.parametrize("devices", [1, 2, 3, 5, 8, 16, 24, 40, 64])
@pytest.mark.parametrize("model", ["smolvlm-2.2b", "qwen2.5-vl-7b"])
def test_a_real_choice_equals_brute_force(model, devices):
    per_role = problems(model, devices=devices, device="h200")
    if devices > 8 and devices % 8:
        pytest.skip("nodes are whole")
    tables = {role: candidates(problem, SearchSpace()).fastest_by_devices for role, problem in per_role.items()}
    check(tables, devices)


def test_every_sample_needs_all_of_its_encoders():
    tables = {
        "encoder_image": table_of("encoder_image", [(1, 4.0), (2, 2.0)]),
        "encoder_audio": table_of("encoder_audio", [(1, 2.0), (2, 1.0)]),
        "backbone": table_of("backbone", [(4, 2.0), (8, 1.0)]),
    }
    found = match_throughputs(tables, 7)
    assert {role: one.devices for role, one in found.items()} == {
        "encoder_image": 2,
        "encoder_audio": 1,
        "backbone": 4,
    }


def test_what_idles_is_given_back():
    tables = {
        "encoder": table_of("encoder", [(1, 1.0), (2, 0.5), (3, 0.3)]),
        "backbone": table_of("backbone", [(2, 1.0)]),
    }
    assert match_throughputs(tables, 8)["encoder"].devices == 1


def test_nothing_fits_on_too_few_devices():
    tables = {"encoder": table_of("encoder", [(2, 1.0)]), "backbone": table_of("backbone", [(2, 1.0)])}
    assert match_throughputs(tables, 3) is None


@pytest.mark.parametrize(("devices", "limit"), [(1024, 1.0), pytest.param(16384, 10.0, marks=pytest.mark.full)])
def test_large_clusters_are_solved_quickly(devices, limit):
    per_role = problems("qwen2.5-vl-72b", devices=devices, global_batch_size=4 * devices)
    tables = {role: candidates(problem, SearchSpace()) for role, problem in per_role.items()}
    start = time.process_time()
    assert match_throughputs(tables, devices) is not None
    assert time.process_time() - start < limit


def test_what_a_solver_prints_past_python_is_not_seen(capfd):
    c = ctypes.CDLL(None)
    with silenced_output():
        c.puts(b"by the C library")
        os.write(1, b"by nobody")
    print("by Python")
    c.fflush(None)
    assert capfd.readouterr().out == "by Python\n"
