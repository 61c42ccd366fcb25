"""`ckpt_path="last"` is the newest checkpoint of this module and these data, whichever start saved it."""

from __future__ import annotations

import os
import shutil
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from flowtrain_lightning import FlowTrainStrategy
from flowtrain_lightning.checkpoint.index_file import INDEX
from flowtrain_lightning.parallel.ranks.connecting import connect_groups
from flowtrain_lightning.trainer.last_checkpoint import LastCheckpointError, refuse_unlike_ranks
from tests.forks import Job, read_down, run_jobs, write_down
from tests.tiny import TinyVLM, tiny_data, write_records


class OtherVLM(TinyVLM):
    """Another module with the very same weights."""


def fit(folder: Path, steps: int, *, kind: Any = TinyVLM, devices: int = 1, **changes: Any) -> L.Trainer:
    """Starts training anew, as a new process would, up to a number of steps, with ``ckpt_path="last"``."""
    L.seed_everything(7, verbose=False)
    chosen = {name: changes.pop(name) for name in ("ckpt_path", "data") if name in changes}
    model = {name: changes.pop(name) for name in ("levels", "lr") if name in changes}
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    strategy = FlowTrainStrategy(placement="colocated") if devices == 1 else FlowTrainStrategy(encoder_ranks=1)
    given: dict[str, Any] = {"strategy": strategy, "default_root_dir": folder, "max_epochs": -1, "limit_val_batches": 0}
    given["enable_checkpointing"] = "callbacks" in changes
    trainer = L.Trainer(accelerator="cpu", devices=devices, max_steps=steps, **(quiet | given | changes))
    data = tiny_data(folder / "data", global_batch_size=4, **chosen.get("data", {}))
    trainer.fit(kind(**model), data, ckpt_path=chosen.get("ckpt_path", "last"))
    return trainer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_records(tmp_path / "data", 20)
    return tmp_path


def said(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(message for message in caplog.messages if "ckpt_path" in message or "passes over" in message)


def chosen(trainer: L.Trainer) -> str:
    return os.path.relpath(str(trainer.ckpt_path), trainer.default_root_dir)


def test_each_start_goes_on_from_the_one_before_though_each_has_a_folder_of_its_own(folder, caplog):
    caplog.set_level("INFO")
    logs = {"logger": CSVLogger(folder, "logs"), "callbacks": [ModelCheckpoint(save_last=True)]}
    assert fit(folder, 2, **logs).global_step == 2
    assert f"there is no checkpoint below {folder}, so training begins from the start" in said(caplog)
    logs = {"logger": CSVLogger(folder, "logs"), "callbacks": [ModelCheckpoint(save_last=True)]}
    second = fit(folder, 4, **logs)
    assert chosen(second) == "logs/version_0/checkpoints/last.ckpt"
    assert f"{folder}/logs/version_0/checkpoints/last.ckpt, saved after step 2 in epoch 0." in said(caplog)
    (kept,) = (folder / "logs" / "version_1" / "checkpoints").glob("last.ckpt")
    assert chosen(fit(folder, 6)) == str(kept.relative_to(folder))


def test_it_is_found_where_checkpoint_callbacks_and_loggers_write_elsewhere(folder, tmp_path_factory):
    for name in ("callback", "logger"):
        elsewhere, root = tmp_path_factory.mktemp(name), tmp_path_factory.mktemp("root")
        shutil.copytree(folder / "data", root / "data")

        def settings(name=name, elsewhere=elsewhere) -> dict[str, Any]:
            if name == "callback":
                return {"callbacks": [ModelCheckpoint(elsewhere / "a" / "b", save_last=True)]}
            return {"logger": CSVLogger(elsewhere, "logs"), "callbacks": [ModelCheckpoint(save_last=True)]}

        fit(root, 2, **settings())
        assert elsewhere in Path(str(fit(root, 3, **settings()).ckpt_path)).parents


def test_what_was_saved_last_is_taken_whatever_clock_and_file_system_say(folder, monkeypatch):
    trainer = fit(folder, 2)
    trainer.save_checkpoint(folder / "b.ckpt")
    with monkeypatch.context() as patched:
        patched.setattr("time.time", lambda: 1000.0)  # the next start is on a host whose clock is far behind
        trainer = fit(folder, 4)
        trainer.save_checkpoint(folder / "a.ckpt")
    os.utime(folder / "b.ckpt" / INDEX)
    assert chosen(fit(folder, 4)) == "a.ckpt"
    another = fit(folder, 1, ckpt_path=None)  # begins anew: what it saves is newer, of whatever step
    another.save_checkpoint(folder / "c.ckpt")
    assert chosen(fit(folder, 4)) == "c.ckpt"


def test_settings_that_may_change_between_starts_do_not_hinder(folder):
    fit(folder, 2).save_checkpoint(folder / "a.ckpt")
    changed = fit(folder, 5, lr=1e-3, precision="bf16-mixed", data={"token_budget": 200, "num_workers": 1})
    assert chosen(changed) == "a.ckpt"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"kind": OtherVLM}, "step 2: it is of TinyVLM, and this module is OtherVLM"),
        ({"levels": 2}, "step 2: it lacks encoder.heads.1.bias, encoder.heads.1.weight of TinyVLM, and has besides"),
        ({"data": {"seed": 3}}, "step 2: its position in the data means other samples: seed was 1, is 3"),
        ({"records": 19}, "step 2: its position in the data means other samples: files was"),
    ],
    ids=["class", "weights", "settings", "files"],
)
def test_where_none_fits_it_is_refused_with_what_differs(folder, changes, told):
    fit(folder, 2).save_checkpoint(folder / "a.ckpt")
    if "records" in changes:
        write_records(folder / "data", changes["records"])
        changes = {}
    with pytest.raises(LastCheckpointError) as error:
        fit(folder, 4, **changes)
    assert told in str(error.value)
    assert "or leave ckpt_path out to begin anew" in str(error.value)


def test_an_older_one_that_fits_is_taken_and_newer_ones_are_told(folder, caplog):
    caplog.set_level("INFO")
    fit(folder, 2).save_checkpoint(folder / "a.ckpt")
    fit(folder, 4, kind=OtherVLM, ckpt_path=None).save_checkpoint(folder / "b.ckpt")
    assert chosen(fit(folder, 3)) == "a.ckpt"
    assert f"passes over {folder}/b.ckpt, which is newer: it is of OtherVLM" in said(caplog)


def test_what_is_not_whole_is_never_taken(folder, caplog):
    caplog.set_level("INFO")
    fit(folder, 2).save_checkpoint(folder / "a.ckpt")
    trainer = fit(folder, 4)
    for name in ("b.ckpt", "c.ckpt", "d.ckpt"):
        trainer.save_checkpoint(folder / name)
    (folder / "b.ckpt").rename(folder / ".b.ckpt.partial-host-1-2-3")  # as while it is written
    next((folder / "c.ckpt").glob("*/*.safetensors")).unlink()
    index = folder / "d.ckpt" / INDEX
    index.write_bytes(index.read_bytes()[:-100])
    trainer.save_checkpoint(folder / "weights.ckpt", weights_only=True)
    assert chosen(fit(folder, 3)) == "a.ckpt"
    for other, reason in (("c", "is missing"), ("d", "is damaged"), ("weights", "it holds weights alone")):
        assert any(f"{folder}/{other}.ckpt, which is newer" in told and reason in told for told in caplog.messages)
    shutil.rmtree(folder / "a.ckpt")
    with pytest.raises(LastCheckpointError, match="no checkpoint below"):
        fit(folder, 3)


def test_plain_files_of_lightning_are_found_too_and_nothing_else_is_taken_for_one(folder):
    torch.save({"state_dict": {}}, folder / "weights of others.ckpt")
    (folder / "text.ckpt").write_text("no checkpoint")
    (folder / "a folder").mkdir()
    (folder / "a folder" / INDEX).write_text("{}")
    assert not fit(folder, 1).ckpt_path
    fit(folder, 2, strategy="auto", ckpt_path=None).save_checkpoint(folder / "plain.ckpt")
    assert chosen(fit(folder, 4)) == "plain.ckpt"


def test_validation_takes_the_newest_of_the_module_whatever_the_data(folder):
    write_records(folder / "data", 5, "val.jsonl")
    trained = fit(folder, 2)
    trained.save_checkpoint(folder / "a.ckpt", weights_only=True)
    results = []
    for path in ("last", str(folder / "a.ckpt")):
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        trainer = L.Trainer(
            accelerator="cpu",
            devices=1,
            strategy="flowtrain",
            default_root_dir=folder,
            enable_checkpointing=False,
            **quiet,
        )
        data = tiny_data(folder / "data", global_batch_size=3)
        results += trainer.validate(TinyVLM(), data, ckpt_path=path, verbose=False)
    assert results[0] == results[1]


def look_on_two_ranks(folder: Path, first: str, second: str) -> None:
    """What each rank is told where rank 1 finds ``second`` under the name under which rank 0 finds ``first``."""
    rank = int(os.environ["RANK"])
    groups = connect_groups(rank, ((0,), (1,)), "gloo", timedelta(seconds=30))
    told = ""
    try:
        refuse_unlike_ranks(Path(second if rank else first), groups.cross)
    except LastCheckpointError as error:
        told = str(error)
    write_down(folder, told)


def test_ranks_that_find_another_checkpoint_or_none_are_named_on_all_ranks(folder):
    trainer = fit(folder, 2)
    for name in ("a.ckpt", "b.ckpt"):
        trainer.save_checkpoint(folder / name)
    (folder / "kept").mkdir()
    shutil.copytree(folder / "a.ckpt", folder / "kept" / "a.ckpt")
    for second, told in (("kept/a.ckpt", None), ("b.ckpt", "rank 1 finds none or another one there")):
        given = {"first": str(folder / "a.ckpt"), "second": str(folder / second)}
        job = Job(second.replace("/", " "), "tests.trainer.test_last_checkpoint:look_on_two_ranks", 2, given)
        for found in read_down(run_jobs(folder / "jobs", [job])[job.name].check().folder):
            assert told in found if told else found == ""
