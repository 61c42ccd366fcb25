"""The recipe whose frozen language model tells a generator what to draw: it trains, it draws, it knows colours."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from flowtrain_lightning.data import FlowDataModule
from recipes.metaquery.make_data import COLOURS, FIGURES, SIDE, picture, write
from recipes.metaquery.module import MetaQuery
from recipes.metaquery.report import IMAGES, dominant, drawn, held_out, sheet
from tests.exactness.layouts import trainer_for

SMALL = {"backbone_width": 32, "backbone_depth": 1, "generator_width": 32, "generator_depth": 1, "encoder_depth": 1}


@pytest.mark.parametrize("colour", COLOURS)
@pytest.mark.parametrize("figure", FIGURES)
def test_the_colour_of_each_figure_is_recognised(colour, figure):
    draw = np.random.default_rng(1)
    assert dominant(np.asarray(picture(colour, figure, draw))) == colour


def test_it_trains_what_is_not_frozen_and_draws_a_picture_for_each_prompt(tmp_path: Path):
    draw, pairs = np.random.default_rng(0), [("red", "circle"), ("blue", "star")]
    for stage, count in (("train", 8), ("val", 5)):
        write(tmp_path, stage, pairs, count, draw)
    model = MetaQuery(**SMALL)
    data = FlowDataModule(
        tmp_path / "train.jsonl",
        token_budget=64,
        global_batch_size=8,
        tokenizer="recipes/quickstart/tokenizer.json",
        images=IMAGES,
    )
    trainer_for("auto", max_steps=1, limit_val_batches=0, default_root_dir=tmp_path).fit(model, data)
    trained = {name.partition(".")[0] for name, weight in model.named_parameters() if weight.grad is not None}
    assert trained == {"queries", "connector", "drawer"}
    with torch.random.fork_rng():
        asked, pictures = drawn(model, held_out(model, tmp_path))
    assert sorted(asked) == ["blue"] * 2 + ["red"] * 3
    assert {each.shape for each in pictures} == {(SIDE, SIDE, 3)}
    assert sheet(pictures).size == (360, 36)
