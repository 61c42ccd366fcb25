"""A run that goes on from a checkpoint reads exactly the batches that were left."""

from dataclasses import replace

import pytest

from flowtrain_lightning.packing import CostModel
from tests.data.support import TOKEN_STEPS, Recorder, SaveAlways, Scheduled, data_module, quiet_trainer, trained


@pytest.mark.parametrize("interval", [1.0, 3], ids=["validation at the end", "validation in mid-epoch"])
@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.full)])
def test_a_run_resumed_from_any_checkpoint_reads_exactly_the_rest(file, tmp_path, interval, workers):
    settings = {"max_epochs": 2, "val_check_interval": interval, "num_sanity_val_steps": 0}

    def build():
        return data_module(file, file, num_workers=workers)

    whole = trained(tmp_path, build(), callbacks=[SaveAlways(tmp_path)], **settings)
    checkpoints = sorted(tmp_path.glob("*.ckpt"))
    assert len(checkpoints) == 8 + 2 + 2
    for checkpoint in checkpoints:
        done = int(checkpoint.stem.split("-")[1])
        assert trained(tmp_path, build(), checkpoint, **settings) == whole[done:], checkpoint


def test_a_run_resumes_exactly_also_where_optimizers_ask_for_the_number_of_steps(file, tmp_path):
    settings = {"max_epochs": 2, "num_sanity_val_steps": 0}
    whole = trained(tmp_path, data_module(file), callbacks=[SaveAlways(tmp_path)], **settings)
    data = data_module(file)
    for done in (2, 4, 6):
        model = Scheduled()
        checkpoint = tmp_path / f"batch-{done}.ckpt"
        quiet_trainer(tmp_path, **settings).fit(model, data, ckpt_path=checkpoint, weights_only=True)
        assert model.trained == whole[done:], checkpoint


@pytest.mark.parametrize("kind", [Recorder, Scheduled])
def test_a_run_on_a_token_stream_resumed_from_any_checkpoint_reads_the_rest(file, tmp_path, kind):
    settings = {"max_epochs": 2, "num_sanity_val_steps": 0}
    whole = trained(
        tmp_path, data_module(file, file, token_steps=TOKEN_STEPS), callbacks=[SaveAlways(tmp_path)], **settings
    )
    for checkpoint in sorted(tmp_path.glob("*.ckpt")):
        model, done = kind(), int(checkpoint.stem.split("-")[1])
        data = data_module(file, file, token_steps=TOKEN_STEPS)
        quiet_trainer(tmp_path, **settings).fit(model, data, ckpt_path=checkpoint, weights_only=True)
        assert model.trained == whole[done:], checkpoint


def test_settings_of_the_checkpoint_hold_in_loaders_of_later_epochs_too(file, tmp_path):
    settings = {"max_epochs": 3, "num_sanity_val_steps": 0, "reload_dataloaders_every_n_epochs": 1}
    given = data_module(file, token_steps=replace(TOKEN_STEPS, balance_group=1))
    whole = trained(tmp_path, given, callbacks=[SaveAlways(tmp_path)], **settings)
    unset = data_module(file, token_steps=TOKEN_STEPS)
    assert trained(tmp_path, unset, tmp_path / "batch-2.ckpt", **settings) == whole[2:]


def test_a_run_with_limited_epochs_resumes_exactly(file, tmp_path):
    settings = {"max_epochs": 3, "limit_train_batches": 3}
    whole = trained(tmp_path, data_module(file), callbacks=[SaveAlways(tmp_path)], **settings)
    assert [step for _, step, _ in whole] == [0, 1, 2] * 3
    for done in (2, 3, 5, 6):
        checkpoint = tmp_path / f"batch-{done}.ckpt"
        assert trained(tmp_path, data_module(file), checkpoint, **settings) == whole[done:]


def test_a_checkpoint_that_is_validated_does_not_move_later_training(file, tmp_path):
    settings = {"max_epochs": 1, "num_sanity_val_steps": 0}
    whole = trained(tmp_path, data_module(file, file), callbacks=[SaveAlways(tmp_path)], **settings)
    data, model = data_module(file, file), Recorder()
    trainer = quiet_trainer(tmp_path, **settings)
    trainer.validate(model, data, ckpt_path=tmp_path / "batch-2.ckpt", weights_only=True, verbose=False)
    trainer.fit(model, data)
    assert model.trained == whole


def test_cost_models_that_are_not_set_come_back_from_the_checkpoint(file, tmp_path):
    cost, media_costs = CostModel(1.0, 0.5, 0.25), {"encoder": CostModel(0.1, 0.0, 0.0)}
    settings = {"max_steps": 2}
    given = data_module(file, cost=cost, media_costs=media_costs)
    trained(tmp_path, given, callbacks=[SaveAlways(tmp_path)], **settings)
    for later, expected in (({}, cost), ({"cost": CostModel(2.0, 0.0, 0.0)}, CostModel(2.0, 0.0, 0.0))):
        data = data_module(file, **later)
        seen = []
        model = Recorder()
        model.on_train_start = lambda data=data, seen=seen: seen.append(data.trainer.train_dataloader.steps.packing)
        quiet_trainer(tmp_path, max_steps=3).fit(model, data, ckpt_path=tmp_path / "batch-2.ckpt", weights_only=True)
        assert (seen[0].cost, seen[0].media_costs) == (expected, media_costs)


def test_another_way_to_pack_the_same_samples_is_told(file, tmp_path, caplog):
    trained(tmp_path, data_module(file), callbacks=[SaveAlways(tmp_path)], max_steps=2)
    with caplog.at_level("INFO"):
        trained(tmp_path, data_module(file, sync_every="microbatch"), tmp_path / "batch-2.ckpt", max_steps=3)
    assert any("packed otherwise: sync_every was None, is microbatch" in told for told in caplog.messages)


def test_resuming_with_a_setting_that_moves_samples_says_which(file, tmp_path):
    trained(tmp_path, data_module(file), callbacks=[SaveAlways(tmp_path)], max_steps=2)
    with pytest.raises(ValueError, match=r"position in the data .* global_batch_size was 4, is 3"):
        trained(tmp_path, data_module(file, global_batch_size=3), tmp_path / "batch-2.ckpt", max_steps=4)
