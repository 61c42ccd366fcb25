"""The recipe of a model that draws: what it makes, and that the words decide what colour is drawn."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from recipes.metaquery.scenes import COLOURS, GROUNDS, SHAPES, colour_of, wishes, with_other_prompts, write_scenes


def told(path: Path) -> list[tuple[str, str]]:
    """The words and the picture of each record."""
    records = [json.loads(line)["messages"] for line in path.read_text().splitlines()]
    return [(asked["content"][1]["text"], answer["content"][0]["path"]) for asked, answer in records]


def test_a_picture_has_the_colour_that_words_ask_for(tmp_path: Path) -> None:
    every = list(itertools.product(COLOURS, SHAPES, GROUNDS))
    for text, picture in told(write_scenes(tmp_path, every, 2 * len(every), seed=0)):
        assert colour_of(np.asarray(Image.open(tmp_path / picture))) == text.split()[2]


def test_what_is_held_out_is_never_trained_on() -> None:
    trained_on, held_out = wishes(20)
    assert len(held_out) == 20
    assert len({*trained_on, *held_out}) == len(trained_on) + 20 == len(COLOURS) * len(SHAPES) * len(GROUNDS)
    assert {colour for colour, _, _ in trained_on} == {*COLOURS}


def test_other_prompts_are_those_of_other_records(tmp_path: Path) -> None:
    own = write_scenes(tmp_path, wishes(20)[1], 40, seed=2)
    before, after = (told(path) for path in (own, with_other_prompts(own, seed=3)))
    assert sorted(text for text, _ in before) == sorted(text for text, _ in after)
    assert [picture for _, picture in before] == [picture for _, picture in after]
    assert np.mean([one == other for one, other in zip(before, after, strict=True)]) < 0.3


@pytest.mark.full
def test_it_trains_and_draws(tmp_path: Path) -> None:
    run = pytest.importorskip("recipes.metaquery.run", reason="needs diffusers")
    drawn = run.train(tmp_path, None, records=32, prompts=4, steps=2, devices=1)
    assert 0 <= drawn.own <= 1
    assert Image.open(tmp_path / "drawn.png").size[1] > 0
    assert (tmp_path / "drawing.ckpt").exists()


@pytest.mark.full
@pytest.mark.timeout(5400)
def test_it_draws_the_colour_that_is_named(tmp_path: Path) -> None:
    run = pytest.importorskip("recipes.metaquery.run", reason="needs diffusers")
    taught = teach(tmp_path)
    drawn = run.train(tmp_path, taught, records=run.RECORDS, prompts=run.PROMPTS, steps=run.STEPS, devices=1)
    assert drawn.own >= 0.8
    assert drawn.others <= 2 * run.CHANCE


def teach(folder: Path) -> Path:
    """Trains the quickstart for as long as its recipe does; returns the checkpoint."""
    import lightning as L

    from recipes.quickstart.module import QuickstartVLM
    from recipes.quickstart.report import QUIET, configuration, data_module

    configured = configuration()
    settings = configured["trainer"]
    L.seed_everything(configured["seed_everything"], verbose=False)
    trainer = L.Trainer(
        devices=1,
        max_steps=settings["max_steps"],
        gradient_clip_val=settings["gradient_clip_val"],
        limit_val_batches=0,
        default_root_dir=folder,
        **QUIET,
    )
    trainer.fit(QuickstartVLM(**configured["model"]["init_args"]), data_module(configured))
    trainer.save_checkpoint(folder / "taught.ckpt")
    return folder / "taught.ckpt"
