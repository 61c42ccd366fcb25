"""The records of steps, each read once for all processes of a node that need it."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

from flowtrain_lightning.data.node.reader_link import ReaderLink
from flowtrain_lightning.data.records.formats import Record
from flowtrain_lightning.data.sources.sample_source import SampleSource
from flowtrain_lightning.data.sources.slow_reading import named_if_slow

KEPT_BYTES = 1 << 30
"""Of images and videos in records that wait for whoever needs them, at most. Those of older steps are then let go of,
and read anew where they are asked for."""

_AT_ONCE = 8
"""Records that are read at the same time from stores that answer after a while."""

_MOST_STEPS = 1024
"""Steps of which it is known that they were read."""

StepName = tuple[int, int]
"""Epoch and number of a step."""


@dataclass
class _Step:
    """The records of a step that somebody still needs, and how many do."""

    left: dict[int, int]
    records: dict[int, Record] = field(default_factory=dict)
    was_read: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, sample: int) -> None:
        """One of those who need the record has it."""
        self.left[sample] = self.left.get(sample, 0) - 1
        if self.left[sample] <= 0:
            self.records.pop(sample, None)

    @property
    def size(self) -> int:
        return sum(record.bytes_inside for record in list(self.records.values()))


class PlacedSamples(SampleSource, Protocol):
    """Samples whose places have names."""

    def where(self, sample: int) -> str:
        """The place of a sample, for messages."""
        ...


class StepRecords:
    """Reads the records of a step that a node needs when one of its processes asks for the first of them.

    Args:
        source: the samples.
        together: several records may be read at the same time.
    """

    def __init__(self, source: PlacedSamples, *, together: bool) -> None:
        self._source = source
        self._steps: OrderedDict[StepName, _Step] = OrderedDict()
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(_AT_ONCE if together else 1)

    def answer(self, _: int, method: str, args: tuple[Any, ...]) -> Any:
        """A request: records of a step, or a single one."""
        return self._of_step(*args) if method == "records" else self._source.record(*args)

    def leave(self, reader: int) -> None:
        """A process has ended. What was read for it is let go of when there is much."""

    def _of_step(self, name: StepName, of_node: Mapping[int, int], own: Sequence[int]) -> list[Record]:
        with self._lock:
            step = self._steps.setdefault(name, _Step(dict(of_node)))
        with step.lock:
            if not step.was_read:
                step.records, step.was_read = self._read(list(step.left)), True
            kept = dict(step.records)  # which others may let go of while this one reads
            found = kept | self._read([sample for sample in own if sample not in kept])
            for sample in own:
                step.take(sample)
        self._let_go(name, step)
        return [found[sample] for sample in own]

    def _read(self, samples: Sequence[int]) -> dict[int, Record]:
        """The records of these samples; those that do not come are named."""
        left = dict.fromkeys(samples)

        def read(sample: int) -> Record:
            record = self._source.record(sample)
            left.pop(sample)
            return record

        with named_if_slow(lambda: f"{self._source.where([*left, *samples][0])} has not been read"):
            return dict(zip(samples, self._threads.map(read, samples), strict=True))

    def _let_go(self, name: StepName, step: _Step) -> None:
        with self._lock:
            if not step.records:
                self._steps.pop(name, None)
            sizes = [(each, each.size) for each in self._steps.values()]
            too_many = sum(size for _, size in sizes) - KEPT_BYTES
            for each, size in sizes:
                if too_many > 0:
                    each.records.clear()
                    too_many -= size
            while len(self._steps) > _MOST_STEPS:
                self._steps.popitem(last=False)


class SharedRecords:
    """The records of steps, by way of the node's reader.

    Args:
        link: to the reader.
        stage: whose data are meant.
    """

    def __init__(self, link: ReaderLink, stage: str) -> None:
        self._link = link
        self._stage = stage

    def of_step(self, name: StepName, of_node: Mapping[int, int], own: Sequence[int]) -> list[Record]:
        """Records that this process needs, in that order.

        Args:
            name: the step.
            of_node: sample -> how many processes of this node need its record, in the order in which they are read.
            own: the samples that this process needs.

        Raises:
            DataError: one of the node's records cannot be read.
        """
        found: list[Record] = self._link.ask(self._stage, "records", name, dict(of_node), list(own))
        return found

    def record(self, sample: int) -> Record:
        """A single record beside those of steps."""
        found: Record = self._link.ask(self._stage, "record", sample)
        return found
