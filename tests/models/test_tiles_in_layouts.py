"""A picture whose tiles are dealt to all ranks that encode trains as a whole one."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from tests.exactness.compare import error, read_run
from tests.exactness.data import write_steps
from tests.exactness.layouts import ranks_of
from tests.forks import Job, run_jobs

ROLES: dict[str, dict[str, Any] | None] = {
    "whole": None,
    "fsdp": {role: {"shard": "fsdp"} for role in ("encoder", "backbone")},
    "context": {"backbone": {"context": 2}},
}
BUDGET = 64
"""Patches of an encoder batch: those of four tiles, and pictures have up to five."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The folder of a run of a family on a layout."""
    folder = tmp_path_factory.mktemp("tiles")
    write_steps(folder / "data")

    @cache
    def trained(family: str, layout: str, roles: str = "whole", budget: int | None = None) -> Path:
        arguments = {"data": str(folder / "data"), "layout": layout, "family": family}
        # Llama's norms round to float32, where a last bit of a weight can become 6e-8, whether pictures are cut or not:
        # with Idefics3's numbers five steps make 1e-7 of it.
        arguments |= {"roles": ROLES[roles], "encoder_budget": budget, "exact_norms": family == "idefics3"}
        job = Job(f"{family} {layout} {roles} {budget}", "tests.models.training:train", ranks_of(layout), arguments)
        return run_jobs(folder, [job])[job.name].check().folder

    return trained


@pytest.mark.parametrize(
    ("family", "layout", "roles"),
    [
        ("internvl", "1+2", "whole"),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (
                ("internvl", "auto", "whole"),
                ("internvl", "colocated 2", "whole"),
                ("internvl", "colocated 2", "context"),
                ("internvl", "1+2", "context"),
                ("internvl", "2+2", "fsdp"),
                ("smolvlm", "2+1", "whole"),
                ("smolvlm", "colocated 2", "fsdp"),
                ("smolvlm", "mixed 1+2", "whole"),
                ("idefics3", "1+1", "whole"),
                ("idefics3", "colocated 2", "whole"),
            )
        ),
    ],
)
def test_a_picture_that_is_dealt_in_tiles_trains_as_a_whole_one(trained, family, layout, roles):
    found, expected = read_run(trained(family, layout, roles, BUDGET)), read_run(trained(family, "auto"))
    assert sum(map(sum, found.encoder_batches)) > sum(map(sum, expected.encoder_batches))
    assert error(found.initial, expected.initial) == 0.0
    assert found.losses == pytest.approx(expected.losses, rel=1e-9)
    pairs = zip(found.gradients, expected.gradients, strict=True)
    assert max(error(*pair) for pair in pairs) <= 1e-9
