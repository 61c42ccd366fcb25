"""The command ``flowtrain simulate``."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from flowtrain_lightning.allocator import Allocation, Layout, default_allocation
from flowtrain_lightning.allocator.plan_file import write_plan
from flowtrain_lightning.cli import main
from flowtrain_lightning.placement.profile import write_profile
from tests.placement.profiles import make_profile

FILES = ("--plan", "plan.yaml", "--data", "lengths.parquet")
PROFILE = ("--profile", "profile.json")


@pytest.fixture
def simulate(simulate_by):
    """Simulates by the profile; answers with what was printed."""
    return partial(simulate_by, *PROFILE)


@pytest.fixture
def simulate_by(monkeypatch, tmp_path, capsys):
    """Simulates in this process, in a folder with all three files; answers with what was printed."""
    monkeypatch.chdir(tmp_path)
    profile = make_profile(0.01, 0.01, optimizer=0.05)
    origin = replace(profile.origin, settings={"precision": "32-true", "token_budget": 100})
    write_profile(replace(profile, origin=origin, reduction=None), Path("profile.json"))
    write_plan(default_allocation(4, "separate", 2), Path("plan.yaml"), "by hand")
    lengths = {"tokens": [20, 30, 40, 50] * 5, "image_tokens": [[8, 12], [], None, [30]] * 5}
    pyarrow.parquet.write_table(pyarrow.table(lengths), "lengths.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"tokens": [20, 30]}), "text.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"tokens": pyarrow.array([], pyarrow.int64())}), "empty.parquet")

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["flowtrain", "simulate", *FILES, *arguments])
        main()
        return capsys.readouterr().out

    return run


def test_it_says_how_long_steps_take_and_where_time_goes(simulate, tmp_path):
    printed = simulate("--global-batch-size", "8", "--steps", "3", "--plot", "timeline.png")
    assert "separate: encoder on ranks 2-3" in printed
    assert "3 steps of lengths.parquet by the costs of profile.json (a processor)" in printed
    assert "samples/s, " in printed
    assert [line.split()[0] for line in printed.splitlines()[-4:-2]] == ["encoder", "backbone"]
    assert "does not say how long ranks take to sum gradients" in printed
    with Image.open(tmp_path / "timeline.png") as picture:
        colours = {colour: count for count, colour in picture.convert("RGB").getcolors(1 << 24)}
    assert colours[227, 227, 224] > 0.01 * sum(colours.values()), "waiting is grey"


def test_json_has_every_figure_and_the_same_seed_gives_the_same(simulate):
    first, again, other = (
        json.loads(simulate("--global-batch-size", "8", "--json", "--seed", seed)) for seed in ("1", "1", "2")
    )
    assert first == again
    assert first["seconds"] != other["seconds"]
    assert len(first["seconds"]) == 60, "of few samples more steps are drawn"
    assert first["samples_per_second"] == pytest.approx(8 / first["step_seconds"])
    assert set(first["shares"]["encoder"]) == {"forward", "backward", "reduction", "optimizer", "idle"}


@pytest.mark.parametrize(
    "said", [("--lora", "8"), ("--freeze", "encoder"), ("--optimizer", "adamw-8bit")], ids=" ".join
)
def test_what_trains_cannot_be_said_of_a_profile_alone(simulate, said):
    with pytest.raises(SystemExit, match=f"{said[0]} changes what the dimensions of --model take, but profile.json is"):
        simulate("--global-batch-size", "8", *said)


def test_data_without_media_and_with_few_samples_will_do(simulate):
    values = json.loads(simulate("--data", "text.parquet", "--global-batch-size", "8", "--json"))
    assert values["shares"]["encoder"]["idle"] == 1


def test_a_column_of_numbers_beside_that_of_the_media_changes_nothing(simulate):
    lengths = pyarrow.parquet.read_table("lengths.parquet").to_pydict()
    lengths = {"text_tokens": [12, 30, 40, 20] * 5} | lengths
    pyarrow.parquet.write_table(pyarrow.table(lengths), "more.parquet")
    expected, found = (
        simulate("--data", data, "--global-batch-size", "8", "--json") for data in ("lengths.parquet", "more.parquet")
    )
    assert found == expected


def test_media_of_two_modalities_are_refused(simulate):
    lengths = {"tokens": [20, 30], "audio_tokens": [[5], []], "image_tokens": [[8, 12], [4]]}
    pyarrow.parquet.write_table(pyarrow.table(lengths), "two.parquet")
    with pytest.raises(SystemExit) as end:
        simulate("--data", "two.parquet", "--global-batch-size", "8")
    assert str(end.value.code) == (
        "flowtrain simulate: two.parquet lists media in the columns 'audio_tokens' and 'image_tokens', but there "
        "is one encoder; leave only the column of its media."
    )


def test_media_counted_by_one_number_a_sample_are_refused(simulate):
    pyarrow.parquet.write_table(pyarrow.table({"tokens": [20, 30], "image_tokens": [8, 4]}), "numbers.parquet")
    with pytest.raises(SystemExit, match=r"'image_tokens' of numbers\.parquet must hold lists of whole numbers"):
        simulate("--data", "numbers.parquet")


@pytest.mark.parametrize("missing_or_negative", [None, -4])
def test_a_media_item_without_a_length_or_with_a_negative_one_is_told(simulate, missing_or_negative):
    lengths = {"tokens": [20, 30, 40], "image_tokens": [[8, 12], None, [30, missing_or_negative]]}
    pyarrow.parquet.write_table(pyarrow.table(lengths), "wrong.parquet")
    with pytest.raises(SystemExit) as end:
        simulate("--data", "wrong.parquet", "--global-batch-size", "8")
    assert str(end.value.code) == (
        "flowtrain simulate: The column 'image_tokens' of wrong.parquet must list whole numbers of at least 0, none "
        f"missing, but sample 2 has {missing_or_negative}."
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--steps", "0"], "--steps is 0; it must be at least 1"),
        (["--encoder-activations", "0"], "--encoder-activations is 0; it must be at least 1"),
        (["--seed", "-1"], "--seed is -1; it must be at least 0"),
        (["--plan", "nowhere.yaml"], "nowhere.yaml cannot be read as a plan"),
        (["--profile", "nowhere.json"], "nowhere.json cannot be read"),
        (["--data", "nowhere.parquet"], "nowhere.parquet"),
        (["--data", "empty.parquet"], "empty.parquet has no samples"),
        (["--token-budget", "45"], "The longest sample has 50 tokens, but a microbatch takes 45"),
        (["--token-budget", "0"], "token_budget is 0; it must be at least 1"),
        (["--plot", "timeline.nothing"], "timeline.nothing cannot be written"),
    ],
)
def test_a_mistake_ends_with_a_sentence(arguments, words, simulate):
    with pytest.raises(SystemExit) as end:
        simulate(*arguments)
    assert str(end.value.code).startswith("flowtrain simulate: ")
    assert words in str(end.value.code)


TWO_ENCODERS = """
encoders:
  image: {layers: 2, hidden: 64, feed_forward: 256, heads: 4, patch: 14}
  audio: {layers: 1, hidden: 32, feed_forward: 128, heads: 4, bins: 80}
backbone: {layers: 2, hidden: 64, feed_forward: 256, heads: 4, vocabulary: 1000}
"""


def write_two_encoders():
    roles = dict.fromkeys(("encoder_image", "encoder_audio", "backbone"), Layout())
    ranks = {"encoder_image": (1,), "encoder_audio": (2,), "backbone": (0,)}
    write_plan(Allocation("separate", roles, ranks), Path("two.yaml"), "by hand")
    lengths = {"tokens": [20, 30], "audio_tokens": [[5], []], "image_tokens": [[8, 12], [4]]}
    pyarrow.parquet.write_table(pyarrow.table(lengths), "two.parquet")
    Path("two_encoders.yaml").write_text(TWO_ENCODERS)


def test_of_several_encoders_each_encodes_the_media_of_its_own_column(simulate_by):
    write_two_encoders()
    given = ("--plan", "two.yaml", "--model", "two_encoders.yaml", "--batch", "2", "--json")
    shares = json.loads(simulate_by(*given, "--data", "two.parquet"))["shares"]
    assert all(shares[role]["backward"] > 0 for role in ("encoder_image", "encoder_audio", "backbone"))
    with pytest.raises(
        SystemExit, match=r"lengths\.parquet has no column 'audio_tokens' \(its columns: tokens, image_"
    ):
        simulate_by(*given)


def test_what_generates_takes_the_media_of_its_own_column(simulate_by):
    layouts = dict.fromkeys(("encoder", "backbone", "generator"), Layout())
    ranks = {"encoder": (1,), "backbone": (0,), "generator": (2,)}
    write_plan(Allocation("separate", layouts, ranks), Path("draws.yaml"), "by hand")
    lengths = {"tokens": [20, 30], "generated_tokens": [[5], []], "image_tokens": [[8, 12], [4]]}
    pyarrow.parquet.write_table(pyarrow.table(lengths), "draws.parquet")
    Path("drawing.yaml").write_text(DRAWS)
    given = ("--plan", "draws.yaml", "--model", "drawing.yaml", "--batch", "2", "--json")
    shares = json.loads(simulate_by(*given, "--data", "draws.parquet"))["shares"]
    assert all(shares[role]["backward"] > 0 for role in ("encoder", "backbone", "generator"))
    with pytest.raises(SystemExit, match=r"lengths\.parquet has no column 'generated_tokens' \(its columns: tokens, "):
        simulate_by(*given)


DRAWS = """
encoders: {image: {layers: 2, hidden: 64, feed_forward: 256, heads: 4, patch: 14}}
backbone: {layers: 2, hidden: 64, feed_forward: 256, heads: 4, vocabulary: 1000, queries: 4}
generator: {layers: 2, hidden: 64, feed_forward: 256, heads: 4, numbers: 12, rows: 4}
"""


TENSOR = Allocation(
    "separate", {"encoder": Layout(2), "backbone": Layout(1, tensor=2)}, {"encoder": (2, 3), "backbone": (0, 1)}
)
DIMENSIONS = """
encoders: {image: {layers: 2, hidden: 64, feed_forward: 256, heads: 4, patch: 14}}
backbone: {layers: 2, hidden: 64, feed_forward: 256, heads: 4, vocabulary: 1000}
"""


@pytest.mark.parametrize("degree", ["tensor", "pipeline"])
def test_by_a_models_dimensions_it_plays_tensor_ranks_and_stages_too(simulate, simulate_by, degree):
    backbone = Layout(1, **{degree: 2})
    write_plan(replace(TENSOR, layouts=TENSOR.layouts | {"backbone": backbone}), Path("divided.yaml"), "by hand")
    Path("model.yaml").write_text(DIMENSIONS)
    arguments = ("--plan", "divided.yaml", "--global-batch-size", "8", "--steps", "3")
    with pytest.raises(SystemExit, match=r"a profile of whole layers and sequences does not say.*--model"):
        simulate(*arguments)
    printed = simulate_by("--model", "model.yaml", *arguments)
    assert f"backbone on ranks 0-1 (data 1, {degree} 2, replicate)" in printed
    assert "3 steps of lengths.parquet by the dimensions of model.yaml on h100" in printed
    values = json.loads(simulate_by("--model", "model.yaml", *arguments, "--json"))
    assert values["step_seconds"] > 0
    assert set(values["shares"]) == {"encoder", "backbone"}


def test_a_plan_that_training_does_not_run_is_not_played(simulate):
    layouts = {"encoder": Layout(2), "backbone": Layout(2, shard="zero1")}
    write_plan(Allocation("separate", layouts, TENSOR.ranks), Path("zero.yaml"), "by hand")
    with pytest.raises(SystemExit, match="gives the backbone the layout data 2, zero1"):
        simulate("--plan", "zero.yaml")


def test_without_a_profile_and_a_model_nothing_says_what_a_step_takes(simulate_by):
    with pytest.raises(SystemExit, match="follows from --profile, from the module's --model, or from both"):
        simulate_by()
