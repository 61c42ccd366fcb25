"""The data module: files in, a loader of steps for every stage out."""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Mapping
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any
from weakref import WeakSet

import lightning as L
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info

from flowtrain_lightning.data.arguments import (
    Files,
    paths_of,
    refuse_mixed_batch_units,
    refuse_unknown,
    refuse_unlike_ranks,
)
from flowtrain_lightning.data.batch import RankShard
from flowtrain_lightning.data.conversation import ChatTemplate
from flowtrain_lightning.data.costs import chosen_costs
from flowtrain_lightning.data.fingerprint import fingerprint
from flowtrain_lightning.data.images import ImageProcessor
from flowtrain_lightning.data.index import Unreadable
from flowtrain_lightning.data.loader import StepLoader
from flowtrain_lightning.data.metadata import JoinedSources, MetadataIndex, TooLong
from flowtrain_lightning.data.records import DataError, Record
from flowtrain_lightning.data.samples import Augment
from flowtrain_lightning.data.stages import stage_loader, stage_source
from flowtrain_lightning.data.tokenizer import Tokenizer, open_tokenizer
from flowtrain_lightning.packing import SYNC_EVERY, CostModel, SyncEvery
from flowtrain_lightning.packing.compiled import announce_compilation
from flowtrain_lightning.packing.offline import BATCH_UNITS, BatchUnit

# Without a validation file there is no loader, on purpose, so this advice would mislead.
warnings.filterwarnings("ignore", message="Total length of `list` across ranks is zero")

_STAGES = {"fit": ("train", "val"), "validate": ("val",), "test": ("test",), "predict": ("predict",)}


class FlowDataModule(L.LightningDataModule):
    """Image-text data in JSON files, as steps of packed microbatches.

    Reads JSON Lines and JSON arrays of ``messages`` records (``images`` with ``path``, ``messages`` with ``role`` and
    ``content``) and of LLaVA records (``image``, ``conversations``); paths of pictures are relative to the file. What
    each record weighs is measured once, from headers of pictures, and kept in a cache.

    A step has ``global_batch_size`` samples over all ranks. How many microbatches that makes follows from
    ``token_budget``; it is the same number on every rank. An epoch's last, smaller step is left out in training
    (``drop_last``), which costs fewer than ``global_batch_size`` samples, shuffled others each time; it is kept in
    validation, test and prediction. Which samples are in a step depends on the data, ``seed``, ``global_batch_size``,
    ``shuffle`` and ``drop_last`` alone: a checkpoint keeps them and refuses to go on in mid-epoch with others. Costs
    and ``sync_every`` decide how the samples of a step are packed. Cost models stay as they are for the whole run,
    unless the callback ``AdaptCosts`` is there; a checkpoint keeps them too, and where they are left open on a resume
    it brings them back.

    With ``batch_unit="tokens"`` a training step has ``microbatches`` microbatches instead, nearly full, and as many
    samples as these hold. Samples may wait for others like them, and past the end of an epoch too: see
    :mod:`~flowtrain_lightning.data.token_stream`. Steps are then the same on any number of backbone ranks that divides
    ``microbatches``; they depend on ``token_budget``, ``microbatches``, ``balance_group``, ``max_delay`` and ``cost``
    as well, in place of ``global_batch_size`` and ``drop_last``.

    Args:
        train: training file or files; a mapping of files to weights mixes them in that proportion, see
            :class:`~flowtrain_lightning.data.sampling.Sampling`.
        val: validation file or files.
        test: test file or files.
        predict: files whose last assistant turns are to be written anew: sequences end with that turn's header.
        tokenizer: path of a ``tokenizer.json`` or its folder, a ``tokenizers.Tokenizer``, or a Hugging Face tokenizer.
        token_budget: the most tokens of a microbatch.
        global_batch_size: samples of one step over all ranks; with ``batch_unit="tokens"``, of one that does not train.
        images: how large pictures become; None takes ``ImageProcessor()``.
        template: how conversations are written; None takes ``ChatTemplate()``.
        seed: of order and augmentation; None takes that of ``seed_everything``, or 0.
        shuffle: training samples come in another order each epoch. Off while ``Trainer(overfit_batches=...)`` is on.
        drop_last: in training, leave out an epoch's last step if it is smaller.
        pad_to_budget: fill every microbatch up to ``token_budget``, for static shapes.
        too_long: what happens to a sample longer than ``token_budget``: ``"error"``, ``"drop"``, or ``"truncate"``
            (its end is cut, never inside a picture; of a prompt that is where the answer would begin).
        unreadable: what happens to a record with a picture that cannot be used: ``"error"``, or ``"drop"``, for which
            every picture is decoded once when the file is indexed, so that all ranks drop the same records.
        cost: what a packed set of sequences costs the backbone; None takes ``DEFAULT_COST``, or a checkpoint's. See
            :mod:`~flowtrain_lightning.packing.cost_model` for where to get one.
        encoder_cost: what a set of media costs the encoder, by their patches and in the unit of ``cost``; None
            balances by patches, or takes a checkpoint's.
        profile: a ``profile.json`` of ``flowtrain profile``, which brings both cost models.
        sync_every: when backbone ranks wait for each other: ``"step"``, once a step, as replicas do that sum
            their gradients; ``"microbatch"``, at every microbatch, as with FSDP, tensor and pipeline parallelism.
        batch_unit: ``"samples"`` or ``"tokens"``: what a training step has a fixed number of.
        microbatches: of one training step over all ranks, with ``"tokens"``.
        balance_group: microbatches that are made alike in cost, with ``"tokens"``: best as many as run at once. None
            takes the number of backbone ranks, or a checkpoint's.
        max_delay: steps that a sample may wait, with ``"tokens"``.
        augment: changes training pictures: ``augment(picture, generator)`` gets a Pillow image and a NumPy generator
            seeded from seed, epoch, sample and the picture's number in it, and returns a Pillow image.
        num_workers: processes that load, for each loader.
        cache_dir: folder of the index; None is ``.flowtrain`` beside each file.
    """

    def __init__(
        self,
        train: Files | Mapping[str, float] | None = None,
        val: Files | None = None,
        test: Files | None = None,
        predict: Files | None = None,
        *,
        tokenizer: Any,
        token_budget: int,
        global_batch_size: int,
        images: ImageProcessor | None = None,
        template: ChatTemplate | None = None,
        seed: int | None = None,
        shuffle: bool = True,
        drop_last: bool = True,
        pad_to_budget: bool = False,
        too_long: TooLong = "error",
        unreadable: Unreadable = "error",
        cost: CostModel | None = None,
        encoder_cost: CostModel | None = None,
        profile: str | Path | None = None,
        sync_every: SyncEvery = "step",
        batch_unit: BatchUnit = "samples",
        microbatches: int | None = None,
        balance_group: int | None = None,
        max_delay: int = 8,
        augment: Augment | None = None,
        num_workers: int = 0,
        cache_dir: str | Path | None = None,
    ) -> None:
        super().__init__()
        refuse_unknown(
            too_long=(too_long, ("error", "drop", "truncate")),
            unreadable=(unreadable, ("error", "drop")),
            sync_every=(sync_every, SYNC_EVERY),
            batch_unit=(batch_unit, BATCH_UNITS),
        )
        refuse_mixed_batch_units(batch_unit, microbatches, balance_group, drop_last)
        given: dict[str, Files | Mapping[str, float] | None] = {
            "train": train,
            "val": val,
            "test": test,
            "predict": predict,
        }
        self.files = {name: paths_of(name, files) for name, files in given.items() if files is not None}
        self.weights = tuple(float(weight) for weight in train.values()) if isinstance(train, Mapping) else None
        self.token_budget = token_budget
        self.global_batch_size = global_batch_size
        self.images = images or ImageProcessor()
        self.template = template or ChatTemplate()
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.pad_to_budget = pad_to_budget
        self.too_long = too_long
        self.unreadable = unreadable
        self.cost, self.encoder_cost = chosen_costs(cost, encoder_cost, profile)
        self.sync_every: SyncEvery = sync_every
        self.batch_unit: BatchUnit = batch_unit
        self.microbatches = microbatches
        self.balance_group = balance_group
        self.max_delay = max_delay
        self.augment = augment
        self.num_workers = num_workers
        self.cache_dir = None if cache_dir is None else Path(cache_dir)
        self._seed = seed
        self._tokenizer = tokenizer
        self._sources: dict[str, JoinedSources] = {}
        # Weakly: Lightning may ask for a loader anew and drop the former, whose workers then end.
        self._loaders: WeakSet[StepLoader] = WeakSet()
        self._training: weakref.ref[StepLoader] | None = None
        self._resume: dict[str, Any] | None = None

    @property
    def seed(self) -> int:
        """Of order and augmentation: the one given, else that of ``seed_everything``, whenever it was called, or 0."""
        return int(os.environ.get("PL_GLOBAL_SEED", 0)) if self._seed is None else self._seed

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer; opened when first asked for, so that ``prepare_data`` of a subclass may make it."""
        return open_tokenizer(self._tokenizer)

    def prepare_data(self) -> None:
        """Index the files of the running stage, once for all ranks of a node."""
        running = self.trainer.state.fn if self.trainer is not None else None
        for name in self._wanted(running):
            for index in stage_source(self, name).sources:
                if isinstance(index, MetadataIndex):
                    rank_zero_info(index.summary)

    def setup(self, stage: str | None = None) -> None:
        """Open the indexes of a stage; every rank does.

        Raises:
            DataError: this rank has other settings than rank 0, and so would plan other steps.
        """
        self._training = self._resume = None
        announce_compilation(rank_zero_info)
        if self.trainer is not None:
            settings = self._planned_by()
            refuse_unlike_ranks(self.trainer.global_rank, settings, self.trainer.strategy.broadcast(settings))
        for name in self._wanted(stage):
            self._sources[name] = stage_source(self, name)

    def train_dataloader(self) -> StepLoader:
        """Steps of training."""
        loader = self._loader("train")
        self._training = weakref.ref(loader)
        if self._resume is not None:  # kept: a loader of a later epoch has its settings too
            loader.load_state_dict(self._resume)
        return loader

    def val_dataloader(self) -> StepLoader | list[StepLoader]:
        """Steps of validation; none without a file."""
        return self._loader("val") if "val" in self.files else []

    def test_dataloader(self) -> StepLoader:
        """Steps of testing."""
        return self._loader("test")

    def predict_dataloader(self) -> StepLoader:
        """Steps of prompts."""
        return self._loader("predict")

    def state_dict(self) -> dict[str, Any]:
        """The place in the training data.

        Lightning keeps that of its loader as well, but forgets it where ``configure_optimizers`` asks for
        ``trainer.estimated_stepping_batches`` and so for the loader, before the loops are restored.
        """
        loader = None if self._training is None else self._training()
        return {} if loader is None else {"train": loader.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from that place, where training does."""
        if self.trainer is not None and self.trainer.state.fn != TrainerFn.FITTING:
            return
        self._resume = state_dict["train"]
        loader = None if self._training is None else self._training()
        if loader is not None:
            loader.load_state_dict(self._resume)

    def fingerprint(self, stage: str) -> str:
        """Changes with the content of the files of a stage: ranks that plan the same steps have the same."""
        return fingerprint([self._source(name).fingerprint for name in self._wanted(stage)])

    def record(self, stage: str, sample: int) -> Record:
        """The record that a sample of ``"train"``, ``"val"``, ``"test"`` or ``"predict"`` is."""
        return self._source(stage).record(sample)

    def teardown(self, stage: str | None = None) -> None:
        """End the workers."""
        for loader in self._loaders:
            loader.close()

    def on_exception(self, exception: BaseException) -> None:
        """End the workers, at once: what has failed is told after this hook, and a dead worker must not hold it up."""
        for loader in self._loaders:
            loader.abandon()

    def _planned_by(self) -> dict[str, Any]:
        names = (
            *("global_batch_size", "token_budget", "shuffle", "drop_last", "too_long", "unreadable", "sync_every"),
            *("batch_unit", "microbatches", "balance_group", "max_delay", "weights", "cost", "encoder_cost"),
        )
        measured_by = {
            "tokenizer": self.tokenizer.fingerprint,
            "images": asdict(self.images),
            "template": asdict(self.template),
        }
        settings = {name: getattr(self, name) for name in names}
        costs = {name: value and asdict(value) for name, value in settings.items() if name in ("cost", "encoder_cost")}
        return {"seed": self.seed, **settings, **costs, **measured_by}

    def _wanted(self, stage: str | None) -> list[str]:
        names = self.files if stage is None else _STAGES[stage]
        return [name for name in names if name in self.files]

    def _source(self, name: str) -> JoinedSources:
        if name not in self.files:
            raise DataError(f"FlowDataModule has no {name} data; give it: FlowDataModule({name}='{name}.jsonl', ...).")
        if name not in self._sources:
            self._sources[name] = stage_source(self, name)
        return self._sources[name]

    def _loader(self, name: str) -> StepLoader:
        loader = stage_loader(self, name, self._source(name), self._part())
        self._loaders.add(loader)
        return loader

    def _part(self) -> RankShard:
        if self.trainer is None:
            return RankShard.plain(0, 1)
        part: RankShard | None = getattr(self.trainer.strategy, "rank_shard", None)
        return part or RankShard.plain(self.trainer.global_rank, self.trainer.world_size)
