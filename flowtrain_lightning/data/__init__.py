"""Data: samples, media items, packed batches, sources and the data module.

Begin with `datamodule.py` (from settings to loaders) and `batch.py` (what ranks compute on). `sources/` says where
records lie, `formats.py` and `given_tokens.py` what one means; `conversation.py`, `tokenization.py` and
`sample_tokens.py` make tokens of it, `image_files.py` and `image_processor.py`, and likewise of videos and
audio, patches; `measuring.py` and `index.py` know sizes; `sampler.py` and `token_stream.py` say which
samples are in a step; `step_packing.py` and `dataset.py` plan and load one rank's shard of it; `dataloader.py` gives it
out, with `workers.py` and `worker_channels.py` where other processes load, `producers.py`, `ray_client.py` and
`step_maker.py` where Ray does. `node_sources.py` and `node_reader.py` let one process read for all of a node.
`feature_store.py` keeps what frozen encoders made of media.
"""

from flowtrain_lightning.data.batch import (
    IGNORED_LABEL,
    Clip,
    Features,
    PackedBatch,
    PackedMedia,
    RankShard,
    StepBatch,
    Tiles,
)
from flowtrain_lightning.data.data_error import DataError
from flowtrain_lightning.data.datamodule import FlowDataModule
from flowtrain_lightning.data.features.feature_store import FeaturesNotKept, FeatureStore, KeepFeatures
from flowtrain_lightning.data.loading.dataloader import LOADING_THREAD, StepLoader
from flowtrain_lightning.data.loading.dataset import StepDataset
from flowtrain_lightning.data.media.audio_header import AudioError
from flowtrain_lightning.data.media.audio_processor import AudioProcessor
from flowtrain_lightning.data.media.image_files import ImageError
from flowtrain_lightning.data.media.image_processor import ImageProcessor
from flowtrain_lightning.data.media.loaded_media import LoadedMedia, OwnMedia
from flowtrain_lightning.data.media.log_mel import LogMelProcessor
from flowtrain_lightning.data.media.media_files import MediaError
from flowtrain_lightning.data.media.video_files import VideoError
from flowtrain_lightning.data.media.video_processor import VideoProcessor
from flowtrain_lightning.data.records.columns import Columns
from flowtrain_lightning.data.records.conversation import ChatTemplate, Template, TokenSequence
from flowtrain_lightning.data.records.formats import Record
from flowtrain_lightning.data.records.given_tokens import GivenTokens
from flowtrain_lightning.data.records.record_turns import Turn
from flowtrain_lightning.data.records.tokenization import Tokenizer, open_tokenizer
from flowtrain_lightning.data.sources.hugging_face import HubDataset
from flowtrain_lightning.data.sources.index import IndexConfig
from flowtrain_lightning.data.sources.indexed_source import IndexedSource
from flowtrain_lightning.data.sources.json_file import JsonFile
from flowtrain_lightning.data.sources.naming import Mixture
from flowtrain_lightning.data.sources.parquet_file import ParquetFile
from flowtrain_lightning.data.sources.record_store import RecordStore
from flowtrain_lightning.data.sources.sample_source import JoinedSources, SampleSource
from flowtrain_lightning.data.sources.tar_shard import TarShard
from flowtrain_lightning.data.steps.sampler import Sampling
from flowtrain_lightning.data.steps.step_packing import PackingConfig
from flowtrain_lightning.data.steps.step_sizing import TokenSteps
from flowtrain_lightning.data.targets import PackedTargets
from flowtrain_lightning.packing import Entry, SampleSizes, StepPlan

__all__ = [
    "IGNORED_LABEL",
    "LOADING_THREAD",
    "AudioError",
    "AudioProcessor",
    "ChatTemplate",
    "Clip",
    "Columns",
    "DataError",
    "Entry",
    "FeatureStore",
    "Features",
    "FeaturesNotKept",
    "FlowDataModule",
    "GivenTokens",
    "HubDataset",
    "ImageError",
    "ImageProcessor",
    "IndexConfig",
    "IndexedSource",
    "JoinedSources",
    "JsonFile",
    "KeepFeatures",
    "LoadedMedia",
    "LogMelProcessor",
    "MediaError",
    "Mixture",
    "OwnMedia",
    "PackedBatch",
    "PackedMedia",
    "PackedTargets",
    "PackingConfig",
    "ParquetFile",
    "RankShard",
    "Record",
    "RecordStore",
    "SampleSizes",
    "SampleSource",
    "Sampling",
    "StepBatch",
    "StepDataset",
    "StepLoader",
    "StepPlan",
    "TarShard",
    "Template",
    "Tiles",
    "TokenSequence",
    "TokenSteps",
    "Tokenizer",
    "Turn",
    "VideoError",
    "VideoProcessor",
    "open_tokenizer",
]
