"""Modules that only some samples run: found by the check, and refused where ranks would hang."""

from __future__ import annotations

import pytest

from flowtrain_lightning.allocator import Layout
from flowtrain_lightning.packing_check import report_of
from flowtrain_lightning.trainer.refusals import refuse_conditional_modules
from tests.forks import Job, run_jobs
from tests.packing_check.right_modules import Projects, ProjectsSome
from tests.tiny import TinyVLM, tiny_data, write_records

pytestmark = pytest.mark.checks_packing


@pytest.fixture
def data(tmp_path):
    write_records(tmp_path, 16)
    return tiny_data(tmp_path)


def test_what_only_some_samples_run_is_found_by_its_path(data):
    assert report_of(TinyVLM(), data).conditional == []
    assert report_of(Projects(), data).conditional == []
    report = report_of(ProjectsSome(), data)
    assert report.conditional == ["projector"]
    assert report.findings == [], "packing changes nothing"


def test_it_is_refused_where_ranks_gather_the_weights_of_each_module_together():
    module = ProjectsSome()
    module.conditional_modules = ("projector",)
    whole = Layout(2)
    refuse_conditional_modules({"encoder": Layout(2, shard="deepspeed-3"), "backbone": whole}, module)
    with pytest.raises(ValueError, match=r"The module 'projector' is run for some samples .* the backbone has shard"):
        refuse_conditional_modules({"encoder": whole, "backbone": Layout(2, shard="deepspeed-3")}, module)


@pytest.mark.full
def test_a_fit_by_zero_3_refuses_it_in_setup(tmp_path):
    strategy = {"placement": "colocated", "roles": {"backbone": {"shard": "deepspeed-3"}}}
    arguments = {"module": "ProjectsSome", "strategy": strategy, "ranks": 2}
    job = Job("fit", "tests.packing_check.fitting:fit", 2, arguments, imports="deepspeed")
    done = run_jobs(tmp_path, [job])["fit"].check()
    texts = [(done.folder / f"refused{rank}.txt").read_text() for rank in range(2)]
    assert all("The module 'projector' is run for some samples and not for others" in text for text in texts)
