"""A checkpoint goes from any layout to any other, and to and from one process, to the bit."""

from __future__ import annotations

import json
import re

import pytest
import torch

from flowtrain_lightning.checkpoint import export_checkpoint, read_checkpoint
from tests.checkpoint.sharded import LAYOUTS
from tests.checkpoint.test_resume import same
from tests.forks import Job, read_down, run_jobs


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Layout -> folder of the run that saved on it."""
    jobs = [
        Job(layout, "tests.checkpoint.sharded:train_and_save", ranks, {"layout": layout})
        for layout, (ranks, _) in LAYOUTS.items()
    ]
    done = run_jobs(tmp_path_factory.mktemp("saved"), jobs)
    return {layout: each.check().folder for layout, each in done.items()}


@pytest.fixture(scope="module")
def loaded(saved, tmp_path_factory):
    """Layout -> folder of the run that loaded what all layouts had saved."""
    paths = {layout: str(folder / "saved.ckpt") for layout, folder in saved.items()}
    paths["a plain file"] = str(tmp_path_factory.mktemp("exported") / "plain.ckpt")
    export_checkpoint(paths["FSDP 4"], paths["a plain file"])
    jobs = [
        Job(layout, "tests.checkpoint.sharded:load_all", ranks, {"layout": layout, "checkpoints": paths})
        for layout, (ranks, _) in LAYOUTS.items()
    ]
    done = run_jobs(tmp_path_factory.mktemp("loaded"), jobs)
    return {layout: each.check().folder for layout, each in done.items()}


def kept(path):
    return torch.load(path, weights_only=True)


def largest_difference(one, other):
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        return max(largest_difference(one[key], other[key]) for key in one)
    return float((one - other).abs().max())


@pytest.mark.parametrize("target", LAYOUTS)
@pytest.mark.parametrize("source", LAYOUTS)
def test_what_one_layout_saved_another_loads_to_the_bit(saved, loaded, source, target):
    checkpoint = read_checkpoint(saved[source] / "saved.ckpt")
    found = kept(loaded[target] / f"{list(LAYOUTS).index(source)}-loaded.pt")
    assert same(found["weights"], checkpoint["state_dict"])
    assert same(found["state"], checkpoint["optimizer_states"][0]["state"])


@pytest.mark.parametrize("target", LAYOUTS)
def test_a_plain_file_of_lightning_loads_into_every_layout_to_the_bit(saved, loaded, target):
    number = list(LAYOUTS).index("FSDP 4")
    same_as = kept(loaded[target] / f"{number}-loaded.pt")
    assert same(kept(loaded[target] / f"{len(LAYOUTS)}-loaded.pt"), same_as)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_on_the_same_layout_the_next_step_equals_an_unbroken_run_to_the_bit(saved, loaded, layout):
    found = kept(loaded[layout] / f"{list(LAYOUTS).index(layout)}-after.pt")
    assert same(found, kept(saved[layout] / "after.pt"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_saves_what_one_process_trains(saved, layout):
    one, other = (read_checkpoint(saved[each] / "saved.ckpt") for each in ("one process", layout))
    assert largest_difference(one["state_dict"], other["state_dict"]) < 1e-6
    assert same(one["optimizer_states"][0]["param_groups"], other["optimizer_states"][0]["param_groups"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_number_is_written_once_and_each_rank_writes_only_what_it_holds(saved, layout):
    path = saved[layout] / "saved.ckpt"
    tensors = json.loads((path / "index.json").read_text())["tensors"]
    weight = tensors["weights.backbone.up.weight"]["pieces"]
    files = {piece["file"] for piece in weight}
    parts = {"one process": 1, "copies": 1, "FSDP 4": 4, "HSDP 2x2": 2, "FSDP 2 x TP 2": 4}
    assert len(weight) == parts[layout]
    assert len(files) == parts[layout]
    stored = sum(torch.Size(piece["sizes"]).numel() for tensor in tensors.values() for piece in tensor["pieces"])
    assert stored == sum(torch.Size(tensor["shape"]).numel() for tensor in tensors.values())


@pytest.mark.parametrize("layout", ["copies", "HSDP 2x2"])
def test_ranks_that_hold_the_same_share_the_work(saved, layout):
    path = saved[layout] / "saved.ckpt"
    assert len(list(path.glob("*/rank-*.safetensors"))) == 2 * LAYOUTS[layout][0]


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    job = Job("refused", "tests.checkpoint.sharded:say_what_is_refused", 4)
    return read_down(run_jobs(tmp_path_factory.mktemp("refused"), [job])["refused"].check().folder)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("summand", r"is a sum that is still outstanding .* Redistribute it before it is saved or loaded\."),
        (
            "unlike copies",
            r"weights\.encoder\.a is torch\.float32 \(2, 2\) on one rank, but torch\.float32 \(3, 2\) on",
        ),
        (
            "other shape",
            r"does not fit TwoHalves: encoder\.0\.bias: the checkpoint's tensor has shape \(5, 5\), but that",
        ),
    ],
)
def test_what_cannot_be_saved_or_loaded_is_told_on_every_rank(told, case, words):
    for of_rank in told:
        assert re.search(words, of_rank[case])
