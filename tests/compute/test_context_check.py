"""Context ranks whose results are not those of one rank are refused by values, whatever sees a slice only."""

from __future__ import annotations

from typing import Any

import pytest

from tests.exactness.data import write_steps
from tests.exactness.layouts import ranks_of
from tests.forks import Job, read_down, run_jobs

CONTEXT = {"context": 2}


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What each rank says of a module."""
    folder = tmp_path_factory.mktemp("context")
    write_steps(folder / "data")

    def train(kind: str, layout: str, role: dict[str, Any], precision: str = "64-true") -> list[dict[str, Any]]:
        arguments = {"data": str(folder / "data"), "kind": kind, "layout": layout, "role": role, "precision": precision}
        name = f"{kind} {layout} {precision} {len(role)}"
        job = Job(name, "tests.parallel.unlike_ranks:train", ranks_of(layout), arguments)
        return read_down(run_jobs(folder, [job])[job.name].folder)

    return train


WRONG = ("no attention", "one of four", "shift", "counted positions", "mean", "positions", "loss")
LONG = [(kind, "64-true") for kind in WRONG] + [(kind, "bf16-mixed") for kind in WRONG if kind != "shift"]
"""A shift changes one token at a border by a tenth: in bfloat16 that is rounding."""


@pytest.mark.parametrize(
    ("kind", "precision"),
    [
        ("one of four", "32-true"),
        *(pytest.param(*case, marks=pytest.mark.full) for case in LONG),
    ],
)
def test_what_looks_at_the_tokens_of_one_rank_only_is_refused(train, kind, precision):
    for rank in train(kind, "colocated 2", CONTEXT, precision):
        assert "ContextError: The backbone's 2 context ranks compute something else together" in rank["said"]
        assert ("No attention reached the exchange" in rank["said"]) == (kind == "no attention")
        assert not rank["steps"]


@pytest.mark.full
@pytest.mark.parametrize("precision", ["64-true", "32-true", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("kind", ["right", "unusual"])
@pytest.mark.parametrize("role", [CONTEXT, {**CONTEXT, "shard": "fsdp"}], ids=["whole copies", "fsdp"])
def test_rounding_and_unusual_modules_are_no_difference(train, kind, role, precision):
    for rank in train(kind, "1+4", role, precision):
        assert not rank["said"]
        assert len(rank["steps"]) == 4
