"""Data: samples, media items, packed batches, sources and the data module.

Begin with `datamodule.py` (from settings to loaders) and `batch.py` (what ranks compute on). `formats.py`,
`tokenization.py`, `conversation.py` and `image_processor.py` read samples; `index.py` and `sources.py` know their
sizes; `sampler.py` and `token_stream.py` say which are in a step; `step_packing.py` and `dataset.py` plan and load one
rank's shard of it; `dataloader.py` gives it out, with `workers.py` where other processes load.
"""

from flowtrain_lightning.data.batch import IGNORED_LABEL, Features, PackedBatch, PackedMedia, RankShard, StepBatch
from flowtrain_lightning.data.conversation import ChatTemplate, Template, TokenSequence
from flowtrain_lightning.data.dataloader import StepLoader
from flowtrain_lightning.data.datamodule import FlowDataModule
from flowtrain_lightning.data.dataset import StepDataset
from flowtrain_lightning.data.formats import DataError, Record, Turn
from flowtrain_lightning.data.image_processor import ImageError, ImageProcessor
from flowtrain_lightning.data.index import IndexConfig
from flowtrain_lightning.data.sampler import Sampling
from flowtrain_lightning.data.sources import FileSource, JoinedSources, SampleSource
from flowtrain_lightning.data.step_packing import PackingConfig
from flowtrain_lightning.data.token_stream import TokenSteps
from flowtrain_lightning.data.tokenization import Tokenizer, open_tokenizer
from flowtrain_lightning.packing import Entry, StepPlan

__all__ = [
    "IGNORED_LABEL",
    "ChatTemplate",
    "DataError",
    "Entry",
    "Features",
    "FileSource",
    "FlowDataModule",
    "ImageError",
    "ImageProcessor",
    "IndexConfig",
    "JoinedSources",
    "PackedBatch",
    "PackedMedia",
    "PackingConfig",
    "RankShard",
    "Record",
    "SampleSource",
    "Sampling",
    "StepBatch",
    "StepDataset",
    "StepLoader",
    "StepPlan",
    "Template",
    "TokenSequence",
    "TokenSteps",
    "Tokenizer",
    "Turn",
    "open_tokenizer",
]
