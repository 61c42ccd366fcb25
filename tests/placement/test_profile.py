"""A profile is read as it was written, and a file that is none is refused."""

import json
from dataclasses import replace

import pytest
import torch

from flowtrain_lightning.packing import CostModel
from flowtrain_lightning.packing.cost_model import Observation
from flowtrain_lightning.placement.module_profile import origin_of
from flowtrain_lightning.placement.profile import (
    FlopModel,
    Profile,
    ProfileError,
    ProfileOrigin,
    ReductionCost,
    RoleProfile,
    read_profile,
    write_profile,
)
from tests.tiny import TinyVLM, tiny_data, write_records

ORIGIN = ProfileOrigin("a.Module 12ab", "a processor", {"torch": "2"}, {"precision": "32-true", "threads": 1})
COST = CostModel(2.0, 0.5, 1.0)
BACKBONE = RoleProfile(COST, True, 100, 400, 0.25, 0.3, (Observation(2.0, 4.0, 7.0), Observation(4.0, 16.0, 34.0)))
ENCODER = RoleProfile(CostModel(1.0, 0.0, 0.0), False, 50, 0, 0.0, 1.0, (Observation(3.0, 9.0, 3.0),))
PROFILE = Profile(ORIGIN, {"encoder": ENCODER, "backbone": BACKBONE}, 64, ReductionCost(2, 0.5, 0.25))


COUNTED = replace(BACKBONE, flops=FlopModel(CostModel(10.0, 1.0, 0.0), CostModel(20.0, 2.0, 4.0)))


@pytest.mark.parametrize(
    "profile",
    [
        PROFILE,
        replace(PROFILE, reduction=None, whole=False),
        replace(PROFILE, roles={"encoder": ENCODER, "backbone": COUNTED}),
    ],
)
def test_a_profile_is_read_as_it_was_written(profile, tmp_path):
    write_profile(profile, tmp_path / "profile.json")
    assert read_profile(tmp_path / "profile.json") == profile


def test_a_profile_gives_the_data_module_its_costs():
    assert PROFILE.cost == COST
    assert PROFILE.media_costs == {"encoder": CostModel(1.0, 0.0, 0.0)}


def test_there_is_no_cost_of_encoding_where_no_sample_had_media():
    nothing = replace(ENCODER, measured=())
    assert replace(PROFILE, roles={"encoder": nothing, "backbone": BACKBONE}).media_costs == {}
    assert nothing.error == 0


def test_the_error_of_a_cost_model_is_the_median_of_its_relative_errors():
    assert BACKBONE.error == pytest.approx((0 + 0.5) / 2)


def test_a_speed_is_the_flops_of_all_that_was_measured_over_its_time():
    assert COUNTED.flops_per_second == pytest.approx((30 * 6 + 3 * 20 + 2 * 4) / (7 + 34))
    assert BACKBONE.flops_per_second is None
    assert replace(COUNTED, measured=()).flops_per_second is None


def test_a_reduction_of_nothing_or_of_one_rank_takes_no_time():
    assert ReductionCost(2, 0.5, 0.25).seconds(0) == 0
    assert ReductionCost(2, 0.5, 0.25).seconds(8, ranks=1) == 0


def test_more_ranks_reduce_as_a_ring_does():
    measured = ReductionCost(2, constant=1.0, seconds_per_byte=2.0)
    assert measured.seconds(10) == measured.seconds(10, ranks=2) == 1 + 20
    assert measured.seconds(10, ranks=4) == 3 + 10 * 2.0 * 1.5


def _without(name):
    def change(content):
        del content["roles"]["backbone"][name]

    return change


def _set(value, *path):
    def change(content):
        for name in path[:-1]:
            content = content[name]
        content[path[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_without("cost"), "damaged profile: it lacks 'cost'"),
        (_without("trains"), "trains"),
        (_set(-1.0, "roles", "encoder", "cost", "linear"), "must be a finite number >= 0"),
        (_set("flowtrain profile 99", "format"), "its format is 'flowtrain profile 99'"),
        (_set({}, "roles"), "it has the roles of no half"),
        (_set("fast", "roles", "encoder", "optimizer_seconds"), "could not convert string to float: 'fast'"),
        (_set(None, "feature_bytes"), "NoneType"),
        (_set([1], "reduction"), "damaged profile"),
        (_set(1, "reduction", "ranks"), "a reduction is measured among at least 2 ranks, and not among 1"),
        (_set({"forward": {}}, "roles", "encoder", "flops"), "damaged profile"),
    ],
)
def test_a_changed_file_is_refused_with_what_is_wrong(change, said, tmp_path):
    path = tmp_path / "profile.json"
    write_profile(PROFILE, path)
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(ProfileError, match="flowtrain profile") as error:
        read_profile(path)
    assert said in str(error.value)


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"roles": {}}', "\x00"])
def test_another_file_is_no_profile(text, tmp_path):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ProfileError, match=r"other\.json"):
        read_profile(path)


def test_a_missing_file_and_a_missing_folder_are_named(tmp_path):
    with pytest.raises(ProfileError, match=r"none\.json cannot be read"):
        read_profile(tmp_path / "none.json")
    with pytest.raises(ProfileError, match="cannot be written"):
        write_profile(PROFILE, tmp_path / "none" / "profile.json")


def _origin(module, folder, **settings):
    return origin_of(module, tiny_data(folder, **settings), torch.device("cpu"), "32-true")


def test_an_origin_is_known_before_a_module_is_built_and_stays_when_it_is(tmp_path):
    write_records(tmp_path, 8)
    module = TinyVLM()
    before = _origin(module, tmp_path)
    assert not list(module.parameters())
    module.configure_model()
    assert _origin(module, tmp_path) == before
    assert before.module.startswith("tests.tiny.TinyVLM ")


def test_other_weights_frozen_weights_and_other_settings_are_another_origin(tmp_path):
    write_records(tmp_path, 8)
    plain = _origin(TinyVLM(), tmp_path)
    assert plain == _origin(TinyVLM(lr=0.5), tmp_path)
    assert plain != _origin(TinyVLM(levels=2), tmp_path)
    assert plain != _origin(TinyVLM(freeze_encoder=True), tmp_path)
    assert plain != _origin(TinyVLM(), tmp_path, token_budget=320)
