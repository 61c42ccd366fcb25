"""Rows of one tensor are of one kind, whichever of them comes first."""

from __future__ import annotations

from pathlib import Path

from tests.exactness.data import write_steps
from tests.forks import Job, read_down, run_jobs


def test_rows_of_another_type_than_those_before_them_are_refused(tmp_path: Path):
    write_steps(tmp_path / "data")
    job = Job("varying", "tests.runtime.varying_rows:train", 3, {"data": str(tmp_path / "data")})
    said = "".join(read_down(run_jobs(tmp_path, [job])["varying"].folder))
    assert "The features of 'image' come in rows of [16] torch." in said
    assert "torch.bfloat16" in said
