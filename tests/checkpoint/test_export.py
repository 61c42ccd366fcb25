"""A checkpoint directory opens without the strategy: in Python, on the command line, in plain Lightning."""

from __future__ import annotations

import shutil
import sys
import tempfile
from fractions import Fraction

import pytest
import torch

from flowtrain_lightning import FlowCheckpointIO
from flowtrain_lightning.checkpoint import export, plain_file, read_checkpoint
from flowtrain_lightning.cli import main
from tests.checkpoint.conftest import saved_alone, seen_by
from tests.checkpoint.test_resume import same
from tests.checkpoint.training import STEPS, TrainedVLM


@pytest.fixture(scope="module")
def straight(runs):
    return runs.straight("sgd", "1+1")


@pytest.fixture(scope="module")
def weights(straight):
    """All weights at the end of the run, from its two ranks."""
    return {**seen_by(straight, 0)["weights"], **seen_by(straight, 1)["weights"]}


def test_load_from_checkpoint_gives_the_whole_module_with_its_hyperparameters(straight, weights):
    module = TrainedVLM.load_from_checkpoint(straight / "ended.ckpt")
    assert same(dict(module.state_dict()), weights)
    assert module.hparams["optimizer"] == "sgd"
    assert module.hparams["lr"] == 1e-2


def test_load_from_checkpoint_leaves_no_file_even_where_it_is_killed(straight, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with plain_file(straight / "ended.ckpt") as path:
        assert torch.load(path, weights_only=False)["state_dict"]
        assert list(tmp_path.iterdir()) == []


def test_load_from_checkpoint_takes_arguments_in_their_place(straight, weights):
    module = TrainedVLM.load_from_checkpoint(str(straight / "ended.ckpt"), map_location="cpu", dropout=0.5)
    assert module.encoder.dropout.p == 0.5
    assert same(dict(module.state_dict()), weights)
    with pytest.raises(RuntimeError, match=r"encoder\.heads\.1\.weight"):
        TrainedVLM.load_from_checkpoint(straight / "ended.ckpt", levels=2)
    module = TrainedVLM.load_from_checkpoint(straight / "ended.ckpt", levels=2, strict=False)
    assert len(module.encoder.heads) == 2


def test_a_checkpoint_of_weights_only_opens_too_and_holds_nothing_else(straight, weights):
    module = TrainedVLM.load_from_checkpoint(straight / "weights.ckpt")
    assert same(dict(module.state_dict()), weights)
    assert "optimizer_states" not in read_checkpoint(straight / "weights.ckpt")


def test_flowtrain_export_says_that_a_checkpoint_holds_no_model_of_hugging_face(
    straight, tmp_path, monkeypatch, capsys
):
    command = ["flowtrain", "export", "--format", "hf", str(straight / "ended.ckpt"), str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit, match="does not say which model of Hugging Face it holds"):
        main()
    assert not (tmp_path / "out").exists()


def test_flowtrain_export_says_that_weights_are_those_of_a_class_of_ones_own(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    from tests.models.tiny import FAMILIES

    module = FAMILIES["qwen2_vl"].kind(FAMILIES["qwen2_vl"].config)
    module.configure_model()
    grown = {name: torch.cat([weight, weight]) for name, weight in module.state_dict().items() if "lm_head" in name}
    held = {"hyper_parameters": dict(module.hparams), "state_dict": {**module.state_dict(), **grown}}
    monkeypatch.setattr("flowtrain_lightning.checkpoint.read_checkpoint", lambda *_, **__: held)
    monkeypatch.setattr(sys, "argv", ["flowtrain", "export", "--format", "hf", "last.ckpt", str(tmp_path / "out")])
    with pytest.raises(SystemExit, match=r"not those of a QwenVLM, as of a class of your own .*size mismatch"):
        main()


def test_flowtrain_export_writes_a_plain_file(straight, weights, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["flowtrain", "export", str(straight / "ended.ckpt"), str(tmp_path / "out.ckpt")])
    main()
    assert capsys.readouterr().out.startswith(f"Wrote {tmp_path / 'out.ckpt'} (")
    exported = torch.load(tmp_path / "out.ckpt", weights_only=True)
    assert same(dict(exported["state_dict"]), weights)
    assert exported["global_step"] == STEPS
    assert exported["hyper_parameters"]["optimizer"] == "sgd"
    assert [path.name for path in tmp_path.iterdir()] == ["out.ckpt"]


def test_what_must_be_trusted_is_exported_where_weights_only_is_false(tmp_path, monkeypatch, alone):
    path, parameters = tmp_path / "last.ckpt", {"share": Fraction(1, 3)}
    with pytest.warns(UserWarning, match="Fraction"):
        saved_alone(path, alone, hyper_parameters=parameters)
    monkeypatch.setattr(sys, "argv", ["flowtrain", "export", str(path), str(tmp_path / "out.ckpt")])
    with pytest.raises(SystemExit, match=r"Fraction.*on the command line: --weights_only false"):
        main()
    sys.argv += ["--weights_only", "false"]
    main()
    assert torch.load(tmp_path / "out.ckpt", weights_only=False)["hyper_parameters"] == parameters


def test_what_is_no_checkpoint_directory_is_told_for_what_it_is(straight, tmp_path):
    file = straight / "ended.ckpt" / "index.json"
    with pytest.raises(ValueError, match=r"index\.json is a file, but flowtrain's checkpoints are directories"):
        export.export_checkpoint(file, tmp_path / "out.ckpt")
    with pytest.raises(FileNotFoundError, match=r"There is no .*nowhere; give the path of a checkpoint directory"):
        export.export_checkpoint(tmp_path / "nowhere", tmp_path / "out.ckpt")
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written_is_told_and_leaves_nothing(straight, tmp_path, monkeypatch):
    def full(checkpoint, path):
        path.write_bytes(b"half of it")
        raise RuntimeError("unexpected pos 64 vs 0")  # so tells torch of a full disk

    monkeypatch.setattr(export, "write_file", full)
    monkeypatch.setattr(sys, "argv", ["flowtrain", "export", str(straight / "ended.ckpt"), str(tmp_path / "out.ckpt")])
    with pytest.raises(SystemExit, match=r"out\.ckpt cannot be written; is there room enough in .*\?"):
        main()
    assert list(tmp_path.iterdir()) == []


def test_the_exported_optimizer_loads_into_the_users_own(straight, weights):
    module = TrainedVLM.load_from_checkpoint(straight / "ended.ckpt")
    optimizer = module.configure_optimizers()["optimizer"]
    (state,) = FlowCheckpointIO().load_checkpoint(straight / "ended.ckpt")["optimizer_states"]
    optimizer.load_state_dict(state)
    names = {parameter: name for name, parameter in module.named_parameters()}
    ranks = [seen_by(straight, rank)["optimizer"]["state"] for rank in (0, 1)]
    assert set(optimizer.state) == set(optimizer.param_groups[0]["params"])  # the group with momentum
    for parameter, entries in optimizer.state.items():
        (saved,) = [state[names[parameter]] for state in ranks if names[parameter] in state]
        assert same(dict(entries), saved)
    assert len({names[parameter].split(".")[0] for parameter in optimizer.state}) == 2


def test_the_plugin_saves_plain_files_also_over_a_directory(straight, tmp_path):
    path = tmp_path / "last.ckpt"
    shutil.copytree(straight / "ended.ckpt", path)
    for number in (1, 2):
        FlowCheckpointIO().save_checkpoint({"number": number}, path)
        assert FlowCheckpointIO().load_checkpoint(path) == {"number": number}
    assert list(tmp_path.iterdir()) == [path]
