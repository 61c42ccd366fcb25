"""The command ``flowtrain profile``."""

from __future__ import annotations

import json
import sys

import pyarrow.parquet
import pytest
import yaml

from flowtrain_lightning.allocator import describe_dimensions
from flowtrain_lightning.cli import main
from flowtrain_lightning.placement import module_profile
from flowtrain_lightning.placement.profile import read_profile
from tests.tiny import write_records

CONFIG = """
seed_everything: 1
model: {class_path: tests.tiny.TinyVLM}
data:
  train: train.jsonl
  tokenizer: {class_path: tests.tiny.CharTokenizer}
  token_budget: 160
  global_batch_size: 8
  images: {patch_size: 4, merge_size: 2, min_pixels: 64, max_pixels: 1024}
trainer: {accelerator: cpu, devices: 2, strategy: flowtrain, max_epochs: 1, logger: false}
"""


@pytest.fixture
def profile(monkeypatch, tmp_path, capsys):
    """Profiles in this process, in a folder of its own; answers with what was printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(sys, "path", [*sys.path])
    write_records(tmp_path, 48)
    (tmp_path / "config.yaml").write_text(CONFIG)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["flowtrain", "profile", "--config", "config.yaml", *arguments])
        main()
        return capsys.readouterr().out

    return run


def test_the_configuration_of_a_training_is_profiled(profile, tmp_path):
    text = profile("--seconds", "0", "--plot", "profile.png", "--lengths", "lengths.parquet")
    found = read_profile(tmp_path / "profile.json")
    assert found.origin.settings["token_budget"] == 160
    assert "tests.tiny.TinyVLM on " in text
    for role, half in found.roles.items():
        assert f"{role}: {half.parameters / 1e6:.2f}M parameters, trained" in text
        assert half.flops.forward.linear > 0
    assert text.count("computes at ") == 2
    assert "2 ranks sum their gradients in " in text
    assert "Data: in 48 of 48 samples the encoder has " in text
    assert "Wrote profile.json." in text
    assert (tmp_path / "profile.png").read_bytes().startswith(b"\x89PNG")
    lengths = pyarrow.parquet.read_table(tmp_path / "lengths.parquet")
    assert lengths.column_names == ["tokens", "image_tokens"]
    assert len(lengths) == 48


def test_its_help_is_of_its_own_options_and_that_of_a_class_of_the_class(profile, capsys):
    with pytest.raises(SystemExit):
        profile("--help")
    own = capsys.readouterr().out
    assert "--lengths LENGTHS" in own
    assert "--trainer.max_epochs" not in own
    with pytest.raises(SystemExit):
        profile("--trainer.strategy.help", "flowtrain_lightning.FlowTrainStrategy")
    assert "--trainer.strategy.encoder_ranks" in capsys.readouterr().out


@pytest.fixture
def without_ranks(monkeypatch):
    """Saves the seconds that two ranks take to sum gradients, and those of counting."""
    monkeypatch.setattr(module_profile, "measure_reduction", lambda: None)
    monkeypatch.setattr(module_profile, "count_flops", lambda module, probes: {})


@pytest.mark.usefixtures("without_ranks")
def test_options_on_the_command_line_come_on_top(profile, tmp_path):
    arguments = ("--seconds", "0", "--out", "other.json", "--trainer.precision", "bf16-mixed")
    text = profile(*arguments, "--model.freeze_encoder", "true")
    assert "bf16-mixed" in text
    assert "parameters, frozen\n  forward: " in text
    content = json.loads((tmp_path / "other.json").read_text())
    assert content["roles"]["encoder"]["optimizer_seconds"] == 0


@pytest.mark.parametrize("option", ["--out", "--plot", "--lengths"])
def test_a_folder_in_place_of_a_file_is_told_first(option, profile, tmp_path, monkeypatch):
    def measured(*arguments, **settings):
        raise AssertionError("the module was measured")

    monkeypatch.setattr("flowtrain_lightning.cli.profile_command.profile_module", measured)
    (tmp_path / "folder").mkdir()
    with pytest.raises(SystemExit) as end:
        profile(option, "folder")
    assert end.value.code == "flowtrain profile: folder cannot be written: it is a folder; name a file."


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--data.train", "nowhere.jsonl"], "nowhere.jsonl: there is no such file"),
        (["--out", "nowhere/profile.json"], "nowhere/profile.json cannot be written: there is no folder nowhere."),
        (["--lengths", "nowhere/lengths.parquet"], "nowhere/lengths.parquet cannot be written"),
        (["--seconds", "0", "--plot", "profile.nothing"], "profile.nothing cannot be written"),
    ],
)
@pytest.mark.usefixtures("without_ranks")
def test_a_mistake_ends_with_a_sentence(arguments, words, profile):
    with pytest.raises(SystemExit) as end:
        profile(*arguments)
    assert str(end.value.code).startswith("flowtrain profile: ")
    assert words in str(end.value.code)


DIMENSIONS = """
encoders:
  image: {layers: 1, hidden: 16, feed_forward: 32, heads: 2, patch: 4, merge: 2}
backbone: {layers: 1, hidden: 16, feed_forward: 32, heads: 2, vocabulary: 134, gated: false}
"""


@pytest.mark.usefixtures("without_ranks")
def test_plan_takes_how_fast_the_module_was_measured_to_be(profile, tmp_path, monkeypatch, capsys):
    profile("--seconds", "0", "--lengths", "lengths.parquet")
    content = json.loads((tmp_path / "profile.json").read_text())
    module = describe_dimensions({"name": "tiny", **yaml.safe_load(DIMENSIONS)})
    for role, half in module.roles.items():
        content["roles"][role]["parameters"] = half.parameters  # the tiny decoder has positions that dimensions lack
    (tmp_path / "tiny.yaml").write_text(DIMENSIONS)
    steps = []
    for times in (1, 10):
        for role in content["roles"].values():
            role["cost"] = {name: times * value for name, value in role["cost"].items()}
            role["measured"] = [{**each, "seconds": times * each["seconds"]} for each in role["measured"]]
        (tmp_path / "profile.json").write_text(json.dumps(content))
        arguments = ["--model", "tiny.yaml", "--device", "cpu", "--devices", "2", "--precision", "32-true", "--json"]
        arguments += ["--data", "lengths.parquet", "--token-budget", "160", "--profile", "profile.json"]
        monkeypatch.setattr(sys, "argv", ["flowtrain", "plan", *arguments])
        main()
        plans = json.loads(capsys.readouterr().out)["plans"]
        steps.append(plans["colocated"]["step_seconds"])
    assert 5 * steps[0] < steps[1] < 11 * steps[0]  # what is exchanged, and the optimizer's step, stay
