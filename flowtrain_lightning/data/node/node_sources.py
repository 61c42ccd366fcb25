"""The data that the reader of a node reads for its ranks, and by what they ask it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import lightning as L

from flowtrain_lightning.data.data_path import is_local
from flowtrain_lightning.data.node.node_reader import NodeReader, Served, can_read_for_others, new_address
from flowtrain_lightning.data.node.reader_link import ReaderLink
from flowtrain_lightning.data.node.step_records import SharedRecords, StepRecords
from flowtrain_lightning.data.node.stream_passes import StreamPasses
from flowtrain_lightning.data.sources.indexed_source import IndexedSource
from flowtrain_lightning.data.sources.parquet_file import ParquetFile
from flowtrain_lightning.data.sources.sample_source import JoinedSources
from flowtrain_lightning.data.sources.shared_stream import SharedStream
from flowtrain_lightning.data.sources.stream_of_samples import SampleStream
from flowtrain_lightning.data.sources.stream_source import StreamSource
from flowtrain_lightning.data.sources.tar_shard import TarShard

Source = JoinedSources | SampleStream
"""The samples of a stage."""


@dataclass(frozen=True)
class NodeSources:
    """The data of stages as the processes of a node have them.

    Attributes:
        sources: stage -> its samples, streams as the reader gives them.
        records: stage -> how the records of its steps are asked for; without the stages whose records each rank reads.
        reader: the process that reads, in the rank that has started it.
    """

    sources: Mapping[str, Source] = field(default_factory=dict)
    records: Mapping[str, SharedRecords] = field(default_factory=dict)
    reader: NodeReader | None = None

    def close(self) -> None:
        """End the reader, where this rank has started it."""
        if self.reader is not None:
            self.reader.close()


def node_sources(sources: Mapping[str, Source], trainer: L.Trainer | None, workers: int) -> NodeSources:
    """Let one process of each node read what several would read whole, or far away. Every rank calls it.

    Args:
        sources: stage -> its samples.
        trainer: knows the ranks; None: there is this process alone.
        workers: of each loader.
    """
    readers = (1 if trainer is None else trainer.world_size // trainer.num_nodes) * max(workers, 1)
    alone = readers == 1 and not workers
    shared = {stage: source for stage, source in sources.items() if _would_be_read_whole(source)}
    if alone or not shared or not can_read_for_others():
        return NodeSources(sources)
    address = new_address()
    if trainer is not None:
        address = f"{trainer.strategy.broadcast(address)}-{trainer.node_rank}"
    reader = None
    if trainer is None or trainer.local_rank == 0:
        reader = NodeReader(address, {stage: _served(source, readers) for stage, source in shared.items()})
    if trainer is not None:
        trainer.strategy.barrier("the node's reader listens")
    link = ReaderLink(address, " and ".join(_name(stage, source) for stage, source in shared.items()))
    streams = {
        stage: SharedStream(link, stage, each) for stage, each in shared.items() if isinstance(each, SampleStream)
    }
    records = {stage: SharedRecords(link, stage) for stage in shared if stage not in streams}
    return NodeSources({**sources, **streams}, records, reader)


def _would_be_read_whole(source: Source) -> bool:
    """Whether each rank, or worker, would read all of it, or much more than what it needs of it."""
    return isinstance(source, SampleStream) or any(
        isinstance(each, IndexedSource) and _holds_media_or_is_far(each) for each in source.sources
    )


def _holds_media_or_is_far(source: IndexedSource) -> bool:
    return isinstance(source.store, ParquetFile | TarShard) or not is_local(source.store.path)


def _served(source: Source, readers: int) -> Served:
    if isinstance(source, JoinedSources):
        waits = all(isinstance(each, IndexedSource) and not is_local(each.store.path) for each in source.sources)
        in_pieces = any(
            isinstance(each, IndexedSource) and isinstance(each.store, ParquetFile) for each in source.sources
        )
        return StepRecords(source, together=waits and not in_pieces)
    assert isinstance(source, StreamSource), "it was opened here"
    return StreamPasses(source, readers)


def _name(stage: str, source: Source) -> str:
    return source.name if isinstance(source, SampleStream) else f"the {stage} data"
