"""Public models by name."""

from __future__ import annotations

import pytest

from flowtrain_lightning.allocator import PlanningError, named_model
from flowtrain_lightning.allocator.public_models import CONFIGS

BILLIONS = {
    "qwen2-vl-2b": 2.21,
    "qwen2-vl-7b": 8.29,
    "qwen2-vl-72b": 73.4,
    "qwen2.5-vl-3b": 3.75,
    "qwen2.5-vl-7b": 8.29,
    "qwen2.5-vl-32b": 33.5,
    "qwen2.5-vl-72b": 73.4,
    "qwen3-vl-4b": 4.44,
    "qwen3-vl-8b": 8.77,
    "qwen3-vl-32b": 33.4,
    "qwen3-vl-30b-a3b": 31.1,
    "llava-1.5-7b": 7.06,
    "llava-1.5-13b": 13.35,
    "internvl3-8b": 7.94,
    "internvl3-78b": 78.4,
    "internvl3.5-8b": 8.5,
    "internvl3.5-38b": 38.4,
    "internvl3.5-30b-a3b": 30.8,
    "llava-onevision-7b": 8.03,
    "smolvlm-2.2b": 2.25,
    "smolvlm2-2.2b": 2.25,
    "smolvlm2-500m": 0.507,
    "gemma-3-4b": 4.3,
    "gemma-3-12b": 12.2,
    "gemma-3-27b": 27.4,
    "qwen2-audio-7b": 8.4,
    "qwen2.5-omni-3b": 4.70,
    "qwen2.5-omni-7b": 8.93,
    "metaquery-3b": 5.36,
    "metaquery-7b": 9.89,
}
"""Parameters as the models' pages give them; of omni models those of the thinker, as its class counts them; of what
draws with Sana's transformer that, too, whose class has 1.604 billion."""


@pytest.mark.parametrize("name", CONFIGS)
def test_a_named_model_has_the_parameters_that_its_page_gives(name):
    module = named_model(name)
    total = sum(half.parameters for half in module.roles.values())
    assert total / 1e9 == pytest.approx(BILLIONS[name], rel=0.015)


def test_only_some_towers_have_features_that_leave_behind_several_layers():
    levels = {name: [half.levels for half in named_model(name).encoders.values()] for name in CONFIGS}
    assert {name for name, of_each in levels.items() if max(of_each, default=1) > 1} == {
        name for name in CONFIGS if name.startswith("qwen3-vl")
    }
    without_projector = named_model("qwen3-vl-8b").with_frozen("tower").with_projectors_apart({"image": 1.0})
    assert without_projector.encoders["image"].levels == 4
    assert levels["qwen3-vl-8b"] == [4]


def test_a_misspelt_name_is_answered_with_the_nearest():
    with pytest.raises(PlanningError, match=r"no model 'qwen2.5-vl-7'. Did you mean 'qwen2.5-vl-7b'\? Known are"):
        named_model("qwen2.5-vl-7")
