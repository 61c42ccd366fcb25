"""The data module: files in, a loader of steps for every stage out."""

from __future__ import annotations

import copy
import os
import warnings
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any
from weakref import WeakSet

import lightning as L
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from flowtrain_lightning.data.audio_processor import AudioProcessor
from flowtrain_lightning.data.batch import RankShard
from flowtrain_lightning.data.columns import Columns
from flowtrain_lightning.data.conversation import ChatTemplate, Template
from flowtrain_lightning.data.data_error import DataError
from flowtrain_lightning.data.data_path import named_protocols
from flowtrain_lightning.data.dataloader import StepLoader
from flowtrain_lightning.data.dataset import NodeRecords, StepDataset
from flowtrain_lightning.data.feature_keeping import FeatureKeeping
from flowtrain_lightning.data.feature_store import KeepFeatures
from flowtrain_lightning.data.fingerprint import fingerprint
from flowtrain_lightning.data.formats import Record
from flowtrain_lightning.data.image_processor import ImageProcessor
from flowtrain_lightning.data.index import IndexConfig
from flowtrain_lightning.data.measurers import Measurer, this_process
from flowtrain_lightning.data.measuring import Measure
from flowtrain_lightning.data.node_reader import can_read_for_others
from flowtrain_lightning.data.node_sources import NodeSources, Source, node_sources
from flowtrain_lightning.data.ray_cluster import LocalRay, Producers, RayCluster, connect_ranks, refuse_without_ray
from flowtrain_lightning.data.record_fields import ignored_names
from flowtrain_lightning.data.sample_loader import Augment, SampleLoader
from flowtrain_lightning.data.sampler import Sampling
from flowtrain_lightning.data.sources.hugging_face import HubDataset
from flowtrain_lightning.data.sources.indexed_source import IndexedSource
from flowtrain_lightning.data.sources.naming import Data, is_stream, mixture_of, open_stores
from flowtrain_lightning.data.sources.sample_source import JoinedSources, SampleSource
from flowtrain_lightning.data.sources.stream_of_samples import SampleStream
from flowtrain_lightning.data.sources.stream_source import StreamSource
from flowtrain_lightning.data.step_packing import PackingConfig, StepPacking
from flowtrain_lightning.data.step_sizing import GroupBy, Steps, StepSizing, TokenSteps, media_groups_of
from flowtrain_lightning.data.stream_steps import StreamSteps
from flowtrain_lightning.data.tokenization import Tokenizer, open_tokenizer
from flowtrain_lightning.data.video_processor import VideoProcessor
from flowtrain_lightning.packing.compiled import announce_compilation
from flowtrain_lightning.packing.encoder_batches import ENCODER_BUDGET
from flowtrain_lightning.packing.setting_values import check_setting

# Without a validation file there is no loader, on purpose, so this advice would mislead.
warnings.filterwarnings("ignore", message="Total length of `list` across ranks is zero")

_STAGES = {"fit": ("train", "val"), "validate": ("val",), "test": ("test",), "predict": ("predict",)}


class FlowDataModule(L.LightningDataModule):
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
            :class:`~flowtrain_lightning.data.sampler.Sampling`.
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
        super().__init__()
        owner = type(self).__name__
        for name, count, least in (
            ("token_budget", token_budget, 1),
            ("encoder_budget", encoder_budget, 1),
            ("num_workers", num_workers, 0),
        ):
            check_setting(owner, name, count, int, least)
        check_setting(owner, "global_batch_size", global_batch_size, int | None, least=1)
        check_setting(owner, "seed", seed, int | None, least=0)
        check_setting(owner, "producers", producers, Producers | None)
        check_setting(owner, "shuffle", shuffle, bool)
        check_setting(owner, "drop_last", drop_last, bool)
        check_setting(owner, "token_steps", token_steps, TokenSteps | None)
        check_setting(owner, "packing", packing, PackingConfig | None)
        check_setting(owner, "index", index, IndexConfig | None)
        check_setting(owner, "columns", columns, Columns | None)
        check_setting(owner, "group_by", group_by, GroupBy | None)
        check_setting(owner, "keep_features", keep_features, KeepFeatures | None)
        if keep_features is not None and augment is not None:
            raise ValueError(
                f"{owner} got keep_features and augment, but augmentation changes pictures by chance in every epoch, "
                "so none of their features could be used again; leave one of the two out."
            )
        self.ignore_columns = ignored_names(ignore_columns)
        self.columns = columns
        given = {"train": train, "val": val, "test": test, "predict": predict}
        self.files = {stage: mixture_of(stage, data) for stage, data in given.items() if data is not None}
        self.token_budget = token_budget
        self.encoder_budget = encoder_budget
        self.global_batch_size = global_batch_size
        self._images = images
        self._videos = videos
        self._audio = audio
        self._template = template
        self._reader: L.LightningModule | None = None
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.token_steps = TokenSteps() if token_steps is None and global_batch_size is None else token_steps
        self.packing = (packing or PackingConfig()).with_profile_read()
        self.index = index or IndexConfig()
        self.augment = augment
        self.num_workers = num_workers
        self.producers = producers
        if producers is not None:
            refuse_without_ray()
        self._cluster: RayCluster | None = None
        self._local_ray: LocalRay | None = None
        self.protocols = named_protocols(protocols)
        self.group_by = group_by
        self.keep_features = keep_features
        self._seed = seed
        self._tokenizer = tokenizer
        self._sources: dict[str, Source] = {}
        self._of_node = NodeSources()
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
        """The tokenizer; opened when first asked for, so that ``prepare_data`` of a subclass may make it.

        Raises:
            DataError: none was given, and the model that is trained names none.
        """
        given = self._of_model("tokenizer") if self._tokenizer is None else self._tokenizer
        if given is None:
            raise DataError(
                "FlowDataModule has no tokenizer. Give one, FlowDataModule(tokenizer='tokenizer.json'), or train a "
                "model of Hugging Face by its name, which names its own."
            )
        return open_tokenizer(given)

    @property
    def images(self) -> ImageProcessor:
        """The processor of images."""
        return self._images or self._of_model("images") or ImageProcessor()

    @property
    def videos(self) -> VideoProcessor | None:
        """The processor of videos; None where records may have none."""
        found: VideoProcessor | None = self._videos or self._of_model("videos")
        return found

    @property
    def audio(self) -> AudioProcessor | None:
        """The processor of audio; None where records may have none."""
        found: AudioProcessor | None = self._audio or self._of_model("audio")
        return found

    @property
    def template(self) -> Template:
        """The template of conversations."""
        return self._template or self._of_model("template") or ChatTemplate()

    def read_as(self, module: L.LightningModule) -> None:
        """Take what is read by from this model, where it was not given and no Trainer says which model it is."""
        self._reader = module

    def apart(self) -> FlowDataModule:
        """A copy without its Trainer, which deals steps to one rank and reads streams from their beginning.

        What the model that is trained says it reads stays: it may name tokenizer, template and images.
        """
        alone = copy.copy(self)
        if self.trainer is not None:
            alone.read_as(self.trainer.lightning_module)
        alone.trainer = alone.producers = alone._cluster = alone._local_ray = None
        alone.num_workers, alone._of_node = 0, NodeSources()
        alone._sources = {name: each for name, each in self._sources.items() if not isinstance(each, SampleStream)}
        return alone

    @property
    def _condition_rows(self) -> int | None:
        """Places of an image to be generated among the tokens; None where the model that is trained generates none."""
        module = self._reader if self.trainer is None else self.trainer.lightning_module
        graph: Any = getattr(module, "role_graph", None)
        return getattr(module, "condition_rows", None) if graph is not None and graph.behind else None

    def _of_model(self, name: str) -> Any:
        """The attribute ``processor`` of the model that is trained; None where it has none."""
        module = self._reader if self.trainer is None else self.trainer.lightning_module
        return getattr(getattr(module, "processor", None), name, None)

    def prepare_data(self) -> None:
        """Index the files of the running stage, once for all ranks of a node."""
        running = self.trainer.state.fn if self.trainer is not None else None
        for stage in self._wanted(running):
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
        opened = self._open(stage, measurer)
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
            DataError: this rank has other settings than rank 0, and so would plan other steps.
        """
        self._training = self._resume = None
        announce_compilation(rank_zero_info)
        if self.trainer is not None:
            settings = self.settings
            _refuse_unlike_ranks(self.trainer.global_rank, settings, self.trainer.strategy.broadcast(settings))
        opened = {name: self._open(name, media_compared=self.trainer is not None) for name in self._wanted(stage)}
        self._share(opened)
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
        self._leave_reader()

    def on_exception(self, exception: BaseException) -> None:
        """End the workers, at once: what has failed is told after this hook, and a dead worker must not hold it up."""
        for loader in self._loaders:
            loader.abandon()
        self._leave_ray(waits=False)
        self._leave_reader()

    def _share(self, opened: Mapping[str, Source]) -> None:
        """Take these data, by the node's reader where several processes would read them whole."""
        self._leave_reader()
        if self.producers is None:
            self._of_node = node_sources(opened, self.trainer, self.num_workers)
            opened = self._of_node.sources
        self._sources |= opened

    def _leave_reader(self) -> None:
        """End the node's reader, and forget what it gave."""
        self._of_node.close()
        for name in self._of_node.sources:
            self._sources.pop(name, None)
        self._of_node = NodeSources()

    def _leave_ray(self, *, waits: bool = True) -> None:
        if self._local_ray is not None:
            self._local_ray.close(waits=waits)
        self._cluster = self._local_ray = None

    def fingerprint(self, stage: str) -> str:
        """Changes with the content of the files of a stage: ranks that plan the same steps have the same."""
        return fingerprint([self._source(name).fingerprint for name in self._wanted(stage)])

    def path(self, stage: str) -> Path:
        """The path beside which the index of a stage's first data is kept; of a source of one's own the folder."""
        if isinstance(self.files[stage].sources[0], SampleSource):
            return Path.cwd() / stage
        return open_stores(self.files[stage].sources[0])[0].path

    def record(self, stage: str, sample: int) -> Record:
        """The record that a sample of ``"train"``, ``"val"``, ``"test"`` or ``"predict"`` is."""
        return self._source(stage).record(sample)

    def _wanted(self, stage: str | None) -> list[str]:
        names = self.files if stage is None else _STAGES[stage]
        return [name for name in names if name in self.files]

    @property
    def settings(self) -> dict[str, str]:
        """Settings that decide the steps beside the files, by the names of the arguments."""
        names = (
            "token_budget",
            "encoder_budget",
            "global_batch_size",
            "seed",
            "shuffle",
            "images",
            "videos",
            "audio",
            "template",
        )
        index = replace(self.index, cache_dir=None)  # which every node may have elsewhere
        settings = {name: getattr(self, name) for name in (*names, "token_steps", "packing", "group_by")}
        settings |= {"index": index, "tokenizer": self.tokenizer.fingerprint, "protocols": sorted(self.protocols)}
        settings["ignore_columns"] = sorted(self.ignore_columns)
        settings |= {} if self.columns is None else {"columns": self.columns}
        if "train" in self.files:
            settings |= {"weights": self.files["train"].weights, "temperature": self.files["train"].temperature}
        return {name: repr(value) for name, value in settings.items()}

    def _open(self, stage: str, measurer: Measurer = this_process, *, media_compared: bool = False) -> Source:
        """The samples of all stores of a stage; measures those that no cache knows."""
        prompts = stage == "predict"
        measure = Measure(
            self.tokenizer,
            self.template,
            self.images,
            self.index.unreadable,
            prompts,
            self.videos,
            self.protocols,
            self.ignore_columns,
            self.columns,
            self._condition_rows,
            self.audio,
        )
        sources = [each.load() if isinstance(each, HubDataset) else each for each in self.files[stage].sources]
        if any(is_stream(each) for each in sources):
            return self._open_stream(stage, sources, measure)
        opened: list[list[SampleSource]] = [
            [source]
            if isinstance(source, SampleSource)
            else [
                IndexedSource(store, measure, self.token_budget, self.index, measurer, media_compared=media_compared)
                for store in open_stores(source, self.ignore_columns, self.columns)
            ]
            for source in sources
        ]
        weights = self.files[stage].shares([[len(each) for each in group] for group in opened])
        return JoinedSources([each for group in opened for each in group], weights)

    def _open_stream(self, stage: str, sources: Sequence[Any], measure: Measure) -> StreamSource:
        if len(sources) > 1:
            raise DataError(
                f"{stage} has a stream beside other data; mix streams by datasets.interleave_datasets, and give that."
            )
        if self.num_workers > 0 and not can_read_for_others():
            raise DataError(
                f"{stage} is a stream, but num_workers={self.num_workers}: one process can read it for several workers "
                "on Linux only; set it to 0."
            )
        if self.producers is not None:
            raise DataError(
                f"{stage} is a stream, which is read in order, but producers={self.producers!r}; leave it out."
            )
        return StreamSource(sources[0], measure, self.token_budget, self.index)

    def _source(self, name: str) -> Source:
        if name not in self.files:
            raise DataError(f"FlowDataModule has no {name} data; give it: FlowDataModule({name}='{name}.jsonl', ...).")
        if name not in self._sources:
            self._sources[name] = self._open(name)
            if self.trainer is None and self.num_workers > 0 and isinstance(self._sources[name], SampleStream):
                self._share({name: self._sources[name]})
        return self._sources[name]

    def _loader(self, stage: str) -> StepLoader:
        source, shard, packing = self._source(stage), self._shard(), self.packing
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
        sampling, in_effect = self._steps(stage, source), self._packing_in_effect()
        _warn_of_idle_ranks(sampling, shard)
        module = getattr(self.trainer, "lightning_module", None)
        cuts_media = getattr(module or self._reader, "encodes_parts_apart", False)
        steps = StepDataset(
            samples,
            sampling,
            shard,
            in_effect,
            packing.pad_to_budget,
            unset,
            cuts_media=cuts_media,
            node=self._node_records(stage, shard),
        )
        strategy = None if self.trainer is None else self.trainer.strategy
        loader = StepLoader(
            steps,
            files=[each.fingerprint for each in (source.sources if isinstance(source, JoinedSources) else [source])],
            num_workers=self.num_workers,
            cluster=self._cluster,
            pin_memory=strategy is not None and strategy.root_device.type == "cuda",
            prepare=getattr(strategy, "prepare_step", None),
            prepare_media=getattr(module, "prepare_media", None),
            keeping=self._keeping(shard),
        )
        self._loaders.add(loader)
        return loader

    def _node_records(self, stage: str, shard: RankShard) -> NodeRecords | None:
        """The way to the node's reader for records of steps; None where this rank reads them itself."""
        if stage not in self._of_node.records:
            return None
        trainer = self.trainer
        shards = [shard] if trainer is None else getattr(trainer.strategy, "node_shards", None)
        if shards is None:
            assert trainer is not None
            first = trainer.global_rank - trainer.local_rank
            ranks = range(first, first + trainer.world_size // trainer.num_nodes)
            shards = [RankShard.plain(rank, trainer.world_size) for rank in ranks]
        return NodeRecords(self._of_node.records[stage], tuple(shards))

    def _keeping(self, shard: RankShard) -> FeatureKeeping | None:
        fingerprint_of = getattr(getattr(self.trainer, "lightning_module", None), "encoder_fingerprint", None)
        if self.keep_features is None or fingerprint_of is None:
            return None
        processors = self.images, self.videos, self.audio
        read = [(type(each).__qualname__, each.fingerprint) for each in processors if each is not None]
        return FeatureKeeping(self.keep_features, fingerprint(read), shard, fingerprint_of)

    def _packing_in_effect(self) -> StepPacking:
        return self.packing.in_effect(self.token_budget, self.encoder_budget)

    def _steps(self, stage: str, source: Source) -> Steps:
        """The samples of each step of a stage."""
        sizing = StepSizing(
            self.token_budget,
            self._packing_in_effect().cost,
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

    def _shard(self) -> RankShard:
        """This rank's part of each step: the strategy's, or that of plain data parallelism."""
        if self.trainer is None:
            return RankShard.plain(0, 1)
        shard: RankShard | None = getattr(self.trainer.strategy, "rank_shard", None)
        return shard or RankShard.plain(self.trainer.global_rank, self.trainer.world_size)


def _warn_of_idle_ranks(steps: Steps, shard: RankShard) -> None:
    if isinstance(steps, Sampling) or steps.settings is None:
        return
    ranks = shard.members.counts[shard.members.trunk]
    if (microbatches := steps.settings.microbatches) < ranks:
        rank_zero_warn(
            f"Of {ranks} {shard.members.trunk} ranks some have no work, as a step has microbatches={microbatches}. "
            f"Set FlowDataModule(token_steps=TokenSteps(microbatches={ranks})) or more, or lower token_budget."
        )


def _refuse_unlike_ranks(rank: int, own: Mapping[str, str], first: Mapping[str, str]) -> None:
    """Raises a DataError where a rank's settings are not those of rank 0, with which it would plan other steps."""
    unlike = [name for name in own if own[name] != first[name]]
    if unlike:
        here, there = (", ".join(f"{name}={of[name]}" for name in unlike) for of in (own, first))
        raise DataError(
            f"Rank {rank} has FlowDataModule({here}), but rank 0 has {there}. All ranks plan the same steps from the "
            "same settings: give the same values, and the same number to seed_everything, on every rank."
        )
