"""The data of each stage, opened when it is first asked for, and read by the node's reader where that reads less."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowtrain_lightning.data.data_error import DataError
from flowtrain_lightning.data.fingerprint import fingerprint
from flowtrain_lightning.data.node.node_sources import NodeSources, Source, node_sources
from flowtrain_lightning.data.node.step_records import SharedRecords
from flowtrain_lightning.data.producers.ray_cluster import Producers
from flowtrain_lightning.data.read_as import ReadAs
from flowtrain_lightning.data.records.columns import Columns
from flowtrain_lightning.data.records.formats import Record
from flowtrain_lightning.data.sources.index import IndexConfig
from flowtrain_lightning.data.sources.measurers import Measurer, this_process
from flowtrain_lightning.data.sources.measuring import Measure
from flowtrain_lightning.data.sources.naming import Mixture, open_stores
from flowtrain_lightning.data.sources.opening import Opening
from flowtrain_lightning.data.sources.sample_source import SampleSource
from flowtrain_lightning.data.sources.stream_of_samples import SampleStream

if TYPE_CHECKING:
    from typing_extensions import Self

_STAGES = {"fit": ("train", "val"), "validate": ("val",), "test": ("test",), "predict": ("predict",)}


class StageData(ReadAs):
    """The part of a data module that knows its files; see `FlowDataModule` for the arguments.

    Attributes:
        files: stage -> what was given for it.
    """

    def __init__(
        self,
        files: Mapping[str, Mixture],
        *,
        token_budget: int,
        index: IndexConfig,
        protocols: frozenset[str],
        ignore_columns: frozenset[str],
        columns: Columns | None,
        num_workers: int,
        producers: Producers | None,
        **read_as: Any,
    ) -> None:
        super().__init__(**read_as)
        self.files = dict(files)
        self.token_budget = token_budget
        self.index = index
        self.protocols = protocols
        self.ignore_columns = ignore_columns
        self.columns = columns
        self.num_workers = num_workers
        self.producers = producers
        self._sources: dict[str, Source] = {}
        self._of_node = NodeSources()

    def fingerprint(self, stage: str) -> str:
        """Changes with the content of the files of a stage: ranks that plan the same steps have the same."""
        return fingerprint([self.source(name).fingerprint for name in self.wanted(stage)])

    def path(self, stage: str) -> Path:
        """The path beside which the index of a stage's first data is kept; of a source of one's own the folder."""
        if isinstance(self.files[stage].sources[0], SampleSource):
            return Path.cwd() / stage
        return open_stores(self.files[stage].sources[0])[0].path

    def record(self, stage: str, sample: int) -> Record:
        """The record that a sample of ``"train"``, ``"val"``, ``"test"`` or ``"predict"`` is."""
        return self.source(stage).record(sample)

    def wanted(self, stage: str | None) -> list[str]:
        """The data of what a Trainer does, such as ``"fit"``; of everything for None."""
        names = self.files if stage is None else _STAGES[stage]
        return [name for name in names if name in self.files]

    def source(self, name: str) -> Source:
        """The samples of a stage.

        Raises:
            DataError: it was given none, or they cannot be read.
        """
        if name not in self.files:
            raise DataError(f"FlowDataModule has no {name} data; give it: FlowDataModule({name}='{name}.jsonl', ...).")
        if name not in self._sources:
            self._sources[name] = self.open(name)
            if self.trainer is None and self.num_workers > 0 and isinstance(self._sources[name], SampleStream):
                self.share({name: self._sources[name]})
        return self._sources[name]

    def node_records(self, name: str) -> SharedRecords | None:
        """The node's reader of a stage's records; None where each rank reads them itself."""
        return self._of_node.records.get(name)

    def open(self, name: str, measurer: Measurer = this_process, *, media_compared: bool = False) -> Source:
        """The samples of all stores of a stage, opened anew; measures those that no cache knows.

        Args:
            name: of the stage.
            measurer: does that.
            media_compared: media are told apart by what they hold.
        """
        measure = Measure(
            self.tokenizer,
            self.template,
            self.images,
            self.index.unreadable,
            name == "predict",
            self.videos,
            self.protocols,
            self.ignore_columns,
            self.columns,
            self.condition_rows,
            self.audio,
        )
        opening = Opening(measure, self.token_budget, self.index, measurer, media_compared=media_compared)
        return opening.samples(name, self.files[name], num_workers=self.num_workers, producers=self.producers)

    def share(self, opened: Mapping[str, Source]) -> None:
        """Take these data, by the node's reader where several processes would read them whole."""
        self.leave_reader()
        if self.producers is None:
            self._of_node = node_sources(opened, self.trainer, self.num_workers)
            opened = self._of_node.sources
        self._sources |= opened

    def leave_reader(self) -> None:
        """End the node's reader, and forget what it gave."""
        self._of_node.close()
        for name in self._of_node.sources:
            self._sources.pop(name, None)
        self._of_node = NodeSources()

    def apart(self) -> Self:
        """A copy without its Trainer, which deals steps to one rank and reads streams from their beginning.

        What the model that is trained says it reads stays: it may name tokenizer, template and images.
        """
        alone = copy.copy(self)
        if self.read_by is not None:
            alone.read_as(self.read_by)
        alone.trainer = alone.producers = None
        alone.num_workers, alone._of_node = 0, NodeSources()
        alone._sources = {name: each for name, each in self._sources.items() if not isinstance(each, SampleStream)}
        return alone
