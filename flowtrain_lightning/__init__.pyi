"""Types of the names that ``__init__.py`` imports when they are asked for."""

from flowtrain_lightning import models as models
from flowtrain_lightning.allocator import RoleLayout as RoleLayout
from flowtrain_lightning.checkpoint import FlowCheckpointIO as FlowCheckpointIO
from flowtrain_lightning.checkpoint import export_checkpoint as export_checkpoint
from flowtrain_lightning.data import ChatTemplate as ChatTemplate
from flowtrain_lightning.data import Columns as Columns
from flowtrain_lightning.data import FlowDataModule as FlowDataModule
from flowtrain_lightning.data import GivenTokens as GivenTokens
from flowtrain_lightning.data import HubDataset as HubDataset
from flowtrain_lightning.data import ImageProcessor as ImageProcessor
from flowtrain_lightning.data import IndexConfig as IndexConfig
from flowtrain_lightning.data import KeepFeatures as KeepFeatures
from flowtrain_lightning.data import LoadedMedia as LoadedMedia
from flowtrain_lightning.data import Mixture as Mixture
from flowtrain_lightning.data import PackedBatch as PackedBatch
from flowtrain_lightning.data import PackedMedia as PackedMedia
from flowtrain_lightning.data import PackingConfig as PackingConfig
from flowtrain_lightning.data import Record as Record
from flowtrain_lightning.data import SampleSizes as SampleSizes
from flowtrain_lightning.data import TokenSteps as TokenSteps
from flowtrain_lightning.module import FlowModule as FlowModule
from flowtrain_lightning.packing_check import check as check
from flowtrain_lightning.parallel.experts.experts import Experts as Experts
from flowtrain_lightning.parallel.muon import MuonAdamW as MuonAdamW
from flowtrain_lightning.runtime.pool_capacity import PoolSettings as PoolSettings
from flowtrain_lightning.strategy import FlowTrainStrategy as FlowTrainStrategy

__version__: str
