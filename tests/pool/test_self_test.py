"""The self-test between two processes, and what `flowtrain doctor --pool` says of it."""

import os

import pytest

from flowtrain_lightning.cli.doctor_command import examine_pool
from flowtrain_lightning.pool.self_test import self_test


def test_entries_pass_between_two_processes_and_all_is_given_back():
    before = len(os.listdir("/proc/self/fd"))
    found = self_test()
    assert found.put_bytes_per_second > found.passed_bytes_per_second > 0
    assert 0 < found.round_trip_seconds < 1
    assert found.counters.entries == 208
    assert found.counters.current.now == 0
    assert found.counters.current.peak > 16 << 20
    assert len(os.listdir("/proc/self/fd")) <= before + 1


def test_the_doctor_prints_address_layout_limits_ways_and_figures():
    lines = {finding.name: str(finding) for finding in examine_pool()}
    assert "owner 14 bits, tier 1 bit, offset / 64 31 bits, generation 18 bits" in lines["address"]
    assert "128 GiB per rank" in lines["segment"]
    assert {"memory", "shared_memory", "inboxes", "waits"} <= lines.keys()
    assert "GB/s" in lines["put"]
    assert "us from put to release" in lines["round trip"]
    assert "GB/s in entries of 16 MiB" in lines["between hosts"]


def test_the_doctor_says_why_the_self_test_failed(monkeypatch):
    def fails(**_):
        raise OSError("no memory of that kind")

    monkeypatch.setattr("flowtrain_lightning.cli.doctor_command.self_test", fails)
    *_, last = examine_pool()
    assert not last.found
    assert "no memory of that kind" in str(last)


@pytest.mark.parametrize("timeout", [0.0])
def test_a_self_test_that_takes_too_long_is_ended(timeout):
    with pytest.raises(RuntimeError):
        self_test(timeout)
