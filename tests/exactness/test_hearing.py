"""An image encoder and an audio encoder as two roles: exact on every split of ranks, resumable, in one process too."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from flowtrain_lightning import export_checkpoint
from tests.exactness.compare import Run, error, read_run
from tests.exactness.hearing import LETTERS, SAVED_AT, STEPS
from tests.exactness.layouts import ranks_of
from tests.exactness.test_layouts import without_key_biases
from tests.forks import Job, read_down, run_jobs

LIMIT = 1e-10
FLOAT32 = {"precision": "32-true"}
IMAGES_ONLY, AUDIO_ONLY, NO_MEDIA = 0, 2, 3
"""Steps of the kind that their name says."""

CASES: dict[str, dict[str, Any]] = {
    "auto": {"layout": "auto"},
    "1+1+1": {"layout": "1+1+1"},
    "2+1+2, clipped": {"layout": "2+1+2", "clip": 0.2},
    "1+1+1, frozen eye": {"layout": "1+1+1", "module": {"frozen": ["image"]}},
    "1+1+1, both frozen": {"layout": "1+1+1", "module": {"frozen": ["image", "audio"]}},
    "1+1+1, a wide ear": {"layout": "1+1+1", "wide": True},
    "1+2+1, a wide ear, frozen eye": {"layout": "1+2+1", "wide": True, "module": {"frozen": ["image"]}},
    "colocated 2": {"layout": "colocated 2"},
    "colocated 1": {"layout": "colocated 1"},
    "1+1+2 fsdp, clipped": {"layout": "1+1+2 fsdp", "clip": 0.2},
    "1+1+2 fsdp, a wide ear, frozen eye": {"layout": "1+1+2 fsdp", "wide": True, "module": {"frozen": ["image"]}},
    "mixed 1+2, clipped": {"layout": "mixed 1+2", "clip": 0.2},
    "colocated 2, a wide ear, frozen eye": {"layout": "colocated 2", "wide": True, "module": {"frozen": ["image"]}},
    "ddp 2": {"layout": "ddp 2"},
    "1+1+1, letters": {"layout": "1+1+1", "letters": True},
    "2+1+1 fsdp image, letters": {"layout": "2+1+1 fsdp image", "letters": True},
    "1+2+1 fsdp audio, letters": {"layout": "1+2+1 fsdp audio", "letters": True},
    "1+1+2 fsdp, letters": {"layout": "1+1+2 fsdp", "letters": True},
    "colocated 2, letters": {"layout": "colocated 2", "letters": True},
    "colocated 2 fsdp image, letters": {"layout": "colocated 2 fsdp image", "letters": True, "clip": 0.2},
    "colocated 2 fsdp audio, letters": {"layout": "colocated 2 fsdp audio", "letters": True},
    "colocated 2 fsdp, letters": {"layout": "colocated 2 fsdp", "letters": True},
    "mixed 1+2, letters": {"layout": "mixed 1+2", "letters": True},
    "mixed 1+2 fsdp, letters": {"layout": "mixed 1+2 fsdp", "letters": True},
    "1+1+2 tensor": {"layout": "1+1+2 tensor", "divided": True},
    "2+1+1 tensor image": {"layout": "2+1+1 tensor image", "divided": True},
    "1+1+2 context": {"layout": "1+1+2 context", "divided": True, "clip": 0.2},
    "colocated 2 tensor": {"layout": "colocated 2 tensor", "divided": True, "clip": 0.2},
    "colocated 2 tensor audio": {"layout": "colocated 2 tensor audio", "divided": True},
    "colocated 2 context": {"layout": "colocated 2 context", "divided": True},
    "4+1+1 stages image": {"layout": "4+1+1 stages image", "deep": True, "clip": 0.2},
    "colocated 4 stages image": {"layout": "colocated 4 stages image", "deep": True},
    "colocated 4 stages image, frozen eye": {
        "layout": "colocated 4 stages image",
        "deep": True,
        "module": {"frozen": ["image"]},
    },
    "mixed 1+2 tensor": {"layout": "mixed 1+2 tensor", "divided": True},
    "1+2+1, loaded by workers": {"layout": "1+2+1", "workers": 1},
    "2+1+1 fsdp image, frozen eye": {"layout": "2+1+1 fsdp image", "module": {"frozen": ["image"]}},
    "mixed 1+2, frozen eye": {"layout": "mixed 1+2", "module": {"frozen": ["image"]}},
    "auto, it feels": {"layout": "auto", "feels": True},
    "1+1+1+1, it feels": {"layout": "1+1+1+1", "feels": True},
    "1+1+2+2, it feels, clipped": {"layout": "1+1+2+2", "feels": True, "clip": 0.2},
    "colocated 2, it feels": {"layout": "colocated 2", "feels": True},
    "mixed 1+2, it feels": {"layout": "mixed 1+2", "feels": True, "clip": 0.2},
    "1+1+2+1 fsdp touch, it feels": {"layout": "1+1+2+1 fsdp touch", "feels": True},
    "2+1+1+1 fsdp image, it feels": {"layout": "2+1+1+1 fsdp image", "feels": True},
    "1+1+1+2 fsdp, it feels": {"layout": "1+1+1+2 fsdp", "feels": True},
    "colocated 2 fsdp touch, it feels": {"layout": "colocated 2 fsdp touch", "feels": True},
    "colocated 2 fsdp, it feels, clipped": {"layout": "colocated 2 fsdp", "feels": True, "clip": 0.2},
    "1+1+1+2 tensor, it feels": {"layout": "1+1+1+2 tensor", "feels": True},
    "colocated 2 tensor, it feels": {"layout": "colocated 2 tensor", "feels": True},
    "1+1+1+2 context, it feels": {"layout": "1+1+1+2 context", "feels": True},
    "colocated 2 context, it feels": {"layout": "colocated 2 context", "feels": True},
    "1+1+1+1, it feels, two frozen": {
        "layout": "1+1+1+1",
        "feels": True,
        "module": {"frozen": ["audio", "touch"]},
    },
    "2+1+1 deepspeed-1 image": {"layout": "2+1+1 deepspeed-1 image", **FLOAT32},
    "1+2+1 deepspeed-2 audio, clipped": {"layout": "1+2+1 deepspeed-2 audio", "clip": 0.2, **FLOAT32},
    "2+1+1 deepspeed-3 image": {"layout": "2+1+1 deepspeed-3 image", **FLOAT32},
    "1+1+2 deepspeed-2": {"layout": "1+1+2 deepspeed-2", **FLOAT32},
    "colocated 2 deepspeed-2 image, clipped": {"layout": "colocated 2 deepspeed-2 image", "clip": 0.2, **FLOAT32},
    "colocated 2 deepspeed-3 audio": {"layout": "colocated 2 deepspeed-3 audio", **FLOAT32},
}
QUICK = [
    "auto",
    "1+1+1",
    "2+1+2, clipped",
    "1+1+1, frozen eye",
    "1+1+1, a wide ear",
    "mixed 1+2, clipped",
    "colocated 2 fsdp image, letters",
]
ALL = [*QUICK, *(pytest.param(case, marks=pytest.mark.full) for case in CASES if case not in QUICK)]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Runs a case once, or a case with other arguments, and gives its folder."""
    folder = tmp_path_factory.mktemp("hearing")

    @cache
    def folder_of(name: str, target: str = "hearing", **more: Any) -> Path:
        arguments = {**CASES[name], **more}
        ranks = ranks_of(arguments["layout"])
        if "deepspeed" in name:
            pytest.importorskip("deepspeed")
        if target == "plain_hearing":
            told = ("module", "clip", "letters", "divided", "feels", "deep", "precision")
            arguments, ranks = {key: arguments[key] for key in told if key in arguments}, 1
        imports = "deepspeed" if "deepspeed" in name else None
        job = Job(f"{name} {target} {len(more)}", f"tests.exactness.{target}:train", ranks, arguments, imports=imports)
        return run_jobs(folder, [job])[job.name].check().folder

    return folder_of


@pytest.fixture(scope="module")
def run(folder_of: Callable[..., Path]) -> Callable[..., Run]:
    return cache(lambda *named: read_run(folder_of(*named)))


@pytest.mark.parametrize("case", ALL)
def test_two_encoders_train_as_the_plain_loop_does(run: Callable[..., Run], case: str):
    found, plain = run(case), run(case, "plain_hearing")
    is_coarse, is_deep = ("precision" in CASES[case], "deep" in CASES[case])
    limit = 1e-5 if is_coarse else LIMIT
    compared = without_key_biases if is_coarse or is_deep else lambda weights: weights  # AdamW steps their rounding
    assert error(found.initial, plain.initial) == 0.0
    assert found.losses == pytest.approx(plain.losses, rel=limit)
    assert max(map(error, found.gradients, plain.gradients)) <= limit
    assert max(map(error, map(compared, found.weights), map(compared, plain.weights))) <= limit


@pytest.mark.parametrize("case", QUICK)
def test_an_encoder_without_media_in_a_step_gets_no_gradient(run: Callable[..., Run], case: str):
    gradients, frozen = run(case).gradients, CASES[case].get("module", {}).get("frozen", [])
    eye, ear, reader = LETTERS if "letters" in case else ("eye", "ear", "backbone")
    for step, used in {IMAGES_ONLY: {"image": eye}, AUDIO_ONLY: {"audio": ear}, NO_MEDIA: {}}.items():
        expected = {reader, *(encoder for modality, encoder in used.items() if modality not in frozen)}
        assert {name.partition(".")[0] for name, value in gradients[step].items() if value is not None} == expected


def test_a_frozen_encoder_beside_one_that_trains_runs_forwards_only(folder_of: Callable[..., Path]):
    backbone, eye, ear = (work for work, *_ in read_down(folder_of("1+1+1, frozen eye")))
    assert (backbone, eye, ear) == (["backward", "forward"], ["forward"], ["backward", "forward"])


def test_and_works_ahead_into_later_steps_which_the_other_does_not(folder_of: Callable[..., Path]):
    assert [ahead for *_, ahead in read_down(folder_of("1+1+1, frozen eye"))] == [False, True, False]


@pytest.mark.full
def test_nor_do_two_frozen_encoders_run_backwards(folder_of: Callable[..., Path]):
    works = [work for work, *_ in read_down(folder_of("1+1+1, both frozen"))]
    assert works == [["backward", "forward"], ["forward"], ["forward"]]


@pytest.mark.parametrize("case", ["1+1+1", "2+1+2, clipped"])
def test_two_encoders_validate_and_predict(folder_of: Callable[..., Path], case: str):
    of_ranks = read_down(folder_of(case))
    backbones = int(CASES[case]["layout"].rpartition("+")[2])
    assert len({loss for _, loss, *_ in of_ranks}) == 1
    assert all((count > 0) == (rank < backbones) for rank, (_, _, count, _) in enumerate(of_ranks))
    if case == "1+1+1":
        assert of_ranks[0][1] == pytest.approx(read_down(folder_of("auto"))[0][1], rel=1e-9)


def test_a_run_of_two_encoders_goes_on_bit_for_bit(folder_of: Callable[..., Path]):
    whole = folder_of("1+1+1, frozen eye")
    resumed = read_run(folder_of("1+1+1, frozen eye", resume=str(whole / "saved.ckpt")))
    found = read_run(whole)
    assert resumed.losses == found.losses[SAVED_AT:]
    assert len(resumed.weights) == STEPS - SAVED_AT
    for before, after in zip(found.weights[SAVED_AT:], resumed.weights, strict=True):
        assert error(after, before) == 0.0


def test_a_checkpoint_of_two_encoders_goes_on_on_other_ranks(folder_of: Callable[..., Path], run: Callable[..., Run]):
    saved = str(folder_of("1+1+1") / "saved.ckpt")
    resumed = read_run(folder_of("2+1+2, clipped", resume=saved, clip=None))
    assert error(resumed.weights[-1], run("1+1+1").weights[-1]) <= LIMIT


def test_halves_of_other_names_are_called_by_these(folder_of: Callable[..., Path]):
    folder = folder_of("colocated 2 fsdp image, letters")
    assert {path.name for path in (folder / "saved.ckpt").iterdir() if path.is_dir()} == {"a", "b", "c"}
    (header, *_) = (folder / "log" / "metrics.csv").read_text().splitlines()
    names = header.split(",")
    assert {name for name in names if name.endswith("_imbalance")} == {f"packing/{role}_imbalance" for role in "abc"}
    assert {name.split("/")[1].split()[0] for name in names if name.startswith("time/")} == {"a", "b", "c"}
    assert not [name for name in names if "encoder" in name or "backbone" in name]


def test_a_checkpoint_has_a_folder_for_every_role_and_exports_to_a_plain_file(
    folder_of: Callable[..., Path], run: Callable[..., Run], tmp_path: Path
):
    saved = folder_of("1+1+1") / "saved.ckpt"
    assert {path.name for path in saved.iterdir() if path.is_dir()} == {"encoder_image", "encoder_audio", "backbone"}
    export_checkpoint(saved, tmp_path / "plain.ckpt")
    weights = torch.load(tmp_path / "plain.ckpt", weights_only=True)["state_dict"]
    assert error(weights, run("1+1+1").weights[SAVED_AT - 1]) == 0.0
