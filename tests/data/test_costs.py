"""Cost models come one by one or from a profile, never from both."""

import json

import pytest

from flowtrain_lightning.data import DataError
from flowtrain_lightning.data.costs import chosen_costs
from flowtrain_lightning.packing import CostModel
from flowtrain_lightning.placement.profile import write_profile
from tests.data.support import data_module, write_set
from tests.placement.test_profile import PROFILE

COST = CostModel(1.0, 0.0, 0.0)


@pytest.fixture
def file(tmp_path):
    write_profile(PROFILE, tmp_path / "profile.json")
    return tmp_path / "profile.json"


def test_without_a_profile_what_is_given_holds():
    assert chosen_costs(COST, None, None) == (COST, None)


def test_a_profile_brings_both_cost_models(file):
    assert chosen_costs(None, None, file) == chosen_costs(None, None, str(file)) == (PROFILE.cost, PROFILE.encoder_cost)


def test_an_encoder_that_was_not_measured_has_no_cost_model(file):
    content = json.loads(file.read_text())
    content["roles"]["encoder"]["cost"] = {"linear": 0.0, "quadratic": 0.0, "constant": 0.0}
    file.write_text(json.dumps(content))
    assert chosen_costs(None, None, file) == (PROFILE.cost, None)


@pytest.mark.parametrize("given", [{"cost": COST, "encoder_cost": None}, {"cost": None, "encoder_cost": COST}])
def test_a_profile_beside_a_cost_model_is_refused(given, file):
    name = next(name for name, value in given.items() if value)
    with pytest.raises(ValueError, match=f"brings cost models, but {name} was given as well; leave one out"):
        chosen_costs(**given, profile=file)


def test_a_file_that_is_missing_or_no_profile_is_named(tmp_path):
    with pytest.raises(DataError, match=r"none\.json cannot be read"):
        chosen_costs(None, None, tmp_path / "none.json")
    for text in ("", "[]", "{}", '{"roles": {"backbone": {"cost": {"linear": -1}}}}'):
        (tmp_path / "other.json").write_text(text)
        with pytest.raises(DataError, match=r"other\.json holds no cost models.*flowtrain profile"):
            chosen_costs(None, None, tmp_path / "other.json")


def test_the_data_module_packs_by_the_costs_of_its_profile(file, tmp_path):
    data = data_module(write_set(tmp_path / "d.jsonl", 18), profile=file)
    planning = data.train_dataloader().steps.planning
    assert (planning.cost, planning.encoder_cost) == (PROFILE.cost, PROFILE.encoder_cost)
