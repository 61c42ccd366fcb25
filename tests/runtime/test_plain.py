"""Under plain Lightning a step computes what it computes alone, whatever this process did before."""

from __future__ import annotations

from tests.exactness.data import write_steps
from tests.forks import Job, read_down, run_jobs


def test_ddp_after_a_separate_run_is_told_of_the_roles_groups_and_trains_once_they_are_left(tmp_path):
    write_steps(tmp_path)
    job = Job("ddp", "tests.runtime.plain_jobs:ddp_after_flowtrain", 2, {"data": str(tmp_path)})
    first, second = read_down(run_jobs(tmp_path, [job])["ddp"].check().folder)
    for rank in (first, second):
        assert rank["told"].startswith("This Trainer has 2 ranks, but torch.distributed's default group has 1:")
        assert "torch.distributed.destroy_process_group()" in rank["told"]
        assert rank["ranks"] == 2
    assert first["weights"] == second["weights"]
