"""The recipe of a language model that draws: what it makes, and that what it draws comes from the prompt."""

from __future__ import annotations

import json
from pathlib import Path

import lightning as L
import numpy as np
import pytest
from tokenizers import Tokenizer

from flowtrain_lightning import FlowDataModule, FlowTrainStrategy

pytest.importorskip("diffusers")
from recipes.metaquery.prompts import COLOURS, dominant_colour, drawing, prompts, write_records
from recipes.metaquery.run import CHANCE, IMAGES, contact_sheet, train
from recipes.quickstart.module import QuickstartVLM

RECIPE = Path("recipes/quickstart")


def test_no_held_out_prompt_is_trained_on_and_each_colour_is_in_both() -> None:
    known, unseen = prompts(100)
    assert len({*known, *unseen}) == len(known) + len(unseen)
    assert {prompt.colour for prompt in known} == {prompt.colour for prompt in unseen} == {*COLOURS}


def test_the_named_colour_dominates_in_every_drawing() -> None:
    draw = np.random.default_rng(0)
    for prompt in (each for some in prompts(100) for each in some):
        assert dominant_colour(np.asarray(drawing(prompt, draw))) == prompt.colour, prompt


def test_a_record_asks_in_words_for_a_picture(tmp_path: Path) -> None:
    _, unseen = prompts(4)
    for line, prompt in zip(write_records(tmp_path, unseen).read_text().splitlines(), unseen, strict=True):
        asked, told = json.loads(line)["messages"]
        assert asked["content"][0]["text"] == str(prompt)
        assert told["content"][0]["generate"]


def test_pictures_are_shown_side_by_side(tmp_path: Path) -> None:
    contact_sheet(np.zeros((12, 32, 32, 3), np.uint8), tmp_path / "sheet" / "drawn.png")
    assert (tmp_path / "sheet" / "drawn.png").stat().st_size > 0


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's model after a third of its steps."""
    folder = tmp_path_factory.mktemp("quickstart")
    tokenizer = Tokenizer.from_file(str(RECIPE / "tokenizer.json"))
    data = FlowDataModule(RECIPE / "data/train.jsonl", tokenizer=tokenizer, images=IMAGES, token_budget=256)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=FlowTrainStrategy(placement="colocated"),
        max_steps=100,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    L.seed_everything(1, verbose=False)
    trainer.fit(QuickstartVLM(learning_rate=1e-3), data)
    trainer.save_checkpoint(folder / "trained.ckpt")
    return folder / "trained.ckpt"


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("devices", [1, 2])
def test_it_draws_what_is_named(tmp_path: Path, trained: Path, devices: int) -> None:
    drawn = train(tmp_path, trained, steps=400, devices=devices)
    assert drawn.own >= 0.8
    assert drawn.others <= 2 * CHANCE
