"""Modules from dimensions, and what of them trains."""

from __future__ import annotations

import pytest

from flowtrain_lightning.allocator import PlanningError, describe_dimensions
from flowtrain_lightning.allocator.dimensions import backbone
from flowtrain_lightning.allocator.module_parts import Layers

IMAGE = {"layers": 12, "hidden": 768, "feed_forward": 3072, "heads": 12, "patch": 16, "merge": 2}
AUDIO = {"layers": 6, "hidden": 512, "feed_forward": 2048, "heads": 8, "bins": 80}
BACKBONE = {"layers": 16, "hidden": 1024, "feed_forward": 4096, "heads": 16, "vocabulary": 32000}


def describe(image=IMAGE, **backbone):
    return describe_dimensions({"encoders": {"image": image}, "backbone": {**BACKBONE, **backbone}})


def test_one_encoder_is_the_encoder_and_several_are_told_apart():
    assert list(describe().roles) == ["encoder", "backbone"]
    both = describe_dimensions({"encoders": {"image": IMAGE, "audio": AUDIO}, "backbone": BACKBONE})
    assert list(both.roles) == ["encoder_image", "encoder_audio", "backbone"]


def test_features_are_as_wide_as_the_backbone_unless_said_otherwise():
    assert describe().encoders["image"].result == (1024, 0.25)
    assert describe({**IMAGE, "output": 640}).encoders["image"].result == (640, 0.25)


def test_experts_count_as_parameters_all_and_as_work_the_chosen_ones():
    plain, mixture = describe().backbone, describe(experts={"count": 8, "chosen": 2, "feed_forward": 4096}).backbone
    (of_plain,), (of_mixture,) = plain.layers, mixture.layers
    assert of_mixture.active_feed_forward == 2 * of_plain.active_feed_forward
    added = 7 * 3 * 1024 * 4096 + 1024 * 8
    assert of_mixture.layer_parameters - of_plain.layer_parameters == added


def test_some_layers_may_see_everything_beside_a_window():
    half = backbone(**BACKBONE, window=512, full_layers=4)
    assert [(part.count, part.window) for part in half.layers] == [(12, 512), (4, None)]


@pytest.mark.parametrize(
    ("frozen", "trains"),
    [
        ((), (True, True, True)),
        (("encoder",), (False, False, True)),
        (("tower",), (False, True, True)),
        (("tower", "backbone"), (False, True, False)),
    ],
)
def test_parts_are_frozen_by_name(frozen, trains):
    module = describe().with_frozen(*frozen)
    tower = next(part for part in module.encoders["image"].parts if isinstance(part, Layers))
    projector = module.encoders["image"].parts[-1]
    assert (tower.trainable, projector.trainable, module.backbone.trains) == trains
    assert module.receives_gradient("backbone") == trains[1]


@pytest.mark.parametrize(
    ("specification", "words"),
    [
        ({"encoders": {"image": IMAGE}}, "need 'backbone', and unless it reads text alone 'encoders'"),
        ({"backbone": BACKBONE, "encoders": [IMAGE]}, "with dimensions by name"),
        (
            {"backbone": {"layers": 2}, "encoders": {"image": IMAGE}},
            "The backbone cannot be built: it lacks hidden, feed_forward, heads, vocabulary",
        ),
        (
            {"backbone": {**BACKBONE, "depth": 2}, "encoders": {"image": IMAGE}},
            "it does not know depth. It takes layers, hidden",
        ),
        (
            {"backbone": {**BACKBONE, "layers": 2.5}, "encoders": {"image": IMAGE}},
            "The backbone's layers is 2.5; it must be a whole number",
        ),
        (
            {"backbone": {**BACKBONE, "layers": 0}, "encoders": {"image": IMAGE}},
            "The backbone's layers is 0; it must be a whole number, at least 1",
        ),
        ({"backbone": BACKBONE, "encoders": {"image": {**IMAGE, "heads": 0}}}, "image encoder's heads is 0"),
        (
            {"backbone": BACKBONE, "encoders": {"image": {**IMAGE, "hidden": 100, "heads": 3}}},
            "image encoder's hidden of 100 cannot be divided into 3 heads; change one of them",
        ),
        (
            {"backbone": {**BACKBONE, "experts": {"many": 3}}, "encoders": {"image": IMAGE}},
            "The backbone cannot be built from",
        ),
        (
            {"backbone": {**BACKBONE, "experts": {"count": 4, "chosen": 8, "feed_forward": 64}}},
            "A token chooses 8 of 4 experts; it cannot choose more than all",
        ),
        (
            {"backbone": {**BACKBONE, "experts": {"count": 4, "chosen": 0, "feed_forward": 64}}},
            "The experts' chosen is 0; it must be a whole number, at least 1",
        ),
        ({"backbone": {**BACKBONE, "hidden": None}}, "The backbone's hidden is None; it must be a whole number"),
        (
            {"backbone": {**BACKBONE, "window": 64, "full_layers": 99}},
            "99 of them are said to attend to everything or to be unused; lower full_layers",
        ),
        ({"backbone": {**BACKBONE, "key_value_heads": 3}}, "must be a multiple of the other"),
        ({"backbone": {**BACKBONE, "gated": "no"}}, "The backbone's gated is 'no'; it must be true or false"),
        ({"backbone": BACKBONE, "encoders": {"image": 5}}, "The image encoder is 5; it must be dimensions by name"),
        ({"backbone": BACKBONE, "generator": 5}, "The generator is 5; it must be dimensions by name"),
    ],
)
def test_dimensions_that_do_not_describe_a_module_are_refused(specification, words):
    with pytest.raises(PlanningError, match=words):
        describe_dimensions(specification)


def test_a_module_that_trains_nothing_is_refused():
    with pytest.raises(PlanningError, match="nothing trains; freeze less"):
        describe().with_frozen("encoder", "backbone")


def test_a_language_model_has_a_backbone_alone():
    module = describe_dimensions({"name": "mine", "backbone": BACKBONE})
    assert list(module.roles) == ["backbone"]
    with pytest.raises(PlanningError, match="mine has no encoder, so there is no tower to freeze"):
        module.with_frozen("tower")
