"""Data: samples, media, packed batches, metadata sources, readers and the data module.

Begin with `module.py` and `stages.py` (settings to loaders) and `batch.py` (what ranks compute on). `records.py`,
`conversation.py` and `images.py` read samples, `index.py` and `metadata.py` know their sizes, `sampling.py` and
`token_stream.py` say which are in a step, `planning.py` and `steps.py` plan and load it, `loader.py` gives it out.
"""

from flowtrain_lightning.data.batch import IGNORED_LABEL, Features, PackedBatch, PackedMedia, RankShard, StepBatch
from flowtrain_lightning.data.conversation import ChatTemplate, TokenSequence
from flowtrain_lightning.data.images import ImageProcessor, PictureError
from flowtrain_lightning.data.loader import StepLoader
from flowtrain_lightning.data.metadata import JoinedSources, MetadataIndex, MetadataSource
from flowtrain_lightning.data.module import FlowDataModule
from flowtrain_lightning.data.records import DataError, Record, Turn
from flowtrain_lightning.data.sampling import Sampling
from flowtrain_lightning.data.steps import StepDataset
from flowtrain_lightning.data.tokenizer import Tokenizer, open_tokenizer
from flowtrain_lightning.packing import Entry, StepPlan

__all__ = [
    "IGNORED_LABEL",
    "ChatTemplate",
    "DataError",
    "Entry",
    "Features",
    "FlowDataModule",
    "ImageProcessor",
    "JoinedSources",
    "MetadataIndex",
    "MetadataSource",
    "PackedBatch",
    "PackedMedia",
    "PictureError",
    "RankShard",
    "Record",
    "Sampling",
    "StepBatch",
    "StepDataset",
    "StepLoader",
    "StepPlan",
    "TokenSequence",
    "Tokenizer",
    "Turn",
    "open_tokenizer",
]
