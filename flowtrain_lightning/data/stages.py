"""From the settings of a data module to what one stage reads: its samples, its steps, and the loader of both."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from flowtrain_lightning.data.batch import RankShard
from flowtrain_lightning.data.index import Measure
from flowtrain_lightning.data.loader import StepLoader
from flowtrain_lightning.data.metadata import JoinedSources, MetadataIndex
from flowtrain_lightning.data.planning import PackingConfig
from flowtrain_lightning.data.records import DataError
from flowtrain_lightning.data.samples import SampleLoader
from flowtrain_lightning.data.sampling import Sampling
from flowtrain_lightning.data.steps import StepDataset
from flowtrain_lightning.data.token_stream import TokenStream, training_stream
from flowtrain_lightning.packing import DEFAULT_COST

if TYPE_CHECKING:
    from flowtrain_lightning.data.module import FlowDataModule


def stage_source(data: FlowDataModule, stage: str) -> JoinedSources:
    """The samples of all files of a stage; measures those files that no cache knows.

    Args:
        data: says which files, and what decides the sizes of their samples.
        stage: ``"train"``, ``"val"``, ``"test"`` or ``"predict"``; one that has files.

    Raises:
        DataError: a file, a record or a picture cannot be used, or no sample is left.
    """
    measure = Measure(data.tokenizer, data.template, data.images, data.unreadable, prompt=stage == "predict")
    return JoinedSources(
        [
            MetadataIndex(
                path, measure, token_budget=data.token_budget, too_long=data.too_long, cache_dir=data.cache_dir
            )
            for path in data.files[stage]
        ]
    )


def stage_loader(data: FlowDataModule, stage: str, source: JoinedSources, part: RankShard) -> StepLoader:
    """A new loader of a stage's steps.

    Args:
        data: its settings.
        stage: ``"train"``, ``"val"``, ``"test"`` or ``"predict"``.
        source: the stage's samples.
        part: what this rank loads of each step.

    Raises:
        DataError: the samples do not make one step, or ``microbatches`` cannot be shared out evenly.
    """
    samples = SampleLoader(
        source,
        data.tokenizer,
        data.template,
        data.images,
        prompt=stage == "predict",
        limit=data.token_budget if data.too_long == "truncate" else None,
        augment=data.augment if stage == "train" else None,
        seed=data.seed,
    )
    given = {"cost": data.cost, "encoder_cost": data.encoder_cost, "balance_group": data.balance_group}
    return StepLoader(
        StepDataset(
            samples,
            _steps(data, stage, source, part),
            part,
            PackingConfig(data.token_budget, data.cost or DEFAULT_COST, data.encoder_cost, data.sync_every),
            data.pad_to_budget,
            frozenset(setting for setting, value in given.items() if value is None),
        ),
        files=[each.fingerprint for each in source.sources],
        num_workers=data.num_workers,
        pin_memory=data.trainer is not None and data.trainer.strategy.root_device.type == "cuda",
    )


def _steps(data: FlowDataModule, stage: str, source: JoinedSources, part: RankShard) -> Sampling | TokenStream:
    sampling = _sampling(data, stage, source.lengths)
    if stage != "train" or data.microbatches is None:
        if sampling.steps == 0:
            raise DataError(
                f"{stage} has {len(source)} samples, fewer than global_batch_size={data.global_batch_size}, so no "
                "step would be left; lower it, or set drop_last=False."
            )
        return sampling
    return training_stream(
        sampling,
        source.sizes(np.arange(len(source), dtype=np.int64)).tokens,
        token_budget=data.token_budget,
        microbatches=data.microbatches,
        backbone_ranks=part.backbone_ranks,
        balance_group=data.balance_group,
        cost=data.cost or DEFAULT_COST,
        max_delay=data.max_delay,
    )


def _sampling(data: FlowDataModule, stage: str, lengths: tuple[int, ...]) -> Sampling:
    training = stage == "train"
    overfits = getattr(data.trainer, "overfit_batches", 0) > 0
    return Sampling(
        lengths,
        data.global_batch_size,
        weights=data.weights if training else None,
        seed=data.seed,
        shuffle=training and data.shuffle and not overfits,
        drop_last=training and data.drop_last,
    )
