"""The command ``flowtrain pack``."""

from __future__ import annotations

import json
import re
import sys

import numpy as np
import pytest

from flowtrain_lightning.cli import main

pyarrow = pytest.importorskip("pyarrow")
from pyarrow import parquet  # noqa: E402

OPTIONS = ("--token-budget", "100", "--ranks", "2")
TOKENS = ("--microbatches", "2", "--max-delay", "4")
LENGTHS = "the file that is read"
SAMPLES = ("--global-batch-size", "50")


@pytest.fixture
def pack(monkeypatch, tmp_path, capsys):
    """Packs a table in this process; answers with the folder and what was printed, and keeps what was said beside."""

    def run(columns, *arguments):
        parquet.write_table(pyarrow.table(columns), tmp_path / "lengths.parquet")
        command = ["flowtrain", "pack", str(tmp_path / "lengths.parquet"), "--out", str(tmp_path / "plan.parquet")]
        monkeypatch.setattr(sys, "argv", [*command, "--media-out", str(tmp_path / "media.parquet"), *arguments])
        main()
        out, run.said = capsys.readouterr()
        return tmp_path, out

    return run


def table(count=400):
    generator = np.random.default_rng(0)
    media = [generator.integers(1, 30, generator.integers(0, 3)).astype(float).tolist() for _ in range(count)]
    return {"tokens": generator.integers(1, 40, count), "media_cost": pyarrow.array(media)}


@pytest.mark.parametrize("of_steps", [TOKENS, SAMPLES])
@pytest.mark.parametrize("sync_every", ["microbatch", "step"])
def test_the_plan_holds_every_sample_once_within_the_budget(pack, of_steps, sync_every):
    columns = table()
    folder, printed = pack(columns, *OPTIONS, *of_steps, "--sync-every", sync_every, "--encoder-ranks", "2", "--json")
    figures = json.loads(printed)
    plan = parquet.read_table(folder / "plan.parquet").to_pydict()
    assert list(plan) == ["sample", "step", "rank", "microbatch", "position"]
    assert len(set(plan["sample"])) == len(plan["sample"]) == 400 - figures["samples_left"]
    filled = {}
    for sample, *bin_of in zip(plan["sample"], plan["step"], plan["rank"], plan["microbatch"], strict=True):
        filled[tuple(bin_of)] = filled.get(tuple(bin_of), 0) + columns["tokens"][sample]
    assert max(filled.values()) <= 100
    assert {rank for _, rank, _ in filled} == {0, 1}
    assert figures["pad"] >= 0
    assert figures["idle_sync"] >= 0


def test_every_media_item_is_encoded_in_the_step_of_its_sample(pack):
    columns = table()
    folder, _ = pack(columns, *OPTIONS, *TOKENS, "--encoder-ranks", "3")
    plan = parquet.read_table(folder / "plan.parquet").to_pydict()
    media = parquet.read_table(folder / "media.parquet").to_pydict()
    assert list(media) == ["sample", "media", "step", "encoder_rank", "encoder_batch", "position"]
    step_of = dict(zip(plan["sample"], plan["step"], strict=True))
    expected = {(s, m) for s in step_of for m in range(len(columns["media_cost"][s]))}
    assert set(zip(media["sample"], media["media"], strict=True)) == expected
    assert [step_of[sample] for sample in media["sample"]] == media["step"]


def test_samples_of_a_step_come_in_sampler_order_with_samples(pack):
    folder, _ = pack(table(), *OPTIONS, *SAMPLES)
    plan = parquet.read_table(folder / "plan.parquet").to_pydict()
    assert all(sample // 50 == step for sample, step in zip(plan["sample"], plan["step"], strict=True))


def test_media_may_be_absent_and_figures_are_named(pack):
    _, printed = pack({"tokens": [50] * 40}, *OPTIONS, *TOKENS)
    for name in ("pad", "idle_sync", "idle_acc", "mixcv", "encoder_idle", "flow_gap", "max_delay_seen", "samples_left"):
        assert name in printed
    assert "microseconds_per_sample" in printed
    assert all(re.fullmatch(r"\w+ +[\d.e+-]+( %)? +\S.*", line) for line in printed.splitlines()), (
        "each figure is explained"
    )
    assert re.search(r"^pad +[\d.]+ % +of the token budget is unused$", printed, flags=re.MULTILINE)
    assert re.search(
        r"^imb +[\d.]+ +the costliest microbatch of a step over the mean one$", printed, flags=re.MULTILINE
    )


@pytest.mark.parametrize(("policy", "dropped", "packed"), [("drop", 1, 39), ("truncate", 0, 40)])
def test_samples_over_the_budget_are_dropped_or_truncated_as_asked(pack, policy, dropped, packed):
    folder, printed = pack(
        {"tokens": [50] * 39 + [130]}, *OPTIONS, "--global-batch-size", str(packed), "--too-long", policy, "--json"
    )
    assert json.loads(printed)["samples_dropped"] == dropped
    assert len(parquet.read_table(folder / "plan.parquet")) == packed


def test_a_picture_is_drawn(pack, tmp_path):
    pack(table(), *OPTIONS, *TOKENS, "--plot", str(tmp_path / "plot.png"))
    assert (tmp_path / "plot.png").read_bytes()[1:4] == b"PNG"


@pytest.mark.parametrize(
    ("columns", "options", "words"),
    [
        ({"tokens": [101, 5]}, (), "Sample 0 has 101 tokens, more than the token budget of 100"),
        ({"tokens": [5, 0]}, (), "Sample 1 has 0 tokens"),
        ({"lengths": [5]}, (), "has no column 'tokens' \\(its columns: lengths\\)"),
        ({"tokens": [5.5]}, (), "must hold whole numbers"),
        ({"tokens": [5], "media_cost": [-1.0]}, (), "must hold lists of numbers"),
        ({"tokens": [5], "media_cost": [[-1.0]]}, (), "The cost of media item 0 is -1.0; every cost must be a finite"),
        ({"tokens": [5], "media_cost": [[float("nan")]]}, (), "The cost of media item 0 is nan"),
        ({"tokens": [5]}, ("--ranks", "0"), "ranks is 0; it must be at least 1"),
        ({"tokens": [5]}, ("--encoder-ranks", "0"), "encoder_ranks is 0"),
        ({"tokens": [5]}, ("--max-delay", "4"), "set --microbatches, of each rank, or --global-batch-size"),
        ({"tokens": [5]}, ("--microbatches", "0"), "microbatches is 0"),
        ({"tokens": [5]}, ("--global-batch-size", "0"), "global_batch_size is 0"),
        ({"tokens": [5]}, ("--cost-linear", "-1"), "The linear coefficient of a cost model is -1.0"),
        ({"tokens": [5]}, ("--cost-quadratic", "nan"), "The quadratic coefficient of a cost model is nan"),
        ({"tokens": [5]}, (*TOKENS, "--max-delay", "-1"), "max_delay is -1; it must not be negative"),
        (
            {"tokens": [5]},
            ("--out", LENGTHS),
            "--out would write over .*, which is LENGTHS.parquet; choose another name",
        ),
        ({"tokens": [5]}, ("--plot", "plot.nothing"), r"plot\.nothing cannot be written: Format 'nothing' is not"),
        ({"tokens": [5]}, ("--out", "a", "--plot", "a"), "--plot would write over a, which is --out"),
    ],
)
def test_bad_input_gets_a_sentence(pack, columns, options, words, tmp_path):
    of_microbatches = {"--microbatches", "--max-delay"} & {*options}
    options = options if of_microbatches else ("--global-batch-size", "1", *options)
    options = [str(tmp_path / "lengths.parquet") if option is LENGTHS else option for option in options]
    with pytest.raises(SystemExit, match=f"flowtrain pack: .*{words}"):
        pack(columns, *OPTIONS, *options)


@pytest.mark.parametrize(
    ("option", "value", "reason"),
    [
        ("--microbatches", "2", "as many microbatches are made as the samples need"),
        ("--balance-group", "3", "as many microbatches are made as the samples need"),
        ("--max-delay", "-1", "no sample waits for another step"),
        ("--lookahead", "4", "no sample waits for another step"),
    ],
)
def test_an_option_that_means_nothing_for_steps_of_samples_is_refused(pack, option, value, reason):
    with pytest.raises(SystemExit) as end:
        pack({"tokens": [5]}, *OPTIONS, *SAMPLES, option, value)
    assert end.value.code == (
        f"flowtrain pack: {option}={value} was given with --global-batch-size=50, where {reason}; "
        "leave one of them out."
    )


def test_the_help_names_the_defaults_of_options_that_need_not_be_given(pack, capsys):
    with pytest.raises(SystemExit):
        pack({"tokens": [5]}, "--help")
    said = " ".join(capsys.readouterr().out.split())
    assert "steps that a sample may wait (default: 8)" in said
    assert "steps drawn ahead at most (default: 4)" in said


def test_media_of_which_only_tokens_are_known_cost_nothing(pack):
    columns = {"tokens": [5, 9], "image_tokens": [[3], [4]]}
    _, printed = pack(columns, *OPTIONS, *SAMPLES, "--json")
    assert "has a column 'image_tokens' but none that says what encoding each media item costs" in pack.said
    assert json.loads(printed)["samples"] == 2


def test_a_file_that_is_not_there_gets_a_sentence(monkeypatch, tmp_path):
    command = ["flowtrain", "pack", "nowhere.parquet", *OPTIONS, *SAMPLES]
    monkeypatch.setattr(sys, "argv", [*command, "--out", str(tmp_path / "plan.parquet")])
    with pytest.raises(SystemExit, match=r"there is no file nowhere\.parquet"):
        main()


@pytest.mark.parametrize("tokens", [[], [7], [7] * 3])
@pytest.mark.parametrize("of_steps", [TOKENS, SAMPLES])
def test_too_few_samples_for_a_step_are_all_left_over(pack, tokens, of_steps):
    _, printed = pack({"tokens": pyarrow.array(tokens, pyarrow.int64())}, *OPTIONS, *of_steps, "--json")
    figures = json.loads(printed)
    assert (figures["steps"], figures["samples_left"]) == (0, len(tokens))


def test_an_empty_plan_is_told(pack):
    _, printed = pack({"tokens": [7] * 3}, *OPTIONS, *SAMPLES)
    assert "3 samples fill no step, so the plan is empty" in printed


def test_media_that_are_the_same_are_encoded_once_a_step(pack):
    columns = table() | {"media_cost": pyarrow.array([[3.0]] * 400)}
    folder, _ = pack(columns | {"media_content": pyarrow.array([[n // 5] for n in range(400)])}, *OPTIONS, *SAMPLES)
    media = parquet.read_table(folder / "media.parquet").to_pydict()
    assert len(media["sample"]) == 400 / 5
    with pytest.raises(SystemExit):
        pack(columns | {"media_content": pyarrow.array([[]] + [[1]] * 399)}, *OPTIONS, *SAMPLES)
