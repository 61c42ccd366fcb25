"""Pictures that several samples of a step have: encoded once, they train as in a loop that encodes each time."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.exactness.compare import Run
from tests.exactness.data import MIXED, write_steps
from tests.exactness.test_sharded import FSDP, HSDP, Case, check_against_plain_loop, runs_in

READERS = 5
"""As often as a picture is seen: one after another, so that some records have one twice, and most steps all of them."""

CASES = [
    pytest.param(case, id=str(case), marks=() if quick else pytest.mark.full)
    for quick, case in (
        (False, Case("1+2", {}, kind="tiny")),
        (True, Case("auto", {}, kind="tiny")),
        (False, Case("ddp 2", {}, kind="tiny")),
        (False, Case("colocated 1", {}, kind="tiny", strategy={"encoder_activations": 1})),
        (False, Case("colocated 2", {}, kind="tiny", clip=0.2)),
        (False, Case("2+3", {}, "32-true", kind="tiny", strategy={"encoder_activations": 0})),
        (False, Case("mixed 1+2", {}, kind="tiny", data={"encoder_budget": 40})),
        (False, Case("2+2", {"encoder": FSDP, "backbone": FSDP}, data={"encoder_budget": 40})),
        (False, Case("colocated 2", {"encoder": FSDP, "backbone": FSDP}, strategy={"encoder_activations": 1})),
        (False, Case("mixed 2+2", {"encoder": HSDP, "backbone": FSDP})),
        (False, Case("1+2", {"backbone": {"tensor": 2}}, kind="divided")),
        (False, Case("colocated 2", {"encoder": {"tensor": 2}, "backbone": {"tensor": 2}}, kind="divided")),
        (False, Case("1+4", {"backbone": {"context": 2}}, kind="divided")),
        (False, Case("colocated 2", {"backbone": {"context": 2}}, "32-true", kind="divided")),
    )
]


def write_shared_steps(folder: Path) -> None:
    """The steps of all layouts' tests, in which every fifth picture takes the place of those after it."""
    write_steps(folder)
    file = folder / "train.jsonl"
    records = [json.loads(line) for line in file.read_text().splitlines()]
    pictures = [(record, number) for record in records for number in range(len(record["images"]))]
    for place, (record, number) in enumerate(pictures):
        first, at = pictures[place - place % READERS]
        record["images"][number] = first["images"][at]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """Runs a case, or the reference (layout ``"plain"``), once."""
    folder = tmp_path_factory.mktemp("shared")
    write_shared_steps(folder / "data")
    return runs_in(folder)


@pytest.mark.parametrize("case", CASES)
def test_pictures_that_samples_share_train_as_if_each_were_encoded(run: Callable[..., Run], case: Case):
    check_against_plain_loop(run, case)
    assert any(of_rank[MIXED] for of_rank in run(case).encoder_batches)
