"""What the ranks of a Trainer load of each step, and what they must agree on."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import lightning as L
from lightning.pytorch.utilities import rank_zero_warn

from flowtrain_lightning.data.batch import RankShard
from flowtrain_lightning.data.data_error import DataError
from flowtrain_lightning.data.steps.sampler import Sampling
from flowtrain_lightning.data.steps.step_sizing import Steps


def own_shard(trainer: L.Trainer | None) -> RankShard:
    """This rank's part of each step: its strategy's, or that of plain data parallelism; all of it without a Trainer."""
    if trainer is None:
        return RankShard.plain(0, 1)
    shard: RankShard | None = getattr(trainer.strategy, "rank_shard", None)
    return shard or RankShard.plain(trainer.global_rank, trainer.world_size)


def shards_of_node(trainer: L.Trainer | None) -> tuple[RankShard, ...]:
    """The parts of all ranks of this node."""
    if trainer is None:
        return (own_shard(None),)
    shards: tuple[RankShard, ...] | None = getattr(trainer.strategy, "node_shards", None)
    if shards is not None:
        return tuple(shards)
    first = trainer.global_rank - trainer.local_rank
    ranks = range(first, first + trainer.world_size // trainer.num_nodes)
    return tuple(RankShard.plain(rank, trainer.world_size) for rank in ranks)


def refuse_loader_of_others(trainer: L.Trainer, shard: RankShard) -> None:
    """Raises a DataError where a loader deals steps to other ranks than those of the Trainer.

    Args:
        trainer: runs the steps.
        shard: what of a step the loader has given.
    """
    own = own_shard(trainer)
    if shard.own != own.own or shard.members.counts != own.members.counts:
        raise DataError(
            f"The loader gives member {dict(shard.own)} of {dict(shard.members.counts)}, but rank "
            f"{trainer.global_rank} is member {dict(own.own)} of {dict(own.members.counts)}: it was made before its "
            "data module knew the ranks. Give the data module itself, not its loaders: "
            "trainer.fit(module, datamodule=data)."
        )


def warn_of_idle_ranks(steps: Steps, shard: RankShard) -> None:
    """Tells of ranks of the trunk that will have no work, as steps have fewer microbatches than there are ranks."""
    if isinstance(steps, Sampling) or steps.settings is None:
        return
    ranks = shard.members.counts[shard.members.trunk]
    if (microbatches := steps.settings.microbatches) < ranks:
        rank_zero_warn(
            f"Of {ranks} {shard.members.trunk} ranks some have no work, as a step has microbatches={microbatches}. "
            f"Set FlowDataModule(token_steps=TokenSteps(microbatches={ranks})) or more, or lower token_budget."
        )


def refuse_costs_of_others(trainer: L.Trainer, media_costs: Collection[str]) -> None:
    """Raises a DataError where a cost model is that of a role which takes no media in the Trainer's module."""
    graph = getattr(trainer.lightning_module, "role_graph", None)
    if graph is None:
        return
    takers = (*graph.producers, *graph.behind)
    if unknown := [role for role in media_costs if role not in takers]:
        raise DataError(
            f"PackingConfig(media_costs=...) names {unknown[0]!r}, but media go to {', '.join(map(repr, takers))} in "
            f"{type(trainer.lightning_module).__name__}. Name one of these."
        )


def refuse_unlike_settings(trainer: L.Trainer, own: Mapping[str, str]) -> None:
    """Raises a DataError where a rank's settings are not those of rank 0, with which it would plan other steps."""
    first = trainer.strategy.broadcast(own)
    unlike = [name for name in own if own[name] != first[name]]
    if unlike:
        here, there = (", ".join(f"{name}={of[name]}" for name in unlike) for of in (own, first))
        raise DataError(
            f"Rank {trainer.global_rank} has FlowDataModule({here}), but rank 0 has {there}. All ranks plan the same "
            "steps from the same settings: give the same values, and the same number to seed_everything, on every rank."
        )
