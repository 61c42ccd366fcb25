import numpy as np
import pytest
import torch

from flowtrain_lightning.data import DataError
from flowtrain_lightning.profiling import profile_module
from tests.profiling.slow import BACKBONE_COST, ENCODER_COST, SlowVLM
from tests.tiny import WIDTH, TinyVLM, tiny_data, write_records


@pytest.fixture
def data(tmp_path):
    write_records(tmp_path, 48)
    return tiny_data(tmp_path)


def profiled(module, data, **settings):
    return profile_module(module, data, **{"accelerator": "cpu", "progress": False, "seconds": 0.0, **settings})


@pytest.mark.parametrize("lengths", [[40], [35, 35, 35, 30], [100, 50]])
def test_times_of_sizes_that_were_not_measured_are_predicted(lengths, profile_of_slow_halves):
    lengths = np.array(lengths)
    for found, true in (
        (profile_of_slow_halves.cost, BACKBONE_COST),
        (profile_of_slow_halves.encoder_cost, ENCODER_COST),
    ):
        # Beside its sleep each half computes for one or two milliseconds, and a busy machine wakes late.
        assert 0.9 * true.of_set(lengths) < found.of_set(lengths) < 1.1 * true.of_set(lengths) + 4e-3


@pytest.fixture(scope="module")
def profile_of_slow_halves(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slow")
    write_records(folder, 48)
    return profiled(SlowVLM(), tiny_data(folder), seconds=3.0)


def test_a_cost_model_explains_what_it_was_fitted_to(profile_of_slow_halves):
    for role in profile_of_slow_halves.roles.values():
        assert role.error < 0.1
        assert len({item.tokens for item in role.measured}) > 3


def test_the_halves_weights_gradients_and_features_are_counted(data):
    profile = profiled(TinyVLM(levels=2), data)
    module = TinyVLM(levels=2)
    module.configure_model()
    for role, half in (("encoder", module.encoder), ("backbone", module.backbone)):
        numbers = sum(weight.numel() for weight in half.parameters())
        assert profile.roles[role].parameters == numbers
        assert profile.roles[role].gradient_bytes == 4 * numbers
        assert profile.roles[role].optimizer_seconds > 0
        assert 0 < profile.roles[role].forward_share < 1
    assert profile.feature_bytes == 2 * WIDTH * 4


def test_a_frozen_encoder_is_timed_forward_only(data):
    encoder = profiled(TinyVLM(freeze_encoder=True), data).roles["encoder"]
    assert not encoder.trains
    assert encoder.forward_share == 1
    assert encoder.gradient_bytes == encoder.optimizer_seconds == 0
    assert encoder.cost.of_set(np.array([40])) > 0


def test_without_media_the_encoder_costs_nothing(tmp_path):
    write_records(tmp_path, 16, images=False)
    profile = profiled(TinyVLM(), tiny_data(tmp_path))
    assert profile.encoder_cost is None
    assert profile.feature_bytes == 0
    assert profile.roles["encoder"].optimizer_seconds == 0


def test_the_module_and_random_numbers_are_as_they_were(data):
    module = TinyVLM()
    module.configure_model()
    before = {name: weight.clone() for name, weight in module.named_parameters()}
    state = torch.get_rng_state()
    profiled(module, data)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(weight, before[name]) and weight.grad is None for name, weight in module.named_parameters())


def test_measuring_ends_when_time_is_up_but_not_before_every_size_was_measured(data):
    SlowVLM.steps = 0
    profile = profiled(SlowVLM(), data)
    assert SlowVLM.steps == 2 * len(profile.roles["backbone"].measured)


def test_a_module_may_ask_the_trainer_for_its_data_and_precision(data):
    class Asking(TinyVLM):
        def configure_optimizers(self):
            assert self.trainer.datamodule.token_budget == 160
            assert self.trainer.precision == "bf16-mixed"
            return super().configure_optimizers()

        def encode(self, media):
            assert torch.is_autocast_enabled("cpu")
            return super().encode(media)

    profile = profiled(Asking(), data, precision="bf16-mixed")
    assert profile.origin.settings["precision"] == "bf16-mixed"


def test_without_training_data_there_is_nothing_to_measure(tmp_path):
    write_records(tmp_path, 4, name="val.jsonl")
    with pytest.raises(DataError, match="no train data"):
        profiled(TinyVLM(), tiny_data(tmp_path))
