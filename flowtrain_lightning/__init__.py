"""Fast training of vision-language models with PyTorch Lightning: importing registers ``strategy="flowtrain"``.

Names are imported when they are asked for, so that planning and packing need neither torch nor Lightning.
"""

from importlib import import_module

from flowtrain_lightning.registration import register_strategy

__version__ = "0.2.0"

_MODULES = {
    "ChatTemplate": "flowtrain_lightning.data",
    "Columns": "flowtrain_lightning.data",
    "Experts": "flowtrain_lightning.parallel.experts.experts",
    "FlowCheckpointIO": "flowtrain_lightning.checkpoint",
    "FlowDataModule": "flowtrain_lightning.data",
    "FlowModule": "flowtrain_lightning.module",
    "FlowTrainStrategy": "flowtrain_lightning.strategy",
    "GivenTokens": "flowtrain_lightning.data",
    "HubDataset": "flowtrain_lightning.data",
    "ImageProcessor": "flowtrain_lightning.data",
    "IndexConfig": "flowtrain_lightning.data",
    "KeepFeatures": "flowtrain_lightning.data",
    "LoadedMedia": "flowtrain_lightning.data",
    "Mixture": "flowtrain_lightning.data",
    "MuonAdamW": "flowtrain_lightning.parallel.muon",
    "PackedBatch": "flowtrain_lightning.data",
    "PackedMedia": "flowtrain_lightning.data",
    "PackingConfig": "flowtrain_lightning.data",
    "PoolSettings": "flowtrain_lightning.runtime.pool_capacity",
    "Record": "flowtrain_lightning.data",
    "RoleLayout": "flowtrain_lightning.allocator",
    "SampleSizes": "flowtrain_lightning.data",
    "TokenSteps": "flowtrain_lightning.data",
    "check": "flowtrain_lightning.packing_check",
    "export_checkpoint": "flowtrain_lightning.checkpoint",
}
"""Public name -> the module that has it. ``__init__.pyi`` tells type checkers and editors the same."""

__all__ = [*_MODULES, "models"]


def __getattr__(name: str) -> object:
    if name == "models":
        return import_module("flowtrain_lightning.models")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value  # asked for once only
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


register_strategy()
