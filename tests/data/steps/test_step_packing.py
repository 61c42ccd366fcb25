"""Cost models decide how a step is packed: those given, those of a profile, or those of a checkpoint."""

import json
from dataclasses import asdict

import numpy as np
import pytest

from flowtrain_lightning.data import DataError, PackingConfig
from flowtrain_lightning.data.steps.step_packing import StepPacking
from flowtrain_lightning.packing import DEFAULT_COST, CostModel, SampleSizes
from flowtrain_lightning.placement.profile import write_profile
from tests.data.support import data_module, write_set
from tests.packing.sizes import members_of
from tests.placement.test_profile import PROFILE

COST, MEDIA_COSTS = CostModel(1.0, 0.5, 0.25), {"encoder": CostModel(0.1, 0.0, 0.0)}
UNSET = frozenset({"cost", "media_costs"})


@pytest.fixture
def profile(tmp_path):
    write_profile(PROFILE, tmp_path / "profile.json")
    return tmp_path / "profile.json"


def sizes(*tokens):
    count = len(tokens)
    ones = np.ones(count, dtype=np.int64)
    return SampleSizes(np.array(tokens), ones, np.arange(count + 1), ones, ones)


def test_the_cost_model_decides_who_computes_what():
    members, lengths = members_of(1, 2), [8, 4, 4, 4, 4]

    def totals(cost):
        plan = StepPacking(16, cost).plan(sizes(*lengths), np.arange(5), members)
        return sorted(sum(lengths[i] for members in of_rank for i in members) for of_rank in plan.microbatches)

    assert totals(CostModel(1.0, 0.0, 0.0)) == [12, 12]
    assert totals(CostModel(0.0, 1.0, 0.0)) == [8, 16]


def test_a_rank_with_both_lanes_encodes_what_it_reads():
    members = members_of(2, 2, colocated=((1, 0), (0, 1)))
    plan = StepPacking(16).plan(sizes(8, 8, 8, 8), np.arange(4), members)
    assert {(entry.readers[0].member, entry.maker.member) for entry in plan.entries} == {(0, 1), (1, 0)}


@pytest.mark.parametrize("packing", [StepPacking(16), StepPacking(16, COST, MEDIA_COSTS, "microbatch")])
def test_a_checkpoint_brings_back_cost_models_that_are_not_set(packing):
    state = json.loads(json.dumps(packing.state_dict()))
    assert StepPacking(16, sync_every=packing.sync_every).resumed_from(state, UNSET) == packing


def test_cost_models_that_are_set_stay_on_a_resume():
    given = StepPacking(32, COST, MEDIA_COSTS)
    assert given.resumed_from(StepPacking(16).state_dict(), frozenset()) == given


def test_without_a_profile_what_is_given_holds():
    assert PackingConfig(COST).with_profile_read() == PackingConfig(COST)
    assert PackingConfig(COST).in_effect(16) == StepPacking(16, COST)
    assert PackingConfig().in_effect(16) == StepPacking(16, DEFAULT_COST)


@pytest.mark.parametrize("kind", [str, lambda path: path])
def test_a_profile_brings_the_cost_models_of_all_roles(profile, kind):
    found = PackingConfig(profile=kind(profile), sync_every="microbatch").with_profile_read()
    assert found == PackingConfig(PROFILE.cost, PROFILE.media_costs, sync_every="microbatch")


def test_an_encoder_that_was_not_measured_has_no_cost_model(profile):
    content = json.loads(profile.read_text())
    content["roles"]["encoder"]["cost"] = {"linear": 0.0, "quadratic": 0.0, "constant": 0.0}
    profile.write_text(json.dumps(content))
    assert PackingConfig(profile=profile).with_profile_read() == PackingConfig(PROFILE.cost, {})


def test_a_profile_with_what_draws_behind_the_trunk_brings_a_cost_model_for_each(profile):
    content = json.loads(profile.read_text())
    drawing = CostModel(0.0, 2.0, 0.0)
    content["roles"]["generator"] = {**content["roles"]["backbone"], "cost": asdict(drawing)}
    content["behind"] = ["generator"]
    profile.write_text(json.dumps(content))
    found = PackingConfig(profile=profile).with_profile_read()
    assert found == PackingConfig(PROFILE.cost, {**PROFILE.media_costs, "generator": drawing})


def test_a_file_that_is_missing_or_no_profile_is_named(tmp_path):
    with pytest.raises(DataError, match=r"none\.json cannot be read"):
        PackingConfig(profile=tmp_path / "none.json").with_profile_read()
    for text in ("", "[]", "{}", '{"roles": {"backbone": {"cost": {"linear": -1}}}}'):
        (tmp_path / "other.json").write_text(text)
        with pytest.raises(DataError, match=r"other\.json holds no cost models.*flowtrain profile"):
            PackingConfig(profile=tmp_path / "other.json").with_profile_read()


def test_the_data_module_packs_by_the_cost_models_of_its_profile(profile, tmp_path):
    data = data_module(write_set(tmp_path / "d.jsonl", 18), profile=profile)
    packing = data.train_dataloader().steps.packing
    assert (packing.cost, packing.media_costs) == (PROFILE.cost, PROFILE.media_costs)
