"""Videos and images train in every placement as in one process, and a run goes on from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("av")

from tests.exactness.compare import error, read_run
from tests.exactness.data import STEPS
from tests.exactness.layouts import ranks_of
from tests.forks import Job, run_jobs
from tests.models.clips import video_data, write_video_records

MIDDLE = 3


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The folder of a run."""
    folder = tmp_path_factory.mktemp("videos")
    write_video_records(folder / "data", 6 * STEPS)

    @cache
    def trained(family: str, layout: str, **others: Any) -> Path:
        video_data(folder / "data", family).setup("fit")  # indexes, and writes what the family reads
        name = f"{family} {layout} {' '.join(others)}"
        arguments = {"data": str(folder / "data"), "layout": layout, "family": family, **others}
        job = Job(name, "tests.models.video_training:train", ranks_of(layout), arguments)
        return run_jobs(folder, [job])[name].check().folder

    return trained


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("qwen3_vl", "1+1"),
        pytest.param("qwen2_5_vl", "mixed 1+2", marks=pytest.mark.full),
        pytest.param("qwen2_5_vl", "1+1", marks=pytest.mark.full),
        pytest.param("qwen2_5_vl", "colocated 2", marks=pytest.mark.full),
        pytest.param("qwen2_vl", "1+2", marks=pytest.mark.full),
        pytest.param("qwen3_vl", "colocated 2", marks=pytest.mark.full),
        pytest.param("qwen3_vl", "mixed 1+2", marks=pytest.mark.full),
    ],
)
def test_a_layout_computes_on_videos_what_one_process_does(trained, family, layout):
    found, expected = read_run(trained(family, layout)), read_run(trained(family, "auto"))
    assert len(found.losses) == STEPS
    assert error(found.initial, expected.initial) == 0.0
    assert found.losses == pytest.approx(expected.losses, rel=1e-9)
    assert max(error(*pair) for pair in zip(found.gradients, expected.gradients, strict=True)) <= 1e-9
    assert error(found.weights[-1], expected.weights[-1]) <= 1e-9


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("qwen2_5_vl", "1+2"),
        pytest.param("qwen2_5_vl", "auto", marks=pytest.mark.full),
        pytest.param("qwen3_vl", "2+1", marks=pytest.mark.full),
        pytest.param("qwen2_vl", "colocated 2", marks=pytest.mark.full),
        pytest.param("qwen2_5_vl", "mixed 1+2", marks=pytest.mark.full),
    ],
)
def test_a_clip_that_is_dealt_in_pieces_trains_as_a_whole_one(trained, family, layout):
    found, expected = read_run(trained(family, layout, encoder_budget=64)), read_run(trained(family, "auto"))
    assert sum(map(max, found.encoder_batches)) > sum(map(max, expected.encoder_batches))
    assert found.losses == pytest.approx(expected.losses, rel=1e-9)
    assert max(error(*pair) for pair in zip(found.gradients, expected.gradients, strict=True)) <= 1e-9
    assert error(found.weights[-1], expected.weights[-1]) <= 1e-9


@pytest.mark.full
@pytest.mark.parametrize(("family", "layout"), [("qwen2_5_vl", "colocated 2"), ("qwen3_vl", "1+2")])
def test_pieces_of_a_clip_are_dealt_to_ranks_that_share_its_sequence(trained, family, layout):
    found = read_run(trained(family, layout, encoder_budget=64, context=2))
    expected = read_run(trained(family, "auto"))
    assert found.losses == pytest.approx(expected.losses, rel=1e-9)
    assert max(error(*pair) for pair in zip(found.gradients, expected.gradients, strict=True)) <= 1e-9
    assert error(found.weights[-1], expected.weights[-1]) <= 1e-9


@pytest.mark.full
def test_features_of_pieces_are_kept_and_read_with_the_same_losses(trained, tmp_path):
    settings = {"encoder_budget": 64, "frozen": "model.visual"}
    plain = read_run(trained("qwen2_5_vl", "1+1", **settings))
    first, again = (
        read_run(trained("qwen2_5_vl", "1+1", store=str(tmp_path), resumes=resumes, **settings))
        for resumes in (None, "")
    )
    assert any("-" in file.stem for file in tmp_path.rglob("*.safetensors")), "named by their moments"
    assert first.losses == plain.losses == again.losses
    assert error(again.weights[-1], plain.weights[-1]) == 0.0


@pytest.mark.full
def test_a_run_on_videos_goes_on_from_a_checkpoint_to_the_bit(trained):
    whole = trained("qwen3_vl", "1+1", saves_after=MIDDLE)
    found = read_run(trained("qwen3_vl", "1+1", resumes=str(whole / "middle.ckpt")))
    expected = read_run(whole)
    assert found.losses == expected.losses[MIDDLE:]
    assert error(found.weights[-1], expected.weights[-1]) == 0.0
