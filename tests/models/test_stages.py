"""Models of Hugging Face train in stages as on one process, and checkpoints pass between both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.exactness.compare import error, read_run, same_bits
from tests.exactness.data import write_steps
from tests.exactness.layouts import ranks_of
from tests.forks import Job, run_jobs
from tests.models.test_layouts import assert_equal

pytest.importorskip("transformers")

STAGES, OF_TWO_RANKS, BOTH, BOTH_IN_SHARDS = "1+2", "1+4", "colocated 2", "colocated 4"
SAVED = 2
"""Steps before the checkpoint from which runs go on."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The folder of a run of a family on a layout, begun anew or from the checkpoint of another such run."""
    folder = tmp_path_factory.mktemp("stages")
    write_steps(folder / "data")

    @cache
    def trained(family: str, layout: str, resumes: str = "", degree: str = "", **settings: Any) -> Path:
        more = [degree, *(f"{name} {value}" for name, value in settings.items())]
        name = " ".join(filter(None, (family, layout, resumes and f"after {resumes}", *more)))
        arguments = {"data": str(folder / "data"), "layout": layout, "family": family, "saves_after": SAVED, **settings}
        if layout in (STAGES, OF_TWO_RANKS, BOTH):
            arguments["roles"] = {"backbone": {"pipeline": 2, **({degree: 2} if degree else {})}}
        if layout == BOTH:
            arguments["roles"]["encoder"] = {"pipeline": 2}
        if layout == BOTH_IN_SHARDS:
            arguments["roles"] = {role: {"pipeline": 2, "shard": "fsdp"} for role in ("encoder", "backbone")}
        if resumes:
            arguments["resumes"] = str(trained(family, resumes, degree=degree) / "middle.ckpt")
        return (
            run_jobs(folder, [Job(name, "tests.models.training:train", ranks_of(layout), arguments)])[name]
            .check()
            .folder
        )

    return trained


@pytest.mark.parametrize(
    "family",
    [
        "qwen2_vl, tied",
        *(
            pytest.param(name, marks=pytest.mark.full)
            for name in ("qwen2_5_vl", "qwen3_vl", "llava with clip", "internvl", "llava with clip by any")
        ),
    ],
)
def test_a_decoder_in_two_stages_learns_what_one_process_does(trained, family):
    assert_equal(*(read_run(trained(family, each)) for each in (STAGES, "auto")))


@pytest.mark.full
def test_so_does_one_whose_own_norms_round_to_float32(trained):
    found, expected = (read_run(trained("gemma3", each)) for each in (STAGES, "auto"))
    assert error(found.initial, expected.initial) == 0.0
    assert found.losses == pytest.approx(expected.losses, rel=1e-9)
    assert error(found.gradients[0], expected.gradients[0]) <= 1e-6


@pytest.mark.full
@pytest.mark.parametrize("family", ["qwen2_vl, tied", "qwen2_5_vl"])
def test_so_does_one_whose_tower_is_in_stages_on_the_same_ranks(trained, family):
    assert_equal(*(read_run(trained(family, each)) for each in (BOTH, "auto")))


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "degree"), [("qwen3_vl", "tensor"), ("qwen2_vl, tied", "tensor"), ("qwen3_vl", "context")]
)
def test_so_do_stages_whose_ranks_share_layers_or_sequences(trained, family, degree):
    assert_equal(read_run(trained(family, OF_TWO_RANKS, degree=degree)), read_run(trained(family, "auto")))


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("qwen2_vl, tied", {"recompute": True}),
        ("qwen3_vl", {"recompute": "selective"}),
    ],
)
def test_so_does_one_that_computes_its_layers_again(trained, family, settings):
    assert_equal(read_run(trained(family, STAGES, **settings)), read_run(trained(family, "auto")))


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "degree"), [(STAGES, ""), (OF_TWO_RANKS, "tensor"), (BOTH, ""), (BOTH_IN_SHARDS, "")]
)
def test_a_run_in_stages_goes_on_from_its_checkpoint_with_the_same_bits(trained, layout, degree):
    runs = (trained("qwen2_vl, tied", layout, after, degree=degree) for after in ("", layout))
    whole, resumed = map(read_run, runs)
    assert same_bits(resumed, _from(whole, SAVED))


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "after", "degree"),
    [
        ("colocated 1", STAGES, ""),
        (STAGES, "auto", ""),
        ("colocated 1", OF_TWO_RANKS, "tensor"),
        ("colocated 1", BOTH, ""),
        (BOTH, STAGES, ""),
        (BOTH, BOTH_IN_SHARDS, ""),
        (BOTH_IN_SHARDS, "auto", ""),
    ],
)
def test_checkpoints_pass_between_stages_and_one_rank(trained, layout, after, degree):
    found = read_run(trained("qwen2_vl, tied", layout, after, degree=degree))
    assert error(found.weights[-1], read_run(trained("qwen2_vl, tied", "auto")).weights[-1]) <= 1e-9


def _from(run, step):
    """The steps of a run from one on."""
    parts = {name: getattr(run, name)[step:] for name in ("losses", "gradients", "weights")}
    return replace(run, initial=run.weights[step - 1], **parts)
