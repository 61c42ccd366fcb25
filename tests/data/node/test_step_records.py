"""The records of a step are read once for all who need them, and read anew where they were let go of."""

from __future__ import annotations

import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from flowtrain_lightning.data import Record
from flowtrain_lightning.data.media.media_files import EncodedMedia
from flowtrain_lightning.data.node import step_records as room
from flowtrain_lightning.data.node.step_records import StepRecords
from flowtrain_lightning.data.sources import slow_reading

PICTURE = b"0123456789"


class Counted:
    """A source that counts what is read of it; one sample is read only when it may be.

    Args:
        slow: the sample.
    """

    fingerprint = "counted"

    def __init__(self, slow: int = -1) -> None:
        self.slow, self.begun, self.may_go_on = slow, threading.Event(), threading.Event()
        self.counts: Counter[int] = Counter()

    def __len__(self) -> int:
        return 100

    def sizes(self, samples: np.ndarray[Any, Any]) -> Any:
        raise AssertionError("nobody asks for sizes here")

    def where(self, sample: int) -> str:
        return f"sample {sample}"

    def record(self, sample: int) -> Record:
        self.counts[sample] += 1
        if sample == self.slow:
            self.begun.set()
            assert self.may_go_on.wait(20)
        return Record(f"sample {sample}", str(sample), (), (EncodedMedia(str(sample), PICTURE),), {})


def asked(records: StepRecords, step: int, of_node: dict[int, int], own: list[int]) -> list[str]:
    return [record.id for record in records.answer(0, "records", ((0, step), of_node, own))]


def test_a_record_that_two_need_is_read_once():
    source = Counted()
    records = StepRecords(source, together=False)
    assert asked(records, 0, {3: 2, 4: 1}, [3]) == ["3"]
    assert asked(records, 0, {3: 2, 4: 1}, [3, 4]) == ["3", "4"]
    assert source.counts == {3: 1, 4: 1}


def test_of_too_much_the_oldest_is_let_go_of_and_read_anew(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(room, "KEPT_BYTES", len(PICTURE))
    source = Counted()
    records = StepRecords(source, together=False)
    asked(records, 0, {3: 2}, [3])
    asked(records, 1, {4: 2}, [4])
    assert asked(records, 1, {4: 2}, [4]) == ["4"]
    assert asked(records, 0, {3: 2}, [3]) == ["3"]
    assert source.counts == {3: 2, 4: 1}


def test_what_is_let_go_of_while_somebody_reads_still_comes_to_him(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(room, "KEPT_BYTES", len(PICTURE))
    source = Counted(slow=9)
    records = StepRecords(source, together=True)
    asked(records, 0, {3: 2}, [3])
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(asked, records, 0, {3: 2}, [3, 9])
        assert source.begun.wait(20)
        asked(records, 1, {4: 2, 5: 2}, [4])  # more than may be kept
        source.may_go_on.set()
        assert waiting.result(20) == ["3", "9"]


def test_a_record_that_takes_long_to_read_is_named(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    monkeypatch.setattr(slow_reading, "SLOW_SECONDS", 0.01)
    source = Counted(slow=4)
    records = StepRecords(source, together=True)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(asked, records, 0, {3: 1, 4: 1}, [3, 4])
        assert source.begun.wait(20)
        deadline = time.monotonic() + 20
        while not caplog.text and time.monotonic() < deadline:
            time.sleep(0.01)
        source.may_go_on.set()
        assert waiting.result(20) == ["3", "4"]
    assert "sample 4 has not been read within 0.01 s. Its source is slow, or hangs." in caplog.text
