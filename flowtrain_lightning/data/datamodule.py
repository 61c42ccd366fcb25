"""The data module: files in, a loader of steps for every stage out."""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info

from flowtrain_lightning.data.data_error import DataError
from flowtrain_lightning.data.data_path import named_protocols
from flowtrain_lightning.data.features.feature_keeping import keeping_of, refuse_augmented
from flowtrain_lightning.data.features.feature_store import KeepFeatures
from flowtrain_lightning.data.loading.dataloader import StepLoader
from flowtrain_lightning.data.loading.dataset import NodeRecords, StepDataset
from flowtrain_lightning.data.loading.ranks_of_trainer import (
    own_shard,
    refuse_costs_of_others,
    refuse_unlike_settings,
    shards_of_node,
    warn_of_idle_ranks,
)
from flowtrain_lightning.data.loading.sample_loader import Augment, SampleLoader
from flowtrain_lightning.data.media.audio_processor import AudioProcessor
from flowtrain_lightning.data.media.image_processor import ImageProcessor
from flowtrain_lightning.data.media.video_processor import VideoProcessor
from flowtrain_lightning.data.node.node_sources import Source
from flowtrain_lightning.data.producers.ray_cluster import (
    LocalRay,
    Producers,
    RayCluster,
    connect_ranks,
    refuse_without_ray,
)
from flowtrain_lightning.data.records.columns import Columns
from flowtrain_lightning.data.records.conversation import ChatTemplate, Template
from flowtrain_lightning.data.records.record_fields import ignored_names
from flowtrain_lightning.data.sources.index import IndexConfig
from flowtrain_lightning.data.sources.indexed_source import IndexedSource
from flowtrain_lightning.data.sources.measurers import Measurer, this_process
from flowtrain_lightning.data.sources.naming import Data, mixture_of
from flowtrain_lightning.data.sources.sample_source import JoinedSources
from flowtrain_lightning.data.sources.stream_of_samples import SampleStream
from flowtrain_lightning.data.stage_data import StageData
from flowtrain_lightning.data.step_settings import steps_rest_on
from flowtrain_lightning.data.steps.step_packing import PackingConfig
from flowtrain_lightning.data.steps.step_sizing import GroupBy, Steps, StepSizing, TokenSteps, media_groups_of
from flowtrain_lightning.data.steps.stream_steps import StreamSteps
from flowtrain_lightning.packing import DEFAULT_COST
from flowtrain_lightning.packing.compiled import announce_compilation
from flowtrain_lightning.packing.encoder_batches import ENCODER_BUDGET
from flowtrain_lightning.packing.setting_values import check_setting

if TYPE_CHECKING:
    from typing_extensions import Self

# Without a validation file there is no loader, on purpose, so this advice would mislead.
warnings.filterwarnings("ignore", message="Total length of `list` across ranks is zero")


class FlowDataModule(StageData):
    """Image-text data, as steps of packed microbatches.

    Reads JSON Lines, JSON arrays, Parquet files, tar shards and data sets of Hugging Face: records of ``messages``
    (``images`` with ``path``, ``videos``, ``audios``, ``messages`` with ``role`` and ``content``), LLaVA's (``image``,
    ``video``, ``conversations``), text alone (``text``) and tokens (``input_ids``, ``labels``). Paths are relative to
    the file.

    A training step fills a number of microbatches of ``token_budget`` tokens, as ``token_steps`` says. Samples may wait
    a few steps for others with which they fill them; shuffled, none is left out: what an epoch leaves comes first in
    the next one. With ``global_batch_size`` and no ``token_steps`` a training step has exactly so many samples, in as
    many microbatches as they need; an epoch's last, smaller step is then left out, unless ``drop_last=False`` keeps it.
    Steps that do not train have a number of samples always, in order, the last of them perhaps fewer.

    Which samples are in a step depends on the data, ``seed``, ``shuffle`` and ``global_batch_size``, or what
    `TokenSteps` names, never on the ranks. A checkpoint keeps all that and refuses to go on in mid-epoch with other
    values. ``packing`` only decides how a step's samples are packed. Its cost models stay as they are for the whole
    run, unless the callback ``AdaptCosts`` is there; a checkpoint brings them back where none are given.

    Args:
        train: training data: a file, a pattern such as ``"shards/*.tar"``, an address that ``fsspec`` knows, a
            ``HubDataset``, a ``datasets.Dataset``, a ``SampleSource`` of your own, or a list of these. A ``Mixture``,
            or a mapping of files to weights, mixes them in that proportion, see
            :class:`~flowtrain_lightning.data.steps.sampler.Sampling`.
        val: validation data.
        test: test data.
        predict: data whose last assistant turns are to be written anew: sequences end with that turn's header.
        tokenizer: path of a ``tokenizer.json`` or its folder, a ``tokenizers.Tokenizer``, or a Hugging Face tokenizer;
            None takes that of the model that is trained, as do ``images``, ``videos``, ``audio`` and ``template``.
        token_budget: the most tokens of a microbatch.
        encoder_budget: the most patches of an encoder batch, which bounds what an encoder keeps for its backward. A
            media item that has more by itself is a batch by itself, and the log says so.
        global_batch_size: samples of one step over all ranks; with ``token_steps``, of one that does not train. None
            takes, where no training happens, as many samples as fill a training step's microbatches on average.
        images: what becomes of images; None takes what the model that is trained was made for, else
            ``ImageProcessor()``.
        videos: what becomes of videos; None takes what the model that is trained was made for, if it takes any.
        audio: what becomes of audio; None takes what the model that is trained was made for, if it hears.
        template: how conversations are written; None takes the model's own template, else ``ChatTemplate()``.
        seed: of order and augmentation; None takes that of ``seed_everything``, or 0.
        shuffle: training samples come in another order each epoch. Off while ``Trainer(overfit_batches=...)`` is on.
        drop_last: leave out an epoch's last step where it has fewer samples than ``global_batch_size``; shuffled, other
            samples fall out each time. Steps that fill microbatches leave none out.
        token_steps: of how many microbatches training steps are. None makes steps of ``global_batch_size`` samples; if
            that is None too, ``TokenSteps()``, which takes what suits the data.
        packing: cost models, padding, and when ranks wait for each other; None takes ``PackingConfig()``.
        index: what happens to samples that are too long and to images that cannot be read, and the folder of the index;
            None takes ``IndexConfig()``.
        augment: changes training images alone: ``augment(image, generator)`` gets a Pillow image and a NumPy
            generator seeded from seed, epoch, sample and the image's number in it, and returns a Pillow image.
        num_workers: processes that load, for each loader.
        producers: ``"ray"`` lets Ray load instead, in ``num_workers`` producers for each loader (0: as many as there
            are processors for a rank): on the cluster of ``RAY_ADDRESS``, or on this machine while the run lasts.
        protocols: kinds of addresses that records may name media by, beside files, ``gs``, ``hf`` and
            ``s3``: ``["az"]``, as ``fsspec`` calls them.
        ignore_columns: fields of records, or endings of files in a tar shard, that are as if they were not there. What
            may mean something and is not read, such as ``label`` or a column of images, is refused otherwise.
        columns: which columns hold a question and an answer, ``Columns("question", "answer", image="picture")``; None:
            records have one of the forms above.
        group_by: ``"media"`` lets training samples of one picture come in one step, which encodes it once, as far as
            steps have room for them; where ``token_steps`` fill microbatches, some come a few steps later. Samples of a
            step are then less unlike, and the log says how many it concerns. None: each sample by itself.
        keep_features: where features of frozen encoders are kept, to be read from the second epoch on, in validation,
            and by later runs; None: nowhere.
    """

    def __init__(
        self,
        train: Data | None = None,
        val: Data | None = None,
        test: Data | None = None,
        predict: Data | None = None,
        *,
        token_budget: int,
        global_batch_size: int | None = None,
        encoder_budget: int = ENCODER_BUDGET,
        tokenizer: Any = None,
        images: ImageProcessor | None = None,
        videos: VideoProcessor | None = None,
        audio: AudioProcessor | None = None,
        template: ChatTemplate | Template | None = None,
        seed: int | None = None,
        shuffle: bool = True,
        drop_last: bool = True,
        token_steps: TokenSteps | None = None,
        packing: PackingConfig | None = None,
        index: IndexConfig | None = None,
        augment: Augment | None = None,
        num_workers: int = 0,
        producers: Producers | None = None,
        protocols: Sequence[str] = (),
        ignore_columns: Sequence[str] = (),
        columns: Columns | None = None,
        group_by: GroupBy | None = None,
        keep_features: KeepFeatures | None = None,
    ) -> None:
        owner = type(self).__name__
        check_setting(owner, "token_budget", token_budget, int, least=1)
        check_setting(owner, "encoder_budget", encoder_budget, int, least=1)
        check_setting(owner, "num_workers", num_workers, int, least=0)
        check_setting(owner, "global_batch_size", global_batch_size, int | None, least=1)
        check_setting(owner, "seed", seed, int | None, least=0)
        for name, value, kind in (
            ("shuffle", shuffle, bool),
            ("drop_last", drop_last, bool),
            ("token_steps", token_steps, TokenSteps | None),
            ("packing", packing, PackingConfig | None),
            ("index", index, IndexConfig | None),
            ("producers", producers, Producers | None),
            ("columns", columns, Columns | None),
            ("group_by", group_by, GroupBy | None),
            ("keep_features", keep_features, KeepFeatures | None),
        ):
            check_setting(owner, name, value, kind)
        if keep_features is not None and augment is not None:
            refuse_augmented(owner)
        if producers is not None:
            refuse_without_ray()
        given = (("train", train), ("val", val), ("test", test), ("predict", predict))
        super().__init__(
            {stage: mixture_of(stage, data) for stage, data in given if data is not None},
            token_budget=token_budget,
            index=index or IndexConfig(),
            protocols=named_protocols(protocols),
            ignore_columns=ignored_names(ignore_columns),
            columns=columns,
            num_workers=num_workers,
            producers=producers,
            tokenizer=tokenizer,
            images=images,
            videos=videos,
            audio=audio,
            template=template,
        )
        self.encoder_budget = encoder_budget
        self.global_batch_size = global_batch_size
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.token_steps = TokenSteps() if token_steps is None and global_batch_size is None else token_steps
        self.packing = (packing or PackingConfig()).with_profile_read()
        self.augment = augment
        self.group_by = group_by
        self.keep_features = keep_features
        self._seed = seed
        self._cluster: RayCluster | None = None
        self._local_ray: LocalRay | None = None
        # Weakly: Lightning may ask for a loader anew and drop the former, whose workers then end.
        self._loaders: WeakSet[StepLoader] = WeakSet()
        self._training: weakref.ref[StepLoader] | None = None
        self._resume: dict[str, Any] | None = None

    @property
    def seed(self) -> int:
        """Of order and augmentation: the one given, else that of ``seed_everything``, whenever it was called, or 0."""
        return int(os.environ.get("PL_GLOBAL_SEED", 0)) if self._seed is None else self._seed

    def apart(self) -> Self:
        """A copy without its Trainer, see `StageData.apart`, and without its Ray."""
        alone = super().apart()
        alone._cluster = alone._local_ray = None
        return alone

    def prepare_data(self) -> None:
        """Index the files of the running stage, once for all ranks of a node."""
        running = self.trainer.state.fn if self.trainer is not None else None
        for stage in self.wanted(running):
            for summary in self._summaries(stage):
                rank_zero_info(summary)

    def index_ahead(self, measurer: Measurer) -> list[str]:
        """Index the data of all stages ahead of a run.

        Args:
            measurer: does the work.

        Returns:
            A sentence for each store of records: how many are used, and why the others are not; and one for each stage:
            how many steps an epoch has, and how many samples are in none of them.
        """
        return [summary for stage in self.files for summary in self._summaries(stage, measurer)]

    def _summaries(self, stage: str, measurer: Measurer = this_process) -> list[str]:
        opened = self.open(stage, measurer)
        if isinstance(opened, SampleStream):
            return []  # how many there are is told at its end
        told = [source.summary for source in opened.sources if isinstance(source, IndexedSource)]
        try:
            steps = self._steps(stage, opened)
        except DataError as error:  # too few for a step: the loader refuses that, an index is as good as any
            return [*told, f"{stage}: {error}"]
        assert not isinstance(steps, StreamSteps), "only a stream has these"
        grouped = [f"{stage}: {media_groups_of(opened).summary}."] if self.group_by and stage == "train" else []
        return [*told, f"{stage}: {steps.summary}", *grouped]

    def setup(self, stage: str | None = None) -> None:
        """Open the indexes of a stage; every rank does.

        Raises:
            DataError: this rank has other settings than rank 0, or a cost model of a role that takes no media.
        """
        self._training = self._resume = None
        announce_compilation(rank_zero_info)
        if self.trainer is not None:
            refuse_unlike_settings(self.trainer, self.settings)
            refuse_costs_of_others(self.trainer, self.packing.media_costs or {})
        opened = {name: self.open(name, media_compared=self.trainer is not None) for name in self.wanted(stage)}
        self.share(opened)
        if self.producers is not None and self._cluster is None:
            self._cluster, self._local_ray = connect_ranks(self.trainer, self.num_workers)

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
        """The position in the training data.

        Lightning keeps that of its loader as well, but forgets it where ``configure_optimizers`` asks for
        ``trainer.estimated_stepping_batches`` and so for the loader, before the loops are restored.
        """
        loader = None if self._training is None else self._training()
        return {} if loader is None else {"train": loader.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from that position, where training does."""
        if self.trainer is not None and self.trainer.state.fn != TrainerFn.FITTING:
            return
        self._resume = state_dict["train"]
        loader = None if self._training is None else self._training()
        if loader is not None:
            loader.load_state_dict(self._resume)

    def differences(self, state_dict: Mapping[str, Any]) -> str:
        """Settings and files of training that make a saved position select other samples here; empty if none do."""
        return self._loader("train").differences(state_dict["train"])

    def teardown(self, stage: str | None = None) -> None:
        """End the workers, and a Ray that is this run's own."""
        for loader in self._loaders:
            loader.close()
        self._leave_ray()
        self.leave_reader()

    def on_exception(self, exception: BaseException) -> None:
        """End the workers, at once: what has failed is told after this hook, and a dead worker must not hold it up."""
        for loader in self._loaders:
            loader.abandon()
        self._leave_ray(waits=False)
        self.leave_reader()

    def _leave_ray(self, *, waits: bool = True) -> None:
        if self._local_ray is not None:
            self._local_ray.close(waits=waits)
        self._cluster = self._local_ray = None

    @property
    def settings(self) -> dict[str, str]:
        """Settings that decide the steps beside the files, by the names of the arguments."""
        return {name: repr(value) for name, value in steps_rest_on(self).items()}

    def _loader(self, stage: str) -> StepLoader:
        source, shard, packing = self.source(stage), own_shard(self.trainer), self.packing
        samples = SampleLoader(
            source,
            self.tokenizer,
            self.template,
            self.images,
            prompt=stage == "predict",
            limit=self.token_budget if self.index.too_long == "truncate" else None,
            augment=self.augment if stage == "train" else None,
            seed=self.seed,
            videos=self.videos,
            audio=self.audio,
        )
        sections = vars(packing) | ({} if self.token_steps is None else vars(self.token_steps))
        unset = frozenset(name for name, value in sections.items() if value is None)
        sampling, in_effect = self._steps(stage, source), packing.in_effect(self.token_budget, self.encoder_budget)
        warn_of_idle_ranks(sampling, shard)
        records = self.node_records(stage)
        steps = StepDataset(
            samples,
            sampling,
            shard,
            in_effect,
            packing.pad_to_budget,
            unset,
            cuts_media=getattr(self.read_by, "encodes_parts_apart", False),
            node=None if records is None else NodeRecords(records, shards_of_node(self.trainer)),
        )
        module, strategy = (getattr(self.trainer, name, None) for name in ("lightning_module", "strategy"))
        loader = StepLoader(
            steps,
            files=[each.fingerprint for each in (source.sources if isinstance(source, JoinedSources) else [source])],
            num_workers=self.num_workers,
            cluster=self._cluster,
            pin_memory=strategy is not None and strategy.root_device.type == "cuda",
            prepare=getattr(strategy, "prepare_step", None),
            prepare_media=getattr(module, "prepare_media", None),
            trainer=self.trainer if stage == "train" else None,
            keeping=keeping_of(self.keep_features, module, shard, (self.images, self.videos, self.audio)),
        )
        self._loaders.add(loader)
        return loader

    def _steps(self, stage: str, source: Source) -> Steps:
        """The samples of each step of a stage."""
        sizing = StepSizing(
            self.token_budget,
            self.packing.cost or DEFAULT_COST,
            self.global_batch_size,
            self.token_steps,
            self.seed,
            self.group_by,
            self.drop_last,
        )
        if stage != "train":
            return sizing.in_order(stage, source)
        overfits = getattr(self.trainer, "overfit_batches", 0) > 0
        return sizing.training(source, shuffle=self.shuffle and not overfits)
