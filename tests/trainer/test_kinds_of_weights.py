"""DTensors of several meshes and plain weights in one parameter group are stepped by PyTorch's fast kernels."""

from __future__ import annotations

import pytest

from tests.forks import Job, read_down, run_jobs
from tests.trainer.kinds_of_weights import OPTIMIZERS, STEPS


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("kinds")
    job = Job("kinds", "tests.trainer.kinds_of_weights:step_all_kinds", 1)
    (found,) = read_down(run_jobs(folder, [job])[job.name].check().folder)
    return found


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weights_of_several_kinds_are_stepped_as_plain_ones(told, name):
    assert told[name]["difference"] <= 1e-6


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_closures_schedulers_and_checkpoints_see_the_groups_of_the_user(told, name):
    assert told[name]["seen"] == [3] * STEPS
    plain, mixed = told[name]["rates"]
    assert mixed == plain
    plain, mixed = told[name]["saved"]
    assert mixed == plain


def test_a_step_that_fails_leaves_the_groups_of_the_user(told):
    assert told["failed"] == [3, 3]
