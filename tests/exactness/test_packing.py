"""However steps are packed, losses, gradients and weights of every layout are those of one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest

from tests.exactness.compare import Run, error, read_run
from tests.exactness.data import STEPS, write_steps
from tests.exactness.layouts import ranks_of
from tests.forks import Job, run_jobs

COSTS = {
    "cost": {"linear": 1.0, "quadratic": 0.01, "constant": 0.0},
    "media_costs": {"encoder": {"linear": 0.5, "quadratic": 0.0, "constant": 0.0}},
}
PACKINGS: dict[str, dict[str, Any]] = {
    "samples": {"packing": {"sync_every": "microbatch", **COSTS}},
    "tokens": {"token_steps": {"microbatches": 4, "balance_group": 2, "max_delay": 3}},
    "unsaid": {"global_batch_size": None},
    "cut": {"encoder_budget": 40},  # patches: several encoder batches for most microbatches
    "tokens, costs": {"token_steps": {"microbatches": 4, "balance_group": 4}, "packing": COSTS, "shuffle": True},
}
LAYOUTS = ("ddp 2", "colocated 2", "1+2", "2+4")
QUICK = [("ddp 2", "tokens"), ("1+2", "tokens"), ("colocated 2", "cut"), ("2+4", "tokens, costs")]
ALL = QUICK + [pytest.param(*case, marks=pytest.mark.full) for case in product(LAYOUTS, PACKINGS) if case not in QUICK]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Run]:
    """Runs a layout with a packing, once."""
    folder = tmp_path_factory.mktemp("packings")
    write_steps(folder / "data")

    @cache
    def run(layout: str, packing: str) -> Run:
        arguments = {"data": str(folder / "data"), "layout": layout, "settings": PACKINGS[packing]}
        name = f"{layout} {packing}"
        job = Job(name, "tests.exactness.train:train", ranks_of(layout), arguments)
        return read_run(run_jobs(folder, [job])[name].check().folder)

    return run


@pytest.mark.parametrize(("layout", "packing"), ALL)
def test_every_layout_trains_as_one_process_does(run: Callable[[str, str], Run], layout: str, packing: str):
    found, reference = run(layout, packing), run("auto", "samples" if packing == "cut" else packing)
    assert len(found.losses) == STEPS
    if packing == "cut":
        positions = np.array(found.microbatches).max(axis=0)
        assert (np.array(found.encoder_batches).max(axis=0) > positions).any(), "some position has several batches"
    assert found.losses == pytest.approx(reference.losses, rel=1e-9)
    for step in range(STEPS):
        assert error(found.gradients[step], reference.gradients[step]) <= 1e-9
        assert error(found.weights[step], reference.weights[step]) <= 1e-9


@pytest.mark.parametrize("layout", ["ddp 2", "1+2"])
def test_ranks_have_their_equal_share_of_the_microbatches(run: Callable[[str, str], Run], layout: str):
    ranks = run(layout, "tokens").microbatches
    assert ranks == [[4 // len(ranks)] * STEPS] * len(ranks)
