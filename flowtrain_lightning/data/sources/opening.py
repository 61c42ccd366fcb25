"""From the data that a stage is given to its samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flowtrain_lightning.data.data_error import DataError
from flowtrain_lightning.data.node.node_reader import can_read_for_others
from flowtrain_lightning.data.node.node_sources import Source
from flowtrain_lightning.data.producers.ray_cluster import Producers
from flowtrain_lightning.data.sources.hugging_face import HubDataset
from flowtrain_lightning.data.sources.index import IndexConfig
from flowtrain_lightning.data.sources.indexed_source import IndexedSource
from flowtrain_lightning.data.sources.measurers import Measurer
from flowtrain_lightning.data.sources.measuring import Measure
from flowtrain_lightning.data.sources.naming import Mixture, is_stream, open_stores
from flowtrain_lightning.data.sources.sample_source import JoinedSources, SampleSource
from flowtrain_lightning.data.sources.stream_source import StreamSource


@dataclass(frozen=True)
class Opening:
    """The rules by which data become samples.

    Attributes:
        measure: decides the sizes of a record.
        token_budget: the most tokens of a sample.
        index: what happens to samples that cannot be used, and where sizes are kept.
        measurer: measures records that no index knows.
        media_compared: media are told apart by what they hold, as far as sizes alone do not.
    """

    measure: Measure
    token_budget: int
    index: IndexConfig
    measurer: Measurer
    media_compared: bool = False

    def samples(self, stage: str, data: Mixture, *, num_workers: int, producers: Producers | None) -> Source:
        """The samples of a stage.

        Args:
            stage: ``"train"``, ``"val"``, ``"test"`` or ``"predict"``.
            data: what was given for it.
            num_workers: that will load it.
            producers: that will load it instead.

        Raises:
            DataError: it cannot be read, or not by these.
        """
        sources = [each.load() if isinstance(each, HubDataset) else each for each in data.sources]
        if any(is_stream(each) for each in sources):
            _refuse_readers_of_a_stream(stage, sources, num_workers, producers)
            return StreamSource(sources[0], self.measure, self.token_budget, self.index)
        opened = [self._stored(source) for source in sources]
        weights = data.shares([[len(each) for each in group] for group in opened])
        return JoinedSources([each for group in opened for each in group], weights)

    def _stored(self, source: Any) -> list[SampleSource]:
        """The samples of one of the data, those of each store apart."""
        if isinstance(source, SampleSource):
            return [source]
        stores = open_stores(source, self.measure.ignored, self.measure.columns)
        rules = self.measure, self.token_budget, self.index, self.measurer
        return [IndexedSource(store, *rules, media_compared=self.media_compared) for store in stores]


def _refuse_readers_of_a_stream(
    stage: str, sources: Sequence[Any], num_workers: int, producers: Producers | None
) -> None:
    if len(sources) > 1:
        raise DataError(
            f"{stage} has a stream beside other data; mix streams by datasets.interleave_datasets, and give that."
        )
    if num_workers > 0 and not can_read_for_others():
        raise DataError(
            f"{stage} is a stream, but num_workers={num_workers}: one process can read it for several workers "
            "on Linux only; set it to 0."
        )
    if producers is not None:
        raise DataError(f"{stage} is a stream, which is read in order, but producers={producers!r}; leave it out.")
