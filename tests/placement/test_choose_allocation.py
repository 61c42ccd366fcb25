"""What rank 0 chooses where nothing is said, and how a run keeps what was chosen."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from flowtrain_lightning.allocator import Allocation, Layout, default_allocation
from flowtrain_lightning.allocator.plan_file import read_plan
from flowtrain_lightning.checkpoint.checkpoint_index import Index
from flowtrain_lightning.checkpoint.index_file import write_index
from flowtrain_lightning.placement.choose_allocation import LaunchContext, PlacementDecision, choose_allocation
from flowtrain_lightning.placement.request import make_request
from tests.tiny import TinyVLM, tiny_data, write_records

SHORT = timedelta(seconds=0.2)


def launch(profile="auto", checkpoint=None, data=None, rank=0, ranks=2, nodes=1, module=None):
    strategy = SimpleNamespace(root_device=torch.device("cpu"))
    return LaunchContext(
        trainer=SimpleNamespace(datamodule=data, strategy=strategy, precision="32-true"),
        module=module or TinyVLM(),
        request=make_request(None, None, None, profile),
        rank=rank,
        ranks=ranks,
        nodes=nodes,
        ranks_per_device=1,
        kept_batches=4,
        resumed=SimpleNamespace(checkpoint=lambda trainer: checkpoint),
    )


def chosen(**given):
    return choose_allocation(launch(**given), dist.HashStore(), SHORT)


def saved(folder, allocation):
    """A checkpoint of which nothing is there but its allocation."""
    folder.mkdir()
    write_index(folder, Index(run=allocation))
    return str(folder)


def test_without_a_profile_the_rule_decides():
    found = chosen(profile="off", ranks=8)
    assert found.allocation == default_allocation(8)
    assert "rule of thumb, as profile='off'" in found.reason


def test_on_several_nodes_the_rule_puts_encoder_ranks_on_each():
    assert chosen(profile="off", ranks=8, nodes=2).allocation.ranks["encoder"] == (3, 7)


def test_without_training_data_the_rule_decides(tmp_path):
    write_records(tmp_path, 8, "val.jsonl")
    for data in (None, tiny_data(tmp_path)):
        found = chosen(data=data)
        assert found.allocation == default_allocation(2)
        assert "no training data" in found.reason


def test_what_cannot_be_planned_is_told_and_left_to_the_rule(tmp_path, monkeypatch):
    write_records(tmp_path, 20)
    monkeypatch.setattr("sys.orig_argv", ["python", "-c", "raise ValueError('no such thing')"])
    with pytest.warns(UserWarning, match=r"could not be planned: .*exit code 1.*no such thing.*profile='off'"):
        found = chosen(data=tiny_data(tmp_path))
    assert found.allocation == default_allocation(2)
    assert "planning failed" in found.reason


def test_a_run_that_goes_on_keeps_the_saved_allocation_also_without_a_profile(tmp_path):
    saved_on = default_allocation(3, encoder_ranks=2)
    path = saved(tmp_path / "a.ckpt", saved_on.state_dict())
    assert chosen(profile="off", checkpoint=path, ranks=3).allocation == saved_on


@pytest.mark.parametrize(
    ("allocation", "words"),
    [
        (default_allocation(4), "is for 4 ranks, but the Trainer starts 2 ranks"),
        (
            Allocation(
                "colocated",
                dict.fromkeys(("encoder", "backbone"), Layout(1, context=2)),
                dict.fromkeys(("encoder", "backbone"), (0, 1)),
            ),
            "only the backbone has sequences to share",
        ),
    ],
)
def test_a_saved_allocation_that_does_not_fit_is_chosen_anew(tmp_path, capsys, caplog, allocation, words):
    path = saved(tmp_path / "a.ckpt", allocation.state_dict())
    with caplog.at_level("INFO", "lightning.pytorch"):
        found = chosen(profile="off", checkpoint=path)
    assert found.allocation == default_allocation(2)
    assert words in caplog.text + capsys.readouterr().err


def test_a_plain_checkpoint_says_nothing_about_ranks(tmp_path):
    (tmp_path / "plain.ckpt").touch()
    assert chosen(profile="off", checkpoint=str(tmp_path / "plain.ckpt")).allocation == default_allocation(2)


def test_another_rank_does_not_wait_for_ever():
    with pytest.raises(TimeoutError, match=r"Rank 0 had not chosen the allocation after 0 s"):
        chosen(rank=1)


ASKED = PlacementDecision(default_allocation(2), "it was asked for")


def test_loggers_get_allocation_and_reason():
    kept = {}
    trainer = SimpleNamespace(loggers=[SimpleNamespace(log_hyperparams=kept.update)])
    ASKED.record(trainer, "s3://a-bucket")  # where no file can be written
    assert kept == {
        "allocation": "separate: encoder on rank 1 (data 1, replicate); backbone on rank 0 (data 1, replicate)",
        "allocation_reason": "it was asked for",
    }


def test_the_file_says_why_and_can_be_read_back(tmp_path):
    ASKED.record(SimpleNamespace(loggers=[]), str(tmp_path / "new"))
    path = tmp_path / "new" / "allocation.yaml"
    assert "because it was asked for." in path.read_text()
    assert read_plan(path) == ASKED.allocation


def test_a_folder_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "file").touch()
    with pytest.warns(UserWarning, match="allocation is not kept as a file"):
        ASKED.record(SimpleNamespace(loggers=[]), str(tmp_path / "file" / "folder"))
