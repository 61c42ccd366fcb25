"""What a run reads through the data module: which samples, in which order, from which files."""

import json

import lightning as L
import numpy as np
import psutil
import pytest
import torch

from flowtrain_lightning.data import ChatTemplate, DataError, ImageProcessor
from flowtrain_lightning.data.sources.measurers import this_process
from tests.data.support import (
    TOKEN_STEPS,
    Recorder,
    Scheduled,
    data_module,
    message_record,
    quiet_trainer,
    trained,
    write_records,
    write_set,
)
from tests.packing.sizes import shard_of


def test_a_trainer_reads_every_epoch_in_its_own_order(file, tmp_path):
    steps = trained(tmp_path, data_module(file), max_epochs=3)
    assert [(epoch, step) for epoch, step, _ in steps] == [(epoch, step) for epoch in range(3) for step in range(4)]
    assert len({json.dumps([samples for number, _, samples in steps if number == epoch]) for epoch in range(3)}) == 3


def test_lengths_and_the_estimate_of_steps_are_right(file, tmp_path):
    for settings, steps in (({}, 4), ({"global_batch_size": 7}, 2)):
        data, trainer = data_module(file, **settings), quiet_trainer(tmp_path, max_epochs=3)
        estimated = []
        model = Recorder()
        model.on_train_start = lambda trainer=trainer, found=estimated: found.append(trainer.estimated_stepping_batches)
        trainer.fit(model, data)
        assert len(data.train_dataloader()) == steps
        assert estimated == [3 * steps]
        assert trainer.num_training_batches == steps
        assert trainer.global_step == 3 * steps


def test_the_estimate_is_known_to_configure_optimizers(file, tmp_path):
    model = Scheduled()
    quiet_trainer(tmp_path, max_epochs=2).fit(model, data_module(file))
    assert model.estimate == 8
    assert model.trained == trained(tmp_path, data_module(file), max_epochs=2)


def test_epochs_of_microbatches_have_the_length_that_lightning_counts_on(file, tmp_path):
    data, model, trainer = (
        data_module(file, file, token_steps=TOKEN_STEPS),
        Scheduled(),
        quiet_trainer(tmp_path, max_epochs=3),
    )
    trainer.fit(model, data)
    steps = len(trainer.train_dataloader)
    assert model.estimate == trainer.global_step == 3 * steps
    assert [batch[:2] for batch in model.trained] == [(epoch, step) for epoch in range(3) for step in range(steps)]
    assert [len(step) for step in model.validated[-5:]] == [4, 4, 4, 4, 2]


def test_overfitting_repeats_the_same_steps_of_microbatches(file, tmp_path):
    steps = trained(tmp_path, data_module(file, file, token_steps=TOKEN_STEPS), max_epochs=2, overfit_batches=2)
    assert [samples for *_, samples in steps[:2]] == [samples for *_, samples in steps[2:]]


@pytest.mark.filterwarnings("error:You requested to overfit")
def test_overfitting_repeats_the_same_unshuffled_batches(file, tmp_path):
    steps = trained(tmp_path, data_module(file, file), max_epochs=2, overfit_batches=2)
    assert [samples for _, _, samples in steps] == [[0, 1, 2, 3], [4, 5, 6, 7]] * 2


def test_validation_keeps_order_and_tail_and_sees_no_augmentation(file, tmp_path):
    def turned(image, _):
        return image.rotate(180)

    plain, augmented = data_module(file, file), data_module(file, file, augment=turned)
    model = Recorder()
    quiet_trainer(tmp_path).validate(model, plain, verbose=False)
    assert [sample for step in model.validated for sample in step] == list(range(18))
    pairs = []
    for name in ("val_dataloader", "train_dataloader"):
        left, right = (next(iter(getattr(data, name)())).media["encoder"][0] for data in (plain, augmented))
        pairs.append(torch.equal(left.patches, right.patches))
    assert pairs == [True, False]


def test_prediction_reads_prompts(file, tmp_path):
    records = [message_record(0, "ab", "cd", []), message_record(1, "e", "", [])]
    model = Recorder()
    prompts = write_records(tmp_path / "p.jsonl", records)
    quiet_trainer(tmp_path).predict(model, data_module(predict=prompts), return_predictions=False)
    assert model.predicted == [b"\1\3ab\5\4" + b"\1\3e\5\4"]


def test_the_strategy_says_which_shard_is_loaded(file, tmp_path):
    trainer = quiet_trainer(tmp_path, max_steps=1)
    trainer.strategy.rank_shard = shard_of(encoder=0)
    seen = []
    model = Recorder()
    model.on_train_batch_start = lambda batch, _: seen.append(batch)
    trainer.fit(model, data_module(file))
    assert seen[0].microbatches == ()
    assert len(seen[0].media["encoder"]) == len(seen[0].plan.batches["encoder"][0]) > 0


def test_files_are_mixed_by_weight_or_joined(tmp_path):
    files = [write_set(tmp_path / f"{name}.jsonl", count) for name, count in (("a", 6), ("b", 12))]
    mixed = data_module({str(files[0]): 2 / 3, str(files[1]): 1 / 3}, global_batch_size=18)
    mixed.setup("fit")
    samples = next(iter(mixed.train_dataloader())).plan.samples
    assert np.count_nonzero(samples < 6) == 12
    joined = data_module(files, global_batch_size=18)
    joined.setup("fit")
    assert sorted(next(iter(joined.train_dataloader())).plan.samples) == list(range(18))


def test_workers_of_a_trainer_end_with_its_run(file, tmp_path):
    before = set(psutil.Process().children(recursive=True))
    data = data_module(file, file, num_workers=1)
    model = Recorder()
    model.on_train_end = lambda: seen.extend(set(psutil.Process().children(recursive=True)) - before)
    seen = []
    quiet_trainer(tmp_path, max_epochs=2, reload_dataloaders_every_n_epochs=1).fit(model, data)
    assert len(seen) == 2
    assert psutil.wait_procs(seen, timeout=30)[1] == []


def test_a_sample_is_found_again_for_a_report(file):
    data = data_module(file, write_set(file.parent / "v.jsonl", 3, first=50))
    data.setup()
    assert data.record("train", 4).id == "r4"
    assert data.record("val", 1).turns[1].text == "answer 51"
    assert len(data.record("train", 2).images) == 2


def test_the_seed_is_that_of_seed_everything_unless_given(file):
    assert data_module(file, seed=None).seed == 0
    L.seed_everything(11, verbose=False)
    assert data_module(file, seed=None).seed == 11
    assert data_module(file, seed=5).seed == 5


def test_seed_everything_may_come_after_the_data_module(file):
    data = data_module(file, seed=None)
    L.seed_everything(12, verbose=False)
    assert data.seed == 12


def test_only_files_of_the_running_stage_are_opened(file, tmp_path):
    data = data_module(file, tmp_path / "none.jsonl")
    with pytest.raises(DataError, match=r"none\.jsonl: there is no such file"):
        quiet_trainer(tmp_path).validate(Recorder(), data, verbose=False)
    quiet_trainer(tmp_path).test(Recorder(), data_module(tmp_path / "none.jsonl", test=file), verbose=False)


def test_what_was_dropped_is_logged_once(file, tmp_path, caplog):
    (file.parent / "images/4_0.png").unlink()
    with caplog.at_level("INFO"):
        trained(tmp_path, data_module(file, unreadable="drop"), max_steps=1)
    told = [record.message for record in caplog.records if "records used" in record.message]
    assert told == ["d.jsonl: 17 of 18 records used, 1 dropped for a media item that cannot be used."]


def test_data_that_were_not_given_are_asked_for(file, tmp_path):
    with pytest.raises(DataError, match=r"no test data; give it: FlowDataModule\(test="):
        quiet_trainer(tmp_path).test(Recorder(), data_module(file))


def test_real_data_are_read_from_end_to_end(real_data, tmp_path):
    folder = real_data / "mini_vl"
    data = data_module(
        folder / "train.jsonl",
        folder / "val.jsonl",
        token_budget=8192,
        global_batch_size=32,
        too_long="truncate",
        images=ImageProcessor(max_pixels=28 * 28 * 16),
        template=ChatTemplate(image_token="<I>"),
        cache_dir=tmp_path,
    )
    data.setup("fit")
    assert len(data.train_dataloader()) == 1771 // 32
    assert len(data.val_dataloader()) == 195 // 32 + 1
    batch = next(iter(data.val_dataloader()))
    assert sum(packed.tokens.eq(6).sum() for packed in batch.microbatches) == batch.plan.sizes.media_rows.sum()
    assert sum(len(media.patches) for media in batch.media["encoder"]) == batch.plan.sizes.media_patches.sum()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"global_batch_size": 8},
            "train: 18 samples make 2 steps of global_batch_size=8 an epoch; 2 samples left out of each, others each "
            "time; drop_last=False makes a smaller step of them.",
        ),
        (
            {"global_batch_size": 16, "shuffle": False},
            "train: 18 samples make 1 step of global_batch_size=16 an epoch; 2 samples left out of each, the same each "
            "time; drop_last=False makes a smaller step of them.",
        ),
        (
            {"global_batch_size": 8, "drop_last": False},
            "train: 18 samples make 3 steps of global_batch_size=8 an epoch, the last of 2.",
        ),
        ({"global_batch_size": 9}, "train: 18 samples make 2 steps of global_batch_size=9 an epoch, none left out."),
    ],
)
def test_the_steps_of_an_epoch_and_the_samples_in_none_are_told(file, tmp_path, caplog, changes, told):
    with caplog.at_level("INFO"):
        steps = trained(tmp_path, data_module(file, **changes), max_epochs=1)
    assert told in [record.message for record in caplog.records]
    assert told.split(" make ")[1].startswith(f"{len(steps)} step")


@pytest.mark.parametrize("shuffle", [True, False])
def test_the_steps_of_an_epoch_of_microbatches_and_the_samples_in_none_are_told(file, tmp_path, caplog, shuffle):
    data = data_module(file, token_steps=TOKEN_STEPS, shuffle=shuffle)
    with caplog.at_level("INFO"):
        steps = trained(tmp_path, data, max_epochs=1)
    (told,) = (record.message for record in caplog.records if record.message.startswith("train: "))
    assert told.startswith(f"train: 18 samples make {len(steps)} steps of microbatches=2 an epoch; ")
    left = 18 - len({sample for _, _, samples in steps for sample in samples})
    assert told.endswith(
        "those that fill none go on into the next epoch."
        if shuffle
        else f"{left} samples left out of each, the same each time."
    )


def test_validation_leaves_no_sample_out_and_says_so(file):
    (*_, told) = data_module(val=file).index_ahead(this_process)
    assert told == "val: 18 samples make 5 steps of global_batch_size=4 an epoch, the last of 2."
