"""Under bf16-mixed, where casts of weights are kept, no layout is further from float32 than plain Lightning."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from tests.exactness.compare import Run, error, read_run
from tests.exactness.data import write_steps
from tests.exactness.layouts import ranks_of
from tests.forks import Job, run_jobs

pytestmark = pytest.mark.full

FSDP = {"shard": "fsdp"}
TENSOR = {"tensor": 2}
RECOMPUTED = {"recompute": "full"}
SELECTIVE = {"recompute": "selective"}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "one rank": ("colocated 1", {}),
    "one rank that recomputes": ("colocated 1", {"encoder": RECOMPUTED, "backbone": SELECTIVE}),
    "encoder batches computed twice": ("1+1", {"encoder": SELECTIVE, "backbone": RECOMPUTED}),
    "shards": ("colocated 2", {"encoder": FSDP, "backbone": {**FSDP, **RECOMPUTED}}),
    "shards beside whole copies": ("colocated 2", {"backbone": FSDP}),
    "tensor ranks": ("1+2", {"backbone": {**TENSOR, **RECOMPUTED}}),
    "tensor ranks of both roles": ("colocated 2", {"encoder": TENSOR, "backbone": TENSOR}),
    "stages": ("1+2", {"backbone": {"pipeline": 2, **RECOMPUTED}}),
    "stages in shards": ("1+4", {"backbone": {"pipeline": 2, **FSDP}}),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """Trains on a layout, once."""
    folder = tmp_path_factory.mktemp("mixed precision")
    write_steps(folder / "data")

    @cache
    def run(name: str, layout: str, precision: str) -> Run:
        arguments: dict[str, Any] = {"data": str(folder / "data"), "layout": layout, "precision": precision}
        arguments["kind"] = "divided"
        if name in CASES:
            kept = 0 if name == "encoder batches computed twice" else 2
            arguments["strategy"] = {"encoder_activations": kept, "roles": CASES[name][1]}
        job = Job(f"{name} {precision}", "tests.exactness.train:train", ranks_of(layout), arguments)
        return read_run(run_jobs(folder, [job])[job.name].check().folder)

    return run


@pytest.mark.parametrize("name", CASES)
def test_no_layout_is_further_from_float32_than_plain_lightning(run: Callable[..., Run], name: str):
    exact = run("plain", "auto", "32-true").gradients[0]
    plain = run("plain", "auto", "bf16-mixed").gradients[0]
    found = run(name, CASES[name][0], "bf16-mixed").gradients[0]
    assert error(found, exact) <= 1.5 * error(plain, exact)


def test_one_rank_computes_what_plain_lightning_does(run: Callable[..., Run]):
    plain, found = run("plain", "auto", "bf16-mixed"), run("one rank", "colocated 1", "bf16-mixed")
    assert found.losses[0] == pytest.approx(plain.losses[0], rel=1e-6)
    assert max(error(*pair) for pair in zip(found.gradients[:1], plain.gradients[:1], strict=True)) <= 1e-5
