"""Whether kept features are read faster than they would be encoded, said once in a run."""

from __future__ import annotations

import logging
import time
from typing import Any

import torch

from flowtrain_lightning.data.features.kept_rows import KeptRows

_log = logging.getLogger("lightning.pytorch")  # whose messages of ranks other than 0 are shown, too

_SHARE = 2
"""It is said when one in so many of the media items that were encoded has been read: half an epoch later."""


class KeptWorth:
    """Compares what reading a media item's features takes with what encoding it took on this rank."""

    def __init__(self) -> None:
        self._underway: list[tuple[int, Any, Any]] = []
        self._encoded = self._read = self._nbytes = 0
        self._encoding = self._reading = 0.0
        self._told = False

    @staticmethod
    def now(device: torch.device) -> Any:
        """A mark in the work of a device: an event of a GPU, for which nobody waits, else the time."""
        if device.type != "cuda":
            return time.monotonic()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def encoded(self, items: int, begin: Any, end: Any) -> None:
        """Counts media items that were encoded between two marks."""
        self._underway.append((items, begin, end))

    def read(self, kept: KeptRows) -> None:
        """Counts what was read of an encoder batch."""
        self._read += len(kept.items) - len(kept.missing)
        self._nbytes += kept.nbytes
        self._reading += kept.seconds

    def tell(self, role: str) -> None:
        """Says what was found, once enough is known and what was counted is done.

        Args:
            role: whose features are kept.
        """
        for items, begin, end in self._underway:
            self._encoded += items
            self._encoding += end - begin if isinstance(begin, float) else begin.elapsed_time(end) / 1e3
        self._underway.clear()
        if self._told or not self._encoded or self._read * _SHARE < self._encoded:
            return
        self._told = True
        reading, encoding = self._reading / self._read, self._encoding / self._encoded
        speed = self._nbytes / max(self._reading, 1e-9) / 1e6
        found = (
            f"flowtrain: the features of a media item are read in {reading * 1e3:.3g} ms ({speed:,.0f} MB/s); the "
            f"{role} took {encoding * 1e3:.3g} ms to make them"
        )
        if reading < encoding:
            _log.info(f"{found}, so keeping them pays.")
        else:
            _log.warning(f"{found}, so keeping them does not pay: name a faster disk, or leave keep_features out.")
