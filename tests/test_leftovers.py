"""What is told as left in shared memory: the files that no living process has mapped."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from tests.leftovers import SHARED_MEMORY, abandoned_files, newly_abandoned_files


@pytest.fixture
def file() -> Iterator[Path]:
    path = SHARED_MEMORY / f"flowtrain-test-{uuid4()}"
    path.write_bytes(bytes(mmap.PAGESIZE))
    yield path
    path.unlink()


def test_a_file_is_abandoned_while_nobody_has_mapped_it(file):
    with file.open("r+b") as opened, mmap.mmap(opened.fileno(), 0):
        assert str(file) not in abandoned_files()
    assert str(file) in abandoned_files()


def test_a_file_that_was_there_before_is_not_new(file):
    assert str(file) not in newly_abandoned_files({str(file)})
