"""Device time: measured by the device, told on the host's clock, and never waited for."""

from __future__ import annotations

import pytest

from flowtrain_lightning.runtime.timeline import DeviceClock
from tests.runtime.late_device import LateDevice


def worked(clock, device, seconds):
    """Marks around a piece of work."""
    start = clock.mark()
    device.give(seconds)
    return start, clock.mark()


def test_a_cpu_has_done_what_it_was_given():
    clock = DeviceClock(now=iter([0.0, 3.0, 5.0]).__next__)
    start, end = clock.mark(), clock.mark()
    assert clock.read(start, end) == (3.0, 5.0)


def test_what_a_device_has_not_come_to_is_not_told_yet():
    device = LateDevice()
    clock = DeviceClock(device.record, device.host_clock)
    marks = worked(clock, device, 0.5)
    assert clock.read(*marks) is None
    device.host += 0.4
    assert clock.read(*marks) is None
    device.host += 0.2
    assert clock.read(*marks) == pytest.approx((1000.0, 1000.5))
    assert device.waits == 0


def test_work_that_waits_behind_other_work_has_its_own_time():
    device = LateDevice()
    clock = DeviceClock(device.record, device.host_clock)
    pieces = [worked(clock, device, seconds) for seconds in (1.0, 0.25, 2.0)]
    device.host += 100
    told = [clock.read(*marks) for marks in pieces]
    assert told == [pytest.approx(times) for times in ((1000.0, 1001.0), (1001.0, 1001.25), (1001.25, 1003.25))]


def test_only_whoever_asks_for_it_waits():
    device = LateDevice()
    clock = DeviceClock(device.record, device.host_clock)
    assert clock.read(*worked(clock, device, 4.0), wait=True) == pytest.approx((1000.0, 1004.0))
    assert device.waits == 1


@pytest.mark.parametrize("rate", [0.99, 1.0, 1.01])
def test_a_device_whose_clock_runs_faster_or_slower_is_followed(rate):
    device = LateDevice(rate)
    clock = DeviceClock(device.record, device.host_clock)
    for _ in range(10_000):  # steps of 0.2 s, of which the device works for 0.1 s: more than half an hour
        start, end = worked(clock, device, 0.1)
        device.host += 0.2
        began, ended = clock.read(start, end)
        assert ended - began == pytest.approx(0.1 * rate)
        assert abs(ended - end.event.comes) <= 0.11, "at most as far off as the host's bounds are wide"


def test_a_clock_that_was_made_while_the_device_was_busy_is_set_right():
    device = LateDevice()
    device.give(50.0)
    clock = DeviceClock(device.record, device.host_clock)
    device.host += 60.0
    assert clock.read(*worked(clock, device, 0.0)) == (1060.0, 1060.0)
