"""What the data module takes: every argument from YAML, and a sentence for what cannot work."""

from dataclasses import replace

import lightning as L
import pytest
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.strategies import SingleDeviceStrategy

from flowtrain_lightning.data import DataError, FlowDataModule
from flowtrain_lightning.packing import CostModel
from flowtrain_lightning.packing.sample_stream import StreamSettings
from tests.data.support import IMAGES, TEMPLATE, Letters, data_module
from tests.data.training import Recorder, trainer_of


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"global_batch_size": 19}, "train has 18 samples, fewer than global_batch_size=19"),
        ({"too_long": "cut"}, "too_long is 'cut'; give one of 'error', 'drop', 'truncate'"),
        ({"sync_every": "pipeline"}, "sync_every is 'pipeline'; give one of 'microbatch', 'step'"),
        ({"batch_unit": "pages"}, "batch_unit is 'pages'; give one of 'samples', 'tokens'"),
        ({"batch_unit": "tokens"}, "batch_unit='tokens' .*: set microbatches"),
        ({"batch_unit": "tokens", "microbatches": 0}, "microbatches is 0"),
        ({"batch_unit": "tokens", "microbatches": 2, "drop_last": False}, "drop_last=False was given with batch_unit="),
        ({"microbatches": 2}, "microbatches=2 was given with batch_unit='samples'"),
        ({"balance_group": 2}, "balance_group=2 was given with batch_unit='samples'"),
        (
            {"batch_unit": "tokens", "microbatches": 3, "balance_group": 2},
            "microbatches=3 cannot be shared out evenly by 2",
        ),
        ({"batch_unit": "tokens", "microbatches": 99}, "tokens, too few to fill microbatches=99 of token_budget=64"),
        ({"unreadable": "skip"}, "unreadable is 'skip'"),
        ({"train": []}, "train is an empty list of files"),
        ({"val": {"v.jsonl": 1.0}}, "val gives files weights, which only train may have"),
    ],
)
def test_settings_that_cannot_work_are_refused(file, change, words):
    with pytest.raises(ValueError, match=words):
        data_module(**({"train": file} | change)).train_dataloader()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seed": 5, "global_batch_size": 7}, r"global_batch_size=4\), but rank 0 has seed=5, global_batch_size=7"),
        ({"tokenizer": Letters("signs")}, r"\(tokenizer='letters'\), but rank 0 has tokenizer='signs'"),
        ({"images": replace(IMAGES, max_pixels=400)}, r"'max_pixels': 256.*but rank 0 has images=.*'max_pixels': 400"),
        ({"template": replace(TEMPLATE, end="<S>")}, r"\(template=.*but rank 0 has template=.*'end': '<S>'"),
    ],
)
def test_a_rank_with_other_settings_than_rank_0_is_refused(file, tmp_path, changes, words):
    of_rank_0 = data_module(file, **{"seed": 3, **changes})._planned_by()

    class OtherRankZero(SingleDeviceStrategy):
        def broadcast(self, obj, src=0):
            return of_rank_0 if isinstance(obj, dict) else obj

    trainer = trainer_of(tmp_path, strategy=OtherRankZero(device="cpu"))
    with pytest.raises(DataError, match=rf"Rank 0 has .*{words}"):
        trainer.fit(Recorder(), data_module(file, seed=3))


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
    sync_every: microbatch
    batch_unit: tokens
    microbatches: 2
    balance_group: 1
    max_delay: 4
    augment: {{class_path: tests.data.test_arguments.Mirrored}}
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
    assert read.sync_every == "microbatch"
    assert isinstance(read.augment, Mirrored)
    read.setup("fit")
    assert read.train_dataloader().steps.sampling.settings == StreamSettings(
        token_budget=64, microbatches=2, balance_group=1, cost=read.cost, max_delay=4
    )


class Mirrored:
    def __call__(self, picture, generator):
        return picture.transpose(0) if generator.random() < 0.5 else picture
