"""Files of images and of sound train an eye, an ear and a decoder as a plain loop does that reads them by itself."""

from __future__ import annotations

import pytest

from tests.exactness.compare import Run, error, read_run
from tests.exactness.hearing_files import write_files
from tests.exactness.layouts import ranks_of
from tests.forks import Job, run_jobs

LIMIT = 1e-10
LAYOUTS = ["auto", "1+1+1", "colocated 2"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    folder = tmp_path_factory.mktemp("heard")
    records, target = str(write_files(folder)), "tests.exactness.hearing_files"
    jobs = [Job("plain", f"{target}:train_plainly", 1, {"records": records})]
    jobs += [Job(each, f"{target}:train", ranks_of(each), {"layout": each, "records": records}) for each in LAYOUTS]
    return {name: read_run(done.check().folder) for name, done in run_jobs(folder, jobs).items()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sound_of_files_trains_beside_images_as_the_plain_loop_does(runs: dict[str, Run], layout: str):
    found, plain = runs[layout], runs["plain"]
    assert error(found.initial, plain.initial) == 0.0
    assert found.losses == pytest.approx(plain.losses, rel=LIMIT)
    assert max(map(error, found.gradients, plain.gradients)) <= LIMIT
    assert max(map(error, found.weights, plain.weights)) <= LIMIT


def test_both_encoders_learn(runs: dict[str, Run]):
    names = {name.partition(".")[0] for step in runs["auto"].gradients for name, of in step.items() if of is not None}
    assert names == {"eye", "ear", "backbone"}
