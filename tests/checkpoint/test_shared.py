"""A folder that not all ranks see takes no checkpoint: all ranks say so, and what was there stays."""

from __future__ import annotations

from tests.forks import Job, run_jobs


def test_all_ranks_name_those_that_do_not_see_the_folder_and_nothing_is_left_in_it(tmp_path):
    job = Job("blind", "tests.checkpoint.saving:save_where_rank_1_is_blind", 2)
    done = run_jobs(tmp_path, [job])["blind"].check()
    kept = done.folder / "kept"
    for rank in range(2):
        said = (done.folder / f"said{rank}.txt").read_text()
        assert said.startswith(f"Rank 1 cannot see what rank 0 writes into {kept}, ")
        assert "Trainer(default_root_dir=...)" in said
    assert [path.name for path in kept.iterdir()] == ["last.ckpt"]
    assert (kept / "last.ckpt" / "meta.pt").is_file()
