"""A generator behind the backbone: exact on every split of ranks, resumable, in one process too."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.exactness.compare import Run, error, read_run
from tests.exactness.drawing import ALL_WEIGHTS, NONE_DRAWN, NONE_SHOWN, STEPS, write_drawings
from tests.exactness.hearing import SAVED_AT
from tests.exactness.layouts import ranks_of
from tests.forks import Job, read_down, run_jobs

LIMIT = 1e-10

FROZEN_BACKBONE = {"module": {"frozen": ["backbone"]}}
FROZEN_TOWER = {"module": {"frozen": ["encoder"]}}
QUERIES_ALONE = {"module": {"frozen": ["encoder", "backbone"]}}
TWO_LOSSES = {"module": {"tells": True}}
CASES: dict[str, dict[str, Any]] = {
    "auto": {"layout": "auto"},
    "ddp 2": {"layout": "ddp 2"},
    "1+1+1": {"layout": "1+1+1"},
    "1+2+1": {"layout": "1+2+1"},
    "2+1+2, clipped": {"layout": "2+1+2", "clip": 0.2},
    "colocated 1": {"layout": "colocated 1"},
    "colocated 2": {"layout": "colocated 2"},
    "1+2+1 fsdp backbone": {"layout": "1+2+1 fsdp backbone"},
    "2+1+1 fsdp encoder": {"layout": "2+1+1 fsdp encoder"},
    "1+1+2 fsdp generator, clipped": {"layout": "1+1+2 fsdp generator", "clip": 0.2},
    "2+2+2 fsdp": {"layout": "2+2+2 fsdp"},
    "colocated 2 fsdp, clipped": {"layout": "colocated 2 fsdp", "clip": 0.2},
    "colocated 2 fsdp encoder": {"layout": "colocated 2 fsdp encoder"},
    "colocated 2 fsdp backbone": {"layout": "colocated 2 fsdp backbone"},
    "colocated 2 fsdp generator": {"layout": "colocated 2 fsdp generator"},
    "1+2+1 tensor backbone": {"layout": "1+2+1 tensor backbone", "module": {"divided": True}},
    "colocated 2 tensor backbone": {"layout": "colocated 2 tensor backbone", "module": {"divided": True}},
    "auto, frozen backbone": {"layout": "auto", **FROZEN_BACKBONE},
    "1+1+1, frozen backbone": {"layout": "1+1+1", **FROZEN_BACKBONE},
    "1+2+1, frozen backbone": {"layout": "1+2+1", **FROZEN_BACKBONE},
    "colocated 2, frozen backbone": {"layout": "colocated 2", **FROZEN_BACKBONE},
    "1+2+1 fsdp backbone, frozen backbone": {"layout": "1+2+1 fsdp backbone", **FROZEN_BACKBONE},
    "colocated 2 fsdp, frozen backbone": {"layout": "colocated 2 fsdp", **FROZEN_BACKBONE},
    "colocated 2 fsdp, queries alone": {"layout": "colocated 2 fsdp", **QUERIES_ALONE},
    "colocated 2 fsdp generator, queries alone": {"layout": "colocated 2 fsdp generator", **QUERIES_ALONE},
    "colocated 2 tensor encoder backbone, queries alone": {
        "layout": "colocated 2 tensor encoder backbone",
        "module": {"frozen": ["encoder", "backbone"], "divided": True},
    },
    "1+1+2, frozen tower, watched": {"layout": "1+1+2", "watched": True, **FROZEN_TOWER},
    "colocated 2, frozen tower": {"layout": "colocated 2", **FROZEN_TOWER},
    "1+2+1, queries alone": {"layout": "1+2+1", **QUERIES_ALONE},
    "1+2+1, generator alone": {"layout": "1+2+1", "module": {"frozen": ["encoder", "backbone", "queries"]}},
    "colocated 2, generator alone": {"layout": "colocated 2", "module": {"frozen": ["encoder", "backbone", "queries"]}},
    "1+1+1, it only draws": {"layout": "1+1+1", "module": {"says": False}},
    "1+1+1, it keeps nothing": {"layout": "1+1+1", "strategy": {"encoder_activations": 0}},
    "1+1+1, frozen tower, clipped": {"layout": "1+1+1", "clip": 0.2, **FROZEN_TOWER},
    "2+1+1 fsdp encoder, frozen tower": {"layout": "2+1+1 fsdp encoder", **FROZEN_TOWER},
    "1+2+1 fsdp backbone, frozen tower, clipped": {"layout": "1+2+1 fsdp backbone", "clip": 0.2, **FROZEN_TOWER},
    "1+1+2 fsdp generator, frozen backbone": {"layout": "1+1+2 fsdp generator", **FROZEN_BACKBONE},
    "colocated 2 fsdp, frozen tower": {"layout": "colocated 2 fsdp", **FROZEN_TOWER},
    "colocated 2, it only draws, clipped": {"layout": "colocated 2", "clip": 0.2, "module": {"says": False}},
    "2+2+2 fsdp, it only draws": {"layout": "2+2+2 fsdp", "module": {"says": False}},
    "2+2+2 fsdp, it only draws, frozen backbone": {
        "layout": "2+2+2 fsdp",
        "module": {"says": False, "frozen": ["backbone"]},
    },
    "1+2+2, it keeps one": {"layout": "1+2+2", "strategy": {"encoder_activations": 1}},
    "auto, two losses": {"layout": "auto", **TWO_LOSSES},
    "1+1+1, two losses": {"layout": "1+1+1", **TWO_LOSSES},
    "1+2+1, two losses": {"layout": "1+2+1", **TWO_LOSSES},
    "colocated 2, two losses, clipped": {"layout": "colocated 2", "clip": 0.2, **TWO_LOSSES},
    "2+2+2 fsdp, two losses": {"layout": "2+2+2 fsdp", **TWO_LOSSES},
    "1+2+1 tensor backbone, two losses": {
        "layout": "1+2+1 tensor backbone",
        "module": {"tells": True, "divided": True},
    },
    "1+2+1, two losses, frozen backbone": {"layout": "1+2+1", "module": {"tells": True, "frozen": ["backbone"]}},
    "1+2+1, two losses, frozen tower": {"layout": "1+2+1", "module": {"tells": True, "frozen": ["encoder"]}},
}
QUICK = ["auto", "1+2+1", "colocated 2 fsdp, clipped"]
ALL = [*QUICK, *(pytest.param(case, marks=pytest.mark.full) for case in CASES if case not in QUICK)]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Runs a case once, or a case with other arguments, and gives its folder."""
    folder = tmp_path_factory.mktemp("drawing")
    write_drawings(folder / "data")

    @cache
    def folder_of(name: str, target: str = "drawing", **more: Any) -> Path:
        arguments = {"data": str(folder / "data"), **CASES[name], **more}
        ranks = ranks_of(arguments["layout"])
        if target == "plain_drawing":
            arguments, ranks = {key: arguments[key] for key in ("data", "module", "clip") if key in arguments}, 1
        told = " ".join(f"{key} {Path(str(value)).name}" for key, value in more.items())
        job = Job(f"{name} {target} {told}", f"tests.exactness.{target}:train", ranks, arguments)
        done = run_jobs(folder, [job])[job.name]
        return (done if arguments.get("dies") else done.check()).folder

    return folder_of


@pytest.fixture(scope="module")
def run(folder_of: Callable[..., Path]) -> Callable[..., Run]:
    return cache(lambda *named: read_run(folder_of(*named)))


@pytest.mark.parametrize("case", ALL)
def test_a_module_that_draws_trains_as_the_plain_loop_does(run: Callable[..., Run], case: str):
    found, plain = run(case), run(case, "plain_drawing")
    assert error(found.initial, plain.initial) == 0.0
    assert found.losses == pytest.approx(plain.losses, rel=LIMIT)
    assert max(map(error, found.gradients, plain.gradients)) <= LIMIT
    assert max(map(error, found.weights, plain.weights)) <= LIMIT


@pytest.mark.parametrize("case", ["auto", "1+2+1"])
def test_half_that_a_step_does_not_use_gets_no_gradient(run: Callable[..., Run], case: str):
    gradients = run(case).gradients
    expected = {NONE_DRAWN: {"encoder", "backbone", "queries"}, NONE_SHOWN: {"backbone", "queries", "drawer"}}
    for step, halves in expected.items():
        assert {name.partition(".")[0] for name, value in gradients[step].items() if value is not None} == halves


@pytest.mark.full
def test_a_frozen_backbone_hands_gradients_on(run: Callable[..., Run]):
    gradients = run("1+1+1, frozen backbone").gradients[0]
    assert {name.partition(".")[0] for name, value in gradients.items() if value is not None} == {
        "encoder",
        "queries",
        "drawer",
    }


@pytest.mark.parametrize("case", ["1+2+1", "colocated 2 fsdp, clipped"])
def test_each_loss_is_logged_and_validated_on_every_rank(folder_of: Callable[..., Path], case: str):
    found = read_down(folder_of(case))
    expected = read_down(folder_of("auto"))[0] if "clipped" not in case else found[0]
    for logged, validated, _ in found:
        assert logged == pytest.approx(expected[0], rel=LIMIT)
        assert validated == pytest.approx(expected[1], rel=LIMIT)
        assert {"train_loss", "train_backbone_loss", "train_generator_loss", "time"} <= logged.keys()
        assert {"val_loss", "val_backbone_loss", "val_generator_loss", "time", "accuracy"} <= validated.keys()
    backbones = 2
    assert all((count > 0) == (rank < backbones) for rank, (_, _, count) in enumerate(found))


def test_it_goes_on_bit_for_bit_and_on_other_ranks(folder_of: Callable[..., Path], run: Callable[..., Run]):
    saved, found = str(folder_of("1+2+1") / "saved.ckpt"), run("1+2+1")
    assert {path.name for path in Path(saved).iterdir() if path.is_dir()} == {"encoder", "backbone", "generator"}
    resumed = read_run(folder_of("1+2+1", resume=saved))
    assert resumed.losses == found.losses[SAVED_AT:]
    assert len(resumed.weights) == STEPS - SAVED_AT
    for before, after in zip(found.weights[SAVED_AT:], resumed.weights, strict=True):
        assert error(after, before) == 0.0
    moved = read_run(folder_of("colocated 2 fsdp, clipped", resume=saved, clip=None))
    assert error(moved.weights[-1], found.weights[-1]) <= LIMIT


@pytest.mark.full
@pytest.mark.parametrize("case", ["1+2+1, two losses", "2+2+2 fsdp, two losses"])
def test_both_losses_of_the_backbone_are_logged_by_name_on_every_rank(folder_of: Callable[..., Path], case: str):
    expected = read_down(folder_of("auto, two losses"))[0]
    for logged, validated, _ in read_down(folder_of(case)):
        assert logged == pytest.approx(expected[0], rel=LIMIT)
        assert validated == pytest.approx(expected[1], rel=LIMIT)
        weighed = sum(weight * logged["_".join(("train", name, "loss"))] for name, weight in ALL_WEIGHTS.items())
        assert logged["train_loss"] == pytest.approx(weighed, rel=LIMIT)


@pytest.mark.full
@pytest.mark.parametrize(
    "case",
    ["colocated 2", "2+2+2 fsdp", "1+1+1, frozen backbone", "colocated 2, frozen tower", "1+2+1, two losses", "auto"],
)
def test_every_layout_goes_on_bit_for_bit(folder_of: Callable[..., Path], run: Callable[..., Run], case: str):
    resumed, found = read_run(folder_of(case, resume=str(folder_of(case) / "saved.ckpt"))), run(case)
    assert resumed.losses == found.losses[SAVED_AT:]
    for before, after in zip(found.weights[SAVED_AT:], resumed.weights, strict=True):
        assert error(after, before) == 0.0


@pytest.mark.full
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("colocated 2", "2+2+2 fsdp"),
        ("2+2+2 fsdp", "1+1+1"),
        ("1+1+1, frozen backbone", "colocated 2 fsdp, frozen backbone"),
        ("colocated 2, frozen tower", "2+1+1 fsdp encoder, frozen tower"),
        ("1+1+1", "auto"),
        ("auto", "1+1+1"),
        ("colocated 2", "auto"),
        ("auto", "colocated 2"),
        ("2+2+2 fsdp", "auto"),
        ("auto", "2+2+2 fsdp"),
        ("2+2+2 fsdp, two losses", "auto, two losses"),
        ("auto, two losses", "1+2+1, two losses"),
    ],
)
def test_a_checkpoint_moves_between_layouts(
    folder_of: Callable[..., Path], run: Callable[..., Run], before: str, after: str
):
    moved = read_run(folder_of(after, resume=str(folder_of(before) / "saved.ckpt")))
    assert error(moved.weights[-1], run(before).weights[-1]) <= LIMIT


@pytest.mark.full
def test_its_ranks_are_watched_as_others_are(folder_of: Callable[..., Path]):
    header = (folder_of("1+1+2, frozen tower, watched") / "log" / "metrics.csv").read_text().splitlines()[0].split(",")
    assert "packing/generator_imbalance" in header
    assert {f"time/{rank} compute" for rank in ("backbone 0", "encoder 0", "generator 0", "generator 1")} <= {*header}


@pytest.mark.full
@pytest.mark.parametrize("rank", ["1 (backbone 1)", "2 (encoder 0)", "3 (generator 0)"])
def test_where_a_rank_beside_or_of_a_generator_is_killed_all_end_and_name_it(folder_of: Callable[..., Path], rank: str):
    number, half, _ = rank.replace("(", "").split()
    folder = folder_of("1+2+1", dies=half)
    told = {path.name: path.read_text() for path in folder.glob("fault-rank*.txt")}
    assert told.keys() == {f"fault-rank{other}.txt" for other in range(4) if other != int(number)}
    assert all(text.startswith(f"Rank {rank} died") for text in told.values()), told
