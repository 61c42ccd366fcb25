"""What the data module takes: every argument from YAML, and a sentence for what cannot work."""

from dataclasses import replace

import lightning as L
import pytest
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.strategies import SingleDeviceStrategy

from flowtrain_lightning.data import DataError, FlowDataModule, IndexConfig, PackingConfig, TokenSteps
from flowtrain_lightning.packing import DEFAULT_COST, CostModel
from flowtrain_lightning.packing.role_graph import graph_of
from flowtrain_lightning.packing.sample_stream import StreamSettings
from tests.data.support import IMAGES, TEMPLATE, Letters, Recorder, data_module, quiet_trainer


@pytest.mark.parametrize(
    ("section", "change", "words"),
    [
        (TokenSteps, {"microbatches": 0}, "microbatches=0; give a whole number of at least 1"),
        (TokenSteps, {"microbatches": 2, "balance_group": 0}, "balance_group=0"),
        (TokenSteps, {"microbatches": 2, "max_delay": -1}, "max_delay=-1; give a whole number of at least 0"),
        (PackingConfig, {"sync_every": "pipeline"}, "sync_every='pipeline'; give 'microbatch' or 'step' or None"),
        (PackingConfig, {"profile": "p.json", "cost": CostModel(1.0, 0.0, 0.0)}, "cost models, but cost was given as"),
        (PackingConfig, {"profile": "p.json", "media_costs": {"encoder": DEFAULT_COST}}, "but media_costs was given"),
        (PackingConfig, {"media_costs": {"encoder": 2.0}}, "give a dictionary from names to a CostModel or None"),
        (IndexConfig, {"too_long": "cut"}, "too_long='cut'; give 'error', 'drop' or 'truncate'"),
        (IndexConfig, {"unreadable": "skip"}, "unreadable='skip'; give 'error' or 'drop'"),
    ],
)
def test_a_section_refuses_values_that_mean_nothing(section, change, words):
    with pytest.raises(ValueError, match=words):
        section(**change)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"global_batch_size": 19}, "train has 18 samples, fewer than global_batch_size=19"),
        (
            {"token_steps": TokenSteps(3, balance_group=2)},
            "3 microbatches cannot be made of balance groups of 2",
        ),
        ({"token_steps": TokenSteps(99)}, "tokens, too few to fill microbatches=99 of token_budget=64"),
        ({"train": []}, "train is an empty list of files"),
        ({"val": {"v.jsonl": 1.0}}, "val gives files weights, which only train may have"),
    ],
)
def test_settings_that_cannot_work_together_are_refused(file, change, words):
    with pytest.raises(ValueError, match=words):
        data_module(**({"train": file} | change)).train_dataloader()


class SentByRankZero(SingleDeviceStrategy):
    """Broadcasts what another data module sent before, as if that were rank 0's."""

    def __init__(self, sent=None):
        super().__init__(device="cpu")
        self.sent = sent

    def broadcast(self, obj, src=0):
        if not isinstance(obj, dict):
            return obj
        self.sent = self.sent or obj
        return self.sent


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"seed": 5, "global_batch_size": 7},
            r"global_batch_size=4, seed=3\), but rank 0 has global_batch_size=7, seed=5",
        ),
        ({"tokenizer": Letters("signs")}, r"\(tokenizer='letters'\), but rank 0 has tokenizer='signs'"),
        ({"images": replace(IMAGES, max_pixels=400)}, r"max_pixels=256.*but rank 0 has images=.*max_pixels=400"),
        ({"template": replace(TEMPLATE, end="<S>")}, r"\(template=.*but rank 0 has template=.*end='<S>'"),
        ({"sync_every": "microbatch"}, r"sync_every=None.*but rank 0 has packing=.*sync_every='microbatch'"),
        ({"too_long": "drop"}, r"too_long='error'.*but rank 0 has index=.*too_long='drop'"),
    ],
)
def test_a_rank_with_other_settings_than_rank_0_is_refused(file, tmp_path, changes, words):
    first = SentByRankZero()
    quiet_trainer(tmp_path, strategy=first, max_steps=1).fit(Recorder(), data_module(file, **changes))
    trainer = quiet_trainer(tmp_path, strategy=SentByRankZero(first.sent))
    with pytest.raises(DataError, match=rf"Rank 0 has .*{words}"):
        trainer.fit(Recorder(), data_module(file))


class Sees(Recorder):
    role_graph = graph_of(("encoder", "backbone"))


def test_a_cost_model_of_a_role_that_takes_no_media_is_refused(file, tmp_path):
    for role in ("backbone", "vision"):
        data = data_module(file, media_costs={role: DEFAULT_COST})
        with pytest.raises(DataError, match=rf"names '{role}', but media go to 'encoder' in Sees\. Name one of these"):
            quiet_trainer(tmp_path, max_steps=1).fit(Sees(), data)
    quiet_trainer(tmp_path, max_steps=1).fit(Sees(), data_module(file, media_costs={"encoder": DEFAULT_COST}))


def test_ranks_may_keep_their_indexes_in_folders_of_their_own(file, tmp_path):
    sent = None
    for rank in range(2):
        data, strategy = data_module(file, cache_dir=tmp_path / f"index {rank}"), SentByRankZero(sent)
        quiet_trainer(tmp_path, strategy=strategy, max_steps=1).fit(Recorder(), data)
        sent = strategy.sent


CONFIG = """
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
    token_steps:
      microbatches: 2
      balance_group: 1
      max_delay: 4
    packing:
      cost: {{linear: 1.0, quadratic: 0.5, constant: 0.0}}
      sync_every: microbatch
    index:
      too_long: truncate
      cache_dir: {folder}/cache
    augment: {{class_path: tests.data.test_datamodule_settings.Mirrored}}
"""


def configured(file, folder, *options):
    """The data module of ``CONFIG`` and of options on the command line."""
    config = folder / "config.yaml"
    config.write_text(CONFIG.format(file=file, folder=folder))
    args = ["--config", str(config), *options]
    data = LightningCLI(Recorder, L.LightningDataModule, subclass_mode_data=True, run=False, args=args).datamodule
    assert isinstance(data, FlowDataModule)
    return data


def test_all_arguments_can_be_written_in_yaml(file, tmp_path):
    data = configured(file, tmp_path)
    assert data.images == IMAGES
    assert data.template == TEMPLATE
    assert data.files["train"].weights == (1.0,)
    assert isinstance(data.tokenizer, Letters)
    assert data.packing == PackingConfig(CostModel(1.0, 0.5, 0.0), sync_every="microbatch")
    assert (data.index.too_long, str(data.index.cache_dir)) == ("truncate", f"{tmp_path}/cache")
    assert isinstance(data.augment, Mirrored)
    data.setup("fit")
    settings = StreamSettings(
        token_budget=64, microbatches=2, balance_group=1, cost=CostModel(1.0, 0.5, 0.0), max_delay=4
    )
    assert data.train_dataloader().steps.sampling.settings == settings


def test_an_option_changes_one_setting_of_a_section(file, tmp_path):
    options = [
        "--data.token_steps.microbatches=4",
        "--data.index.too_long",
        "drop",
        "--data.packing.pad_to_budget=true",
        "--data.packing.media_costs={encoder: {linear: 2.0, quadratic: 0.0, constant: 0.0}}",
    ]
    data = configured(file, tmp_path, *options)
    assert data.token_steps == TokenSteps(4, balance_group=1, max_delay=4)
    assert (data.index.too_long, str(data.index.cache_dir)) == ("drop", f"{tmp_path}/cache")
    costs = (CostModel(1.0, 0.5, 0.0), {"encoder": CostModel(2.0, 0.0, 0.0)})
    assert data.packing == PackingConfig(*costs, sync_every="microbatch", pad_to_budget=True)


class Mirrored:
    def __call__(self, image, generator):
        return image.transpose(0) if generator.random() < 0.5 else image
