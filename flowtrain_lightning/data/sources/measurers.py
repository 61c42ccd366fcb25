"""Measures the records of a store: by this process, several of this machine, or a cluster. All find the same sizes."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from flowtrain_lightning.data.data_error import DataError
from flowtrain_lightning.data.media.media_status import MediaStatus
from flowtrain_lightning.data.sources.measuring import Measure, MeasuredRecords, concatenated, measure_records
from flowtrain_lightning.data.sources.record_store import RecordStore
from flowtrain_lightning.packing import IntArray

Window = tuple[int, IntArray]
"""Records that are read at once: the number of the first, and ``[records, 2]`` where they lie in their store."""

Measurer = Callable[[RecordStore, Iterable[Window], Measure], Iterator[MeasuredRecords]]
"""Measures windows of a store's records, and gives their sizes in the same order."""

_WINDOW = 512
"""Records that are read at once, at most."""

_WINDOW_BYTES = 1 << 26
"""That these may have together; a larger record is read alone."""

_WINDOWS_AHEAD = 4
"""Windows that wait for each process, at most."""


def measure_store(
    store: RecordStore, locations: IntArray, measure: Measure, measurer: Measurer, advance: Callable[[int], object]
) -> MeasuredRecords:
    """The sizes of all records of a store.

    Args:
        store: the records.
        locations: ``[records, 2]`` where they lie.
        measure: what decides the sizes.
        measurer: does the work.
        advance: called with the number of records that were measured since it was called last.

    Raises:
        DataError: a record or (unless left out) a media item cannot be used: the first such in the store's order.
    """
    found = []
    for measured in measurer(store, _windows(store, locations), measure):
        found.append(measured)
        advance(len(measured.usable))
    return MeasuredRecords(
        np.concatenate([np.empty(0, bool), *(part.usable for part in found)]),
        concatenated([part.sizes for part in found]),
        sum(part.animated for part in found),
        MediaStatus.joined([part.status for part in found]),
    )


def _windows(store: RecordStore, locations: IntArray) -> Iterator[Window]:
    ends = np.cumsum(store.lengths(locations))
    first = 0
    while first < len(locations):
        before = int(ends[first - 1]) if first else 0
        fitting = int(np.searchsorted(ends, before + _WINDOW_BYTES, side="right"))
        end = min(max(fitting, first + 1), first + _WINDOW, len(locations))
        yield first, locations[first:end]
        first = end


def this_process(store: RecordStore, windows: Iterable[Window], measure: Measure) -> Iterator[MeasuredRecords]:
    """Measures here and now; see `Measurer`."""
    with ThreadPoolExecutor() as threads:
        for first, locations in windows:
            yield measure_records(store.records(first, locations), measure, threads, store.path.parent)


def processes(count: int) -> Measurer:
    """So many processes of this machine, or this one if it is to be one."""
    return this_process if count == 1 else partial(_by_processes, count)


def _by_processes(
    count: int, store: RecordStore, windows: Iterable[Window], measure: Measure
) -> Iterator[MeasuredRecords]:
    with ProcessPoolExecutor(count, initializer=_begin_worker, initargs=(store, measure)) as pool:
        waiting: deque[Future[MeasuredRecords]] = deque()
        try:
            for window in windows:
                waiting.append(pool.submit(_measure_window, *window))
                if len(waiting) > count * _WINDOWS_AHEAD:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


class Worker(NamedTuple):
    """The input of a process that measures."""

    store: RecordStore
    measure: Measure
    threads: ThreadPoolExecutor

    def records(self, first: int, locations: IntArray) -> MeasuredRecords:
        """The sizes of a window of records."""
        records = self.store.records(first, locations)
        return measure_records(records, self.measure, self.threads, self.store.path.parent)


_workers: list[Worker] = []


def _begin_worker(store: RecordStore, measure: Measure) -> None:
    _workers.append(Worker(store, measure, ThreadPoolExecutor(2)))


def _measure_window(first: int, locations: IntArray) -> MeasuredRecords:
    (worker,) = _workers
    return worker.records(first, locations)


def ray_cluster(store: RecordStore, windows: Iterable[Window], measure: Measure) -> Iterator[MeasuredRecords]:
    """The nodes of a Ray cluster, by Ray Data: that of ``RAY_ADDRESS``, or else one that is started on this machine.

    All nodes must see files, and this folder, where this machine does. See `Measurer`.

    Raises:
        DataError: Ray is not installed.
    """
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise DataError(
            'Measuring on a Ray cluster needs Ray Data, which is not installed: pip install "flowtrain-lightning[ray]".'
        ) from error
    folder = os.getcwd()
    if not ray.is_initialized():
        found_here = os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])])  # classes of the user's
        ray.init(log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": found_here}})
    ray.data.DataContext.get_current().execution_options.preserve_order = True
    given = [{"first": first, "locations": locations} for first, locations in windows]
    if not given:
        return
    actors = ray.data.ActorPoolStrategy(min_size=1, max_size=max(1, int(ray.cluster_resources().get("CPU", 1))))
    rows = ray.data.from_items(given, override_num_blocks=len(given)).map(
        _OnCluster, fn_constructor_args=(store, measure, folder), compute=actors
    )
    for row in rows.iter_rows():
        if isinstance(found := row["found"], str):
            raise DataError(found)
        yield found


class _OnCluster:
    """A `Worker` that Ray Data starts. An error is a result, so that the first one in the store's order is told."""

    def __init__(self, store: RecordStore, measure: Measure, folder: str) -> None:
        os.chdir(folder)  # in which paths are given
        self._worker = Worker(store, measure, ThreadPoolExecutor(2))

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        try:
            return {"found": self._worker.records(row["first"], row["locations"])}
        except DataError as error:
            return {"found": str(error)}
