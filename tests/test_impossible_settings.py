"""Impossible values of settings are refused where they are given, in a sentence that names the setting."""

from __future__ import annotations

import math
from dataclasses import fields

import numpy as np
import pytest

import flowtrain_lightning as flow
from flowtrain_lightning.data import VideoProcessor
from flowtrain_lightning.packing import CostModel

IMPOSSIBLE = (-4, 0, 2.5, math.nan, math.inf, -math.inf, "many", True, [1], {})

NEEDED = {
    CostModel: {"linear": 1.0, "quadratic": 0.0, "constant": 0.0},
    flow.TokenSteps: {"microbatches": 4},
    flow.FlowDataModule: {"token_budget": 8, "global_batch_size": 2},
    flow.KeepFeatures: {"folder": "kept"},
}
"""What a class must be given."""

RIGHT = {
    "encoder_activations": (0,),
    "media_costs": ({},),
    "hang_timeout": (2.5,),
    "timeout": (2.5,),
    "background_saving": (True,),
    "pad_to_budget": (True,),
    "shuffle": (True,),
    "num_workers": (0,),
    "seed": (0,),
    "max_delay": (0,),
    "fps": (2.5,),
    "cache_dir": ("many",),
    "folder": ("many",),
    "profile": ("many",),
    **dict.fromkeys(("linear", "quadratic", "constant"), (0, 2.5)),
}
"""Setting -> those of the values that it may have."""

DATACLASSES = (
    flow.PoolSettings,
    flow.RoleLayout,
    flow.IndexConfig,
    flow.KeepFeatures,
    flow.PackingConfig,
    flow.TokenSteps,
    flow.ImageProcessor,
    VideoProcessor,
    CostModel,
)

SETTINGS = [(kind, field.name) for kind in DATACLASSES for field in fields(kind)] + [
    (kind, name)
    for kind, names in (
        (
            flow.FlowTrainStrategy,
            "encoder_ranks ranks_per_device encoder_activations pool background_saving hang_timeout timeout",
        ),
        (
            flow.FlowDataModule,
            "token_budget global_batch_size seed shuffle num_workers producers token_steps packing index group_by "
            "keep_features",
        ),
    )
    for name in names.split()
]


@pytest.mark.parametrize(("kind", "name"), SETTINGS, ids=lambda each: getattr(each, "__name__", each))
def test_an_impossible_value_is_refused_by_name(kind, name):
    for value in IMPOSSIBLE:
        is_right = any(
            value is right or (value == right and type(value) is type(right)) for right in RIGHT.get(name, ())
        )
        if is_right:
            continue
        with pytest.raises(ValueError, match=name) as refused:
            kind(**{**NEEDED.get(kind, {}), name: value})
        assert str(refused.value).endswith(".")


def test_the_sentence_says_what_was_given_and_what_to_give():
    with pytest.raises(ValueError, match=r"^PoolSettings got bytes=-4; give a whole number of at least 1 or None\.$"):
        flow.PoolSettings(bytes=-4)
    with pytest.raises(ValueError, match=r"^PoolSettings got tier='gpu'; give 'auto', 'host' or 'device'\.$"):
        flow.PoolSettings(tier="gpu")


def test_a_limit_of_more_than_a_year_is_refused():
    with pytest.raises(ValueError, match="a year"):
        flow.FlowTrainStrategy(timeout=1e12)


def test_numbers_of_numpy_and_lists_from_files_are_as_good_as_others():
    assert flow.PoolSettings(bytes=np.int64(4096)).bytes == 4096
    assert CostModel(np.float32(1), 0, 0).linear == 1
    flow.ImageProcessor(mean=[0.5] * 3, std=[0.5] * 3, fixed_size=[224, 224])
