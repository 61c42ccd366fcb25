"""Fast training of vision-language models with PyTorch Lightning: importing registers ``strategy="flowtrain"``."""

__version__ = "0.1.0"

try:
    from lightning.pytorch.strategies import StrategyRegistry

    from flowtrain_lightning import models
    from flowtrain_lightning.checkpoint import FlowCheckpointIO, export_checkpoint
    from flowtrain_lightning.data import (
        FlowDataModule,
        ImageProcessor,
        IndexConfig,
        PackedBatch,
        PackedMedia,
        PackingConfig,
        TokenSteps,
    )
    from flowtrain_lightning.module import FlowModule
    from flowtrain_lightning.runtime.pool_capacity import PoolSettings
    from flowtrain_lightning.strategy import FlowTrainStrategy

    if FlowTrainStrategy.strategy_name not in StrategyRegistry.available_strategies():
        StrategyRegistry.register(FlowTrainStrategy.strategy_name, FlowTrainStrategy)
except ModuleNotFoundError as missing:
    # Planning for a cluster needs numpy and scipy only: `packing` and `allocator` import on a laptop without torch.
    if missing.name not in ("torch", "lightning"):
        raise

__all__ = [
    "FlowCheckpointIO",
    "FlowDataModule",
    "FlowModule",
    "FlowTrainStrategy",
    "ImageProcessor",
    "IndexConfig",
    "PackedBatch",
    "PackedMedia",
    "PackingConfig",
    "PoolSettings",
    "TokenSteps",
    "export_checkpoint",
    "models",
]
