"""Checkpoints of halves that DeepSpeed optimizes: by parameter name, to and from other layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.forks import Job, read_down, run_jobs
from tests.tiny import write_records

pytest.importorskip("deepspeed")


def noted(folder: Path, target: str) -> list[dict[str, Any]]:
    for name, count in (("train.jsonl", 24), ("val.jsonl", 8), ("predict.jsonl", 5)):
        write_records(folder / "data", count, name)
    job = Job("job", f"tests.checkpoint.deepspeed:{target}", 2, {"data": str(folder / "data")}, imports="deepspeed")
    return read_down(run_jobs(folder, [job])["job"].check().folder)


@pytest.mark.parametrize("target", [pytest.param("resume", marks=pytest.mark.full), "resume_shards"])
def test_a_run_goes_on_bit_for_bit_and_to_and_from_other_layouts(tmp_path, target):
    for apart in noted(tmp_path, target):
        assert apart.pop("deepspeed to deepspeed") == 0.0
        assert apart == {name: pytest.approx(0.0, abs=1e-5) for name in apart}


@pytest.mark.full
def test_weights_that_no_step_used_are_told_of_and_refused_where_states_differ(tmp_path):
    for rank in noted(tmp_path, "refuse"):
        assert any("2 of 18 weights took part in no sample" in each for each in rank["warnings"]), rank["warnings"]
        assert "encoder.unused" in rank["refusal"]
        assert "was never stepped" in rank["refusal"]


@pytest.mark.full
def test_stages_in_mixed_precision_give_what_they_give_on_whole_copies(tmp_path):
    for found in noted(tmp_path, "all_stages"):
        assert found["deepspeed"] == pytest.approx(found["copies"], rel=0.01)
        assert found["shards"] == pytest.approx(found["copies"], rel=0.01)
