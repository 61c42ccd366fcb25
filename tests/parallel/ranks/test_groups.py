"""Each role is a world of its own, and what spans roles waits for the end of the step."""

from __future__ import annotations

import re

import pytest

from tests.exactness.data import write_steps
from tests.exactness.layouts import ranks_of
from tests.forks import Job, read_down, run_jobs

WORKS = ["works begin", "works end"]
SPEC = ["all: broadcast", "all: broadcast"]
"""The first step with media tells all ranks what a row of features is: its size, then itself."""
LOG = ["role: all_reduce"]
"""Losses, target tokens and logged values of the backbone ranks."""
NAMES = ["role: all_gather", "role: all_gather", "role: all_reduce"]
"""Names that were never logged before."""
NORM = ["all: all_reduce"]
"""With clipping on: the norm over both halves."""
SIGTERM = ["role: broadcast"]
"""Lightning's own, once a step; left out under flowtrain, see `PreemptionCheckpoint`."""

BACKBONE = [WORKS + LOG + NORM] * 3
ENCODER = [WORKS + NORM] * 3
COLOCATED = [WORKS + LOG] * 3
PLAIN = [LOG + SIGTERM] * 3

EXPECTED = {
    "2+2": [
        [SPEC + WORKS + LOG + NAMES + NORM, *BACKBONE],
        [SPEC + WORKS + LOG + NAMES + NORM, *BACKBONE],
        [SPEC + WORKS + NORM, *ENCODER],
        [SPEC + WORKS + NORM, *ENCODER],
    ],
    "colocated 2": [[SPEC + WORKS + LOG + NAMES, *COLOCATED]] * 2,
    "ddp 2": [[LOG + NAMES + SIGTERM, *PLAIN]] * 2,
}
"""Layout -> rank -> step -> every collective but the sums of gradients, in order."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("groups")
    write_steps(folder)
    return str(folder)


@pytest.mark.parametrize("layout", EXPECTED)
def test_in_a_step_only_gradients_are_summed_and_all_else_is_done_at_its_boundary(tmp_path, data, layout):
    arguments = {"data": data, "layout": layout, "clip": 0.1}
    job = Job(layout, "tests.parallel.group_jobs:list_collectives", ranks_of(layout), arguments)
    ranks = read_down(run_jobs(tmp_path, [job])[layout].check().folder)
    assert [[[each for each in step if each != "gradients"] for step in rank] for rank in ranks] == EXPECTED[layout]
    halves = 1 if layout == "2+2" else 2
    assert all(step.count("gradients") == halves for rank in ranks for step in rank)


def test_gradients_of_a_role_are_summed_while_its_last_backward_runs(tmp_path, data):
    job = Job("2+2", "tests.parallel.group_jobs:list_collectives", 4, {"data": data, "layout": "2+2"})
    first, *_ = read_down(run_jobs(tmp_path, [job])["2+2"].check().folder)
    assert all(step.index("gradients") < step.index("works end") for step in first)


def test_backbone_gradients_are_summed_while_the_encoders_last_backward_runs(tmp_path, data):
    arguments = {"data": data, "layout": "colocated 2", "early": False}
    job = Job("both", "tests.parallel.group_jobs:list_collectives", 2, arguments)
    ranks = read_down(run_jobs(tmp_path, [job])["both"].check().folder)
    meanwhile = [[step.index("gradients") < step.index("works end") for step in rank] for rank in ranks]
    assert any(map(any, meanwhile))
    assert not any(rank[2] for rank in meanwhile), "a step without pictures leaves the encoder no backward"
    for step in (step for rank in ranks for step in rank):
        _, encoder = (place for place, event in enumerate(step) if event == "gradients")
        assert step.index("works end") < encoder < step.index("role: all_reduce"), step


def test_all_ranks_meet_in_one_group_and_each_role_in_its_own(tmp_path):
    job = Job("groups", "tests.parallel.group_jobs:cross_group", 3)
    ranks = read_down(run_jobs(tmp_path, [job])["groups"].check().folder)
    for seen in ranks:
        assert seen["sum"] == [6]
        assert seen["most"] == [2]
        assert seen["broadcast"] == [10]
        assert seen["object"] == {"from": 2}
        assert seen["gathered"] == ["rank 0", "rank 1", "rank 2"]
        assert seen["again the same"]
    assert [seen["role"] for seen in ranks] == [[0, 2], [1, 2], [0, 1]]
    assert [seen["sum of role"] for seen in ranks] == [[3], [3], [3]]
    assert [seen["objects of role"] for seen in ranks] == [[0, 1], [0, 1], [2]]
    assert [seen["role of another layout"] for seen in ranks] == [[0, 1], [0, 2], [1, 2]]
    assert [seen["gathered in another layout"] for seen in ranks] == [[0], [1, 2], [1, 2]]
    assert [seen["objects of all"] for seen in ranks] == [[0, 1, 2]] * 3
    assert [seen["objects of a part"] for seen in ranks] == [[0, 1]] * 3
    assert [seen["beside a default device"][:3] for seen in ranks] == [[2, [0, 1, 2], [2.0]]] * 3
    assert [seen["beside a default device"][3] for seen in ranks] == [[0], [1, 2], [1, 2]]


def test_collectives_of_the_group_over_all_ranks_are_counted(tmp_path):
    job = Job("groups", "tests.parallel.group_jobs:cross_group", 3)
    ranks = read_down(run_jobs(tmp_path, [job])["groups"].check().folder)
    # Each rank has shown that it knows the key, one message is broadcast, and one of each rank gathered; each time a
    # size and the bytes.
    objects = 1 + 1 + 1
    assert [seen["collectives"] for seen in ranks] == [2 + 1 + 2 * objects] * 3


def test_meshes_of_an_earlier_layout_are_forgotten(tmp_path):
    job = Job("meshes", "tests.parallel.group_jobs:sum_by_meshes", 3)
    assert read_down(run_jobs(tmp_path, [job])["meshes"].check().folder) == [[6.0, 6.0]] * 2 + [[]]


def test_forks_of_a_process_that_was_connected_connect_anew(tmp_path):
    job = Job("forks", "tests.parallel.group_jobs:fork_after_a_run", 1)
    assert read_down(run_jobs(tmp_path, [job])["forks"].check().folder) == [[0, 1], [0, 1]]


def test_a_fork_of_a_connected_process_is_refused_and_leaves_its_groups_alone(tmp_path):
    job = Job("fork during", "tests.parallel.group_jobs:fork_during_a_run", 1)
    folder = run_jobs(tmp_path, [job])["fork during"].check().folder
    assert read_down(folder) == [{"fork ended with": 5, "gathered afterwards": ["here"]}]
    assert re.match(r"This process was forked from process \d+ while", (folder / "refusal.txt").read_text())


def test_groups_are_made_anew_for_another_timeout_and_where_somebody_has_left_them(tmp_path):
    job = Job("anew", "tests.parallel.group_jobs:connect_again", 1)
    (seen,) = read_down(run_jobs(tmp_path, [job])["anew"].check().folder)
    assert seen["same settings, same groups"]
    assert seen["another timeout, other groups"]
    assert seen["groups that were left are made anew"]
    assert seen["refusal"].startswith("torch.distributed is already initialised in this process, by code outside")
    assert seen["the group of others stays"]
