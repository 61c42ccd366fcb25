import json

import lightning as L
import numpy as np
import psutil
import pytest
import torch
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.strategies import SingleDeviceStrategy

from flowtrain_lightning.data import ChatTemplate, DataError, FlowDataModule, ImageProcessor, StepPart
from flowtrain_lightning.packing import CostModel
from flowtrain_lightning.packing.stream import StreamSettings
from tests.data.support import IMAGES, TEMPLATE, Letters, data_module, message_record, write_records, write_set


class Recorder(L.LightningModule):
    """Writes down which samples it is trained and validated on."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.trained, self.validated, self.predicted = [], [], []

    def training_step(self, batch):
        self.trained.append((batch.epoch, batch.step, batch.plan.samples.tolist()))
        return (self.weight * torch.rand(1)).sum()

    def validation_step(self, batch):
        self.validated.append(batch.plan.samples.tolist())

    def test_step(self, batch):
        assert batch.step < 5

    def predict_step(self, batch):
        self.predicted += [bytes(batch.microbatches[0].tokens.tolist())]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trainer_of(folder, **settings):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    return L.Trainer(default_root_dir=folder, **(quiet | {"enable_checkpointing": False} | settings))


@pytest.fixture
def file(tmp_path):
    return write_set(tmp_path / "d.jsonl", 18)


def trained(folder, data, checkpoint=None, **settings):
    model = Recorder()
    trainer_of(folder, **settings).fit(model, data, ckpt_path=checkpoint, weights_only=True)
    return model.trained


def test_a_trainer_reads_every_epoch_in_its_own_order(file, tmp_path):
    steps = trained(tmp_path, data_module(file), max_epochs=3)
    assert [(epoch, step) for epoch, step, _ in steps] == [(epoch, step) for epoch in range(3) for step in range(4)]
    assert len({json.dumps([samples for number, _, samples in steps if number == epoch]) for epoch in range(3)}) == 3


def test_lengths_and_the_estimate_of_steps_are_right(file, tmp_path):
    for settings, steps in (({}, 4), ({"drop_last": False}, 5), ({"global_batch_size": 7}, 2)):
        data, trainer = data_module(file, **settings), trainer_of(tmp_path, max_epochs=3)
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
    trainer_of(tmp_path, max_epochs=2).fit(model, data_module(file))
    assert model.estimate == 8
    assert model.trained == trained(tmp_path, data_module(file), max_epochs=2)


class SaveAlways(L.Callback):
    """Saves a checkpoint at every moment at which one may be saved; its name ends with the steps done."""

    def __init__(self, folder):
        self.folder = folder

    def save(self, trainer, moment):
        trainer.save_checkpoint(self.folder / f"{moment}-{trainer.global_step}.ckpt")

    def on_train_batch_end(self, trainer, *_):
        self.save(trainer, "batch")

    def on_validation_end(self, trainer, *_):
        self.save(trainer, "validation")

    def on_train_epoch_end(self, trainer, *_):
        self.save(trainer, "epoch")


@pytest.mark.parametrize("interval", [1.0, 3], ids=["validation at the end", "validation in mid-epoch"])
@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.full)])
def test_a_run_resumed_from_any_checkpoint_reads_exactly_the_remaining_batches(file, tmp_path, interval, workers):
    settings = {"max_epochs": 3, "val_check_interval": interval, "num_sanity_val_steps": 0}

    def build():
        return data_module(file, file, num_workers=workers)

    whole = trained(tmp_path, build(), callbacks=[SaveAlways(tmp_path)], **settings)
    checkpoints = sorted(tmp_path.glob("*.ckpt"))
    assert len(checkpoints) == 12 + 3 + 3
    for checkpoint in checkpoints:
        done = int(checkpoint.stem.split("-")[1])
        assert trained(tmp_path, build(), checkpoint, **settings) == whole[done:], checkpoint


class Scheduled(Recorder):
    def configure_optimizers(self):
        self.estimate = self.trainer.estimated_stepping_batches
        return super().configure_optimizers()


def test_a_run_resumes_exactly_also_where_optimizers_ask_for_the_number_of_steps(file, tmp_path):
    settings = {"max_epochs": 2, "num_sanity_val_steps": 0}
    whole = trained(tmp_path, data_module(file), callbacks=[SaveAlways(tmp_path)], **settings)
    data = data_module(file)
    for done in (2, 4, 6):
        model = Scheduled()
        checkpoint = tmp_path / f"batch-{done}.ckpt"
        trainer_of(tmp_path, **settings).fit(model, data, ckpt_path=checkpoint, weights_only=True)
        assert model.trained == whole[done:], checkpoint


def test_a_checkpoint_that_is_validated_does_not_move_later_training(file, tmp_path):
    settings = {"max_epochs": 1, "num_sanity_val_steps": 0}
    whole = trained(tmp_path, data_module(file, file), callbacks=[SaveAlways(tmp_path)], **settings)
    data, model = data_module(file, file), Recorder()
    trainer = trainer_of(tmp_path, **settings)
    trainer.validate(model, data, ckpt_path=tmp_path / "batch-2.ckpt", weights_only=True, verbose=False)
    trainer.fit(model, data)
    assert model.trained == whole


def test_cost_models_come_back_from_the_checkpoint_where_they_are_left_open(file, tmp_path):
    cost, encoder_cost = CostModel(1.0, 0.5, 0.25), CostModel(0.1, 0.0, 0.0)
    settings = {"max_steps": 2}
    given = data_module(file, cost=cost, encoder_cost=encoder_cost)
    trained(tmp_path, given, callbacks=[SaveAlways(tmp_path)], **settings)
    for later, expected in (({}, cost), ({"cost": CostModel(2.0, 0.0, 0.0)}, CostModel(2.0, 0.0, 0.0))):
        data = data_module(file, **later)
        seen = []
        model = Recorder()
        model.on_train_start = lambda data=data, seen=seen: seen.append(data.trainer.train_dataloader.steps.planning)
        trainer_of(tmp_path, max_steps=3).fit(model, data, ckpt_path=tmp_path / "batch-2.ckpt", weights_only=True)
        assert (seen[0].cost, seen[0].encoder_cost) == (expected, encoder_cost)


def test_another_way_to_pack_the_same_samples_is_told(file, tmp_path, caplog):
    trained(tmp_path, data_module(file), callbacks=[SaveAlways(tmp_path)], max_steps=2)
    with caplog.at_level("INFO"):
        trained(tmp_path, data_module(file, objective="sync"), tmp_path / "batch-2.ckpt", max_steps=3)
    assert any("packed otherwise: objective was accumulate, is sync" in told for told in caplog.messages)


TOKENS = {"semantics": "tokens", "microbatches": 2, "max_delay": 2}


def test_epochs_of_microbatches_have_the_length_that_lightning_counts_on(file, tmp_path):
    data, model, trainer = data_module(file, file, **TOKENS), Scheduled(), trainer_of(tmp_path, max_epochs=3)
    trainer.fit(model, data)
    steps = len(trainer.train_dataloader)
    assert model.estimate == trainer.global_step == 3 * steps
    assert [place[:2] for place in model.trained] == [(epoch, step) for epoch in range(3) for step in range(steps)]
    assert [len(step) for step in model.validated[-5:]] == [4, 4, 4, 4, 2]


@pytest.mark.parametrize("kind", [Recorder, Scheduled])
def test_a_run_of_microbatches_resumed_from_any_checkpoint_reads_exactly_the_remaining_batches(file, tmp_path, kind):
    settings = {"max_epochs": 3, "num_sanity_val_steps": 0}
    whole = trained(tmp_path, data_module(file, file, **TOKENS), callbacks=[SaveAlways(tmp_path)], **settings)
    for checkpoint in sorted(tmp_path.glob("*.ckpt")):
        model, done = kind(), int(checkpoint.stem.split("-")[1])
        data = data_module(file, file, **TOKENS)
        trainer_of(tmp_path, **settings).fit(model, data, ckpt_path=checkpoint, weights_only=True)
        assert model.trained == whole[done:], checkpoint


def test_overfitting_repeats_the_same_steps_of_microbatches(file, tmp_path):
    steps = trained(tmp_path, data_module(file, file, **TOKENS), max_epochs=2, overfit_batches=2)
    assert [samples for *_, samples in steps[:2]] == [samples for *_, samples in steps[2:]]


def test_a_run_with_limited_epochs_resumes_exactly(file, tmp_path):
    settings = {"max_epochs": 3, "limit_train_batches": 3}
    whole = trained(tmp_path, data_module(file), callbacks=[SaveAlways(tmp_path)], **settings)
    assert [step for _, step, _ in whole] == [0, 1, 2] * 3
    for done in (2, 3, 5, 6):
        checkpoint = tmp_path / f"batch-{done}.ckpt"
        assert trained(tmp_path, data_module(file), checkpoint, **settings) == whole[done:]


def test_resuming_with_a_setting_that_moves_samples_says_which(file, tmp_path):
    trained(tmp_path, data_module(file), callbacks=[SaveAlways(tmp_path)], max_steps=2)
    with pytest.raises(ValueError, match=r"place in the data .* global_batch_size was 4, is 3"):
        trained(tmp_path, data_module(file, global_batch_size=3), tmp_path / "batch-2.ckpt", max_steps=4)


@pytest.mark.filterwarnings("error:You requested to overfit")
def test_overfitting_repeats_the_same_unshuffled_batches(file, tmp_path):
    steps = trained(tmp_path, data_module(file, file), max_epochs=2, overfit_batches=2)
    assert [samples for _, _, samples in steps] == [[0, 1, 2, 3], [4, 5, 6, 7]] * 2


def test_validation_keeps_order_and_tail_and_sees_no_augmentation(file, tmp_path):
    def turned(picture, _):
        return picture.rotate(180)

    plain, augmented = data_module(file, file), data_module(file, file, augment=turned)
    model = Recorder()
    trainer_of(tmp_path).validate(model, plain, verbose=False)
    assert [sample for step in model.validated for sample in step] == list(range(18))
    pairs = []
    for name in ("val_dataloader", "train_dataloader"):
        left, right = (next(iter(getattr(data, name)())).encoder_batches[0] for data in (plain, augmented))
        pairs.append(torch.equal(left.patches, right.patches))
    assert pairs == [True, False]


def test_prediction_reads_prompts(file, tmp_path):
    records = [message_record(0, "ab", "cd", []), message_record(1, "e", "", [])]
    model = Recorder()
    prompts = write_records(tmp_path / "p.jsonl", records)
    trainer_of(tmp_path).predict(model, data_module(predict=prompts), return_predictions=False)
    assert model.predicted == [b"\1\3ab\5\4" + b"\1\3e\5\4"]


def test_the_strategy_says_which_part_is_loaded(file, tmp_path):
    trainer = trainer_of(tmp_path, max_steps=1)
    trainer.strategy.step_part = StepPart(None, 1, 0, 1)
    seen = []
    model = Recorder()
    model.on_train_batch_start = lambda batch, _: seen.append(batch)
    trainer.fit(model, data_module(file))
    assert seen[0].microbatches == ()
    assert len(seen[0].encoder_batches) == len(seen[0].plan.encoder_batches[0]) > 0


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
    trainer_of(tmp_path, max_epochs=2, reload_dataloaders_every_n_epochs=1).fit(model, data)
    assert len(seen) == 2
    assert psutil.wait_procs(seen, timeout=5)[1] == []


def test_a_sample_is_found_again_for_a_report(file):
    data = data_module(file, write_set(file.parent / "v.jsonl", 3, first=50))
    data.setup()
    assert data.record("train", 4).id == "r4"
    assert data.record("val", 1).turns[1].text == "answer 51"
    assert len(data.record("train", 2).pictures) == 2


def test_the_seed_is_that_of_seed_everything_unless_given(file):
    assert data_module(file, seed=None).seed == 0
    L.seed_everything(11, verbose=False)
    assert data_module(file, seed=None).seed == 11
    assert data_module(file, seed=5).seed == 5


def test_the_seed_is_that_of_seed_everything_also_where_that_comes_after_the_data_module(file):
    data = data_module(file, seed=None)
    L.seed_everything(12, verbose=False)
    assert data.seed == 12


def test_a_rank_with_other_settings_than_rank_0_is_refused(file, tmp_path):
    class OtherRankZero(SingleDeviceStrategy):
        def broadcast(self, obj, src=0):
            return {**obj, "seed": 5, "global_batch_size": 7} if isinstance(obj, dict) else obj

    trainer = trainer_of(tmp_path, strategy=OtherRankZero(device="cpu"))
    with pytest.raises(
        DataError, match=r"Rank 0 has .*global_batch_size=4\), but rank 0 has seed=5, global_batch_size=7"
    ):
        trainer.fit(Recorder(), data_module(file, seed=3))


def test_only_files_of_the_running_stage_are_opened(file, tmp_path):
    data = data_module(file, tmp_path / "none.jsonl")
    with pytest.raises(DataError, match=r"none\.jsonl: there is no such file"):
        trainer_of(tmp_path).validate(Recorder(), data, verbose=False)
    trainer_of(tmp_path).test(Recorder(), data_module(tmp_path / "none.jsonl", test=file), verbose=False)


def test_what_was_dropped_is_logged_once(file, tmp_path, caplog):
    (file.parent / "pictures/4_0.png").unlink()
    with caplog.at_level("INFO"):
        trained(tmp_path, data_module(file, unreadable="drop"), max_steps=1)
    told = [record.message for record in caplog.records if "records used" in record.message]
    assert told == ["d.jsonl: 17 of 18 records used, 1 dropped for a picture that cannot be used."]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"global_batch_size": 19}, "train has 18 samples, fewer than global_batch_size=19"),
        ({"too_long": "cut"}, "too_long is 'cut'; give one of 'error', 'drop', 'truncate'"),
        ({"objective": "pipeline"}, "objective is 'pipeline'; give one of 'sync', 'accumulate'"),
        ({"semantics": "pages"}, "semantics is 'pages'; give one of 'samples', 'tokens'"),
        ({"semantics": "tokens"}, "semantics='tokens' .*: set microbatches"),
        ({"semantics": "tokens", "microbatches": 0}, "microbatches is 0"),
        ({"semantics": "tokens", "microbatches": 2, "drop_last": False}, "drop_last=False was given with semantics="),
        ({"microbatches": 2}, "microbatches=2 was given with semantics='samples'"),
        ({"row_width": 2}, "row_width=2 was given with semantics='samples'"),
        ({"semantics": "tokens", "microbatches": 3, "row_width": 2}, "microbatches=3 cannot be shared out evenly by 2"),
        ({"semantics": "tokens", "microbatches": 99}, "tokens, too few to fill microbatches=99 of token_budget=64"),
        ({"unreadable": "skip"}, "unreadable is 'skip'"),
        ({"train": []}, "train is an empty list of files"),
        ({"val": {"v.jsonl": 1.0}}, "val gives files weights, which only train may have"),
    ],
)
def test_settings_that_cannot_work_are_refused(file, change, words):
    with pytest.raises(ValueError, match=words):
        data_module(**({"train": file} | change)).train_dataloader()


def test_data_that_were_not_given_are_asked_for(file, tmp_path):
    with pytest.raises(DataError, match=r"no test data; give it: FlowDataModule\(test="):
        trainer_of(tmp_path).test(Recorder(), data_module(file))


def test_all_arguments_can_be_written_in_yaml(file, tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text(f"""
data:
  class_path: flowtrain_lightning.data.FlowDataModule
  init_args:
    train: {{{file}: 1.0}}
    val: {file}
    tokenizer: {{class_path: tests.data.support.Letters}}
    token_budget: 64
    global_batch_size: 4
    images: {{patch_size: 2, merge_size: 2, min_pixels: 16, max_pixels: 256}}
    template:
      headers: {{system: <S>, user: <U>, assistant: <A>}}
      end: <E>
      between: ""
      begin: <B>
      image_token: <I>
      before_image: "["
      after_image: "]"
    too_long: truncate
    cost: {{linear: 1.0, quadratic: 0.5, constant: 0.0}}
    objective: sync
    semantics: tokens
    microbatches: 2
    row_width: 1
    max_delay: 4
    augment: {{class_path: tests.data.test_module.Mirrored}}
    cache_dir: {tmp_path}/cache
""")
    read = LightningCLI(
        Recorder, L.LightningDataModule, subclass_mode_data=True, run=False, args=["--config", str(config)]
    ).datamodule
    assert isinstance(read, FlowDataModule)
    assert read.images == IMAGES
    assert read.template == TEMPLATE
    assert read.weights == (1.0,)
    assert isinstance(read.tokenizer, Letters)
    assert read.cost == CostModel(1.0, 0.5, 0.0)
    assert read.objective == "sync"
    assert isinstance(read.augment, Mirrored)
    read.setup("fit")
    assert read.train_dataloader().steps.sampling.settings == StreamSettings(64, 1, 2, read.cost, 4)


class Mirrored:
    def __call__(self, picture, generator):
        return picture.transpose(0) if generator.random() < 0.5 else picture


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
    assert sum(len(media.patches) for media in batch.encoder_batches) == batch.plan.sizes.media_patches.sum()
