"""LLaVA-OneVision: how many rows of features an image has, and the parameter that lies in no module."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("transformers")

from tests.models.tiny import FAMILIES

FAMILY = FAMILIES["llava_onevision"]


def built(**more):
    module = FAMILY.kind(FAMILY.config, **more)
    module.configure_model()
    return module


@pytest.fixture(scope="module")
def model():
    return built().model.model


@settings(max_examples=60, deadline=None)
@given(height=st.integers(1, 400), width=st.integers(1, 400), alone=st.booleans())
def test_rows_are_as_many_as_the_model_joins(model, height, width, alone):
    if max(height, width) > 200 * min(height, width):
        return
    grid = FAMILY.images.size(height, width, alone=alone)
    rows = torch.zeros(grid[0] // grid[1], grid[1] ** 2, 8)
    joined, _ = model.pack_image_features([rows], [(height, width)], torch.zeros(8), vision_aspect_ratio="anyres_max_2")
    assert FAMILY.images.rows_of_features(grid, (height, width)) == len(joined[0])


def test_the_row_at_a_lines_end_can_be_frozen_by_its_own_name():
    paths = ["model.vision_tower", "model.multi_modal_projector", "model.image_newline"]
    assert all(not weight.requires_grad for weight in built(frozen=paths).model.model.parametrizations.parameters())
    with pytest.raises(ValueError, match=r"frozen names 'model\.newline'"):
        built(frozen="model.newline")


def test_towers_whose_first_row_is_left_out_are_refused():
    with pytest.raises(ValueError, match="those that are published keep all"):
        FAMILY.kind({**FAMILY.config, "vision_feature_select_strategy": "default"})
