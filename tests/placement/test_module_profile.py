"""A profile's times are true, and measuring leaves module, data and random numbers as they were."""

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping

from flowtrain_lightning.data import DataError
from flowtrain_lightning.placement import half_timing, module_profile
from flowtrain_lightning.placement.module_profile import profile_module
from flowtrain_lightning.placement.profile import ProfileError
from tests.placement.emulated import BACKBONE_COST, ENCODER_COST, EmulatedVLM
from tests.tiny import WIDTH, TinyVLM, tiny_data, write_records


@pytest.fixture
def data(tmp_path):
    write_records(tmp_path, 48)
    return tiny_data(tmp_path)


def profiled(module, data, **settings):
    quick = {"accelerator": "cpu", "progress": False, "seconds": 0.0, "reduction": False}
    return profile_module(module, data, **(quick | settings))


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    folder = tmp_path_factory.mktemp("emulated")
    write_records(folder, 48)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(half_timing, "now", EmulatedVLM.clock.now)
        return profiled(EmulatedVLM(), tiny_data(folder), seconds=60.0)


@pytest.mark.parametrize("lengths", [[41], [35, 35, 35, 31], [99, 52], [300, 200, 7]])
def test_times_of_sizes_that_were_not_measured_are_predicted(lengths, emulated):
    lengths = np.array(lengths)
    assert lengths.sum() not in {item.tokens for role in emulated.roles.values() for item in role.measured}
    assert emulated.cost.of_set(lengths) == pytest.approx(BACKBONE_COST.of_set(lengths), rel=0.01)
    assert emulated.media_costs["encoder"].of_set(lengths) == pytest.approx(ENCODER_COST.of_set(lengths), rel=0.01)


def test_a_cost_model_explains_what_it_was_fitted_to(emulated):
    for role in emulated.roles.values():
        assert role.error < 0.01
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
    assert profile.media_costs == {}
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


def test_measuring_ends_in_time_but_not_before_every_size_was_measured(data):
    EmulatedVLM.microbatches = 0
    profile = profiled(EmulatedVLM(), data)
    assert EmulatedVLM.microbatches == 2 * len(profile.roles["backbone"].measured)


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


def test_what_waits_for_a_validation_is_left_out(data):
    class OnPlateau(TinyVLM):
        def configure_callbacks(self):
            return [EarlyStopping("val_loss")]

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}

    assert profiled(OnPlateau(), data).roles["backbone"].optimizer_seconds > 0


@pytest.mark.full
def test_what_two_ranks_take_to_sum_gradients_is_measured_too(data):
    reduction = profiled(TinyVLM(), data, reduction=True).reduction
    assert reduction.ranks == 2
    assert reduction.seconds_per_byte > 0


def test_a_profile_is_made_also_where_no_ranks_can_be_started(data, monkeypatch):
    def fails():
        raise ProfileError("No ranks.")

    monkeypatch.setattr(module_profile, "measure_reduction", fails)
    with pytest.warns(UserWarning, match="No ranks. The profile says nothing about that."):
        assert profiled(TinyVLM(), data, reduction=True).reduction is None


def test_flops_are_counted_with_the_trainer_at_hand(data):
    class Asking(TinyVLM):
        def merge(self, batch, features):
            assert self.trainer.datamodule.token_budget == 160
            return super().merge(batch, features)

    profile = profiled(Asking(), data, flops=True, precision="bf16-true")
    assert all(role.flops.forward.linear > 0 for role in profile.roles.values())
    assert profile.roles["backbone"].flops_per_second > 0


def test_a_profile_is_made_also_of_a_module_whose_flops_cannot_be_counted(data):
    class Reading(TinyVLM):
        def merge(self, batch, features):
            inputs = super().merge(batch, features)
            assert inputs["x"].isfinite().all()
            return inputs

    with pytest.warns(UserWarning, match=r"FLOPs of Reading cannot be counted.*The profile says nothing about FLOPs."):
        profile = profiled(Reading(), data, flops=True)
    assert profile.roles["backbone"].flops is None


def test_without_training_data_there_is_nothing_to_measure(tmp_path):
    write_records(tmp_path, 4, name="val.jsonl")
    with pytest.raises(DataError, match="no train data"):
        profiled(TinyVLM(), tiny_data(tmp_path))
