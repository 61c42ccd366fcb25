"""Samples of one picture side by side, so that they come in one step, which encodes it once."""

from __future__ import annotations

from collections import deque
from itertools import islice, pairwise

import numpy as np

from flowtrain_lightning.packing.step_plan import IntArray, PackingError, SampleSizes

_LOOKED_AT = 64
"""Groups that wait, among which one is looked for that fits into what is left of a step."""


class MediaGroups:
    """Groups samples that have a picture, or another media item, in common.

    Args:
        of_sample: ``[samples]`` equal numbers for those of one group.
    """

    def __init__(self, of_sample: IntArray) -> None:
        self.of_sample = of_sample

    @classmethod
    def of_sizes(cls, sizes: SampleSizes) -> MediaGroups:
        """Those of some samples; one of several pictures belongs to that which occurs most often.

        Raises:
            PackingError: it is not known of any two samples that they have one in common.
        """
        alike = sizes.alike
        if alike is None:
            raise PackingError(
                "group_by='media' was given, but of no two samples it is known that they have a picture in common. "
                "Pictures are told apart by their paths, or by their bytes where they stand in the data; leave "
                "group_by out where each sample has its own."
            )
        # The last one that is written holds: of each sample the media item that occurs most often, the first of these.
        by_use = np.lexsort((-np.arange(len(alike)), np.bincount(alike)[alike]))
        groups = np.arange(len(sizes), dtype=np.int64)
        groups[sizes.media_sample[by_use]] = len(sizes) + alike[by_use]
        return cls(groups)

    @property
    def summary(self) -> str:
        """The sentence of the log about the order of samples."""
        counts = np.unique(self.of_sample, return_counts=True)[1]
        together = counts[counts > 1]
        return (
            f"group_by='media': {together.sum():,} of {len(self.of_sample):,} samples have a picture in common with "
            f"others, {len(together):,} pictures in all. They come side by side, so an epoch shuffles {len(counts):,} "
            "groups and no single samples, and samples of one step are less unlike"
        )

    def ordered(self, samples: IntArray, step: int) -> IntArray:
        """The same samples, those of a group side by side and, as far as steps have room, in one step.

        Groups come in the order of their first samples. Where the next one does not fit into what is left of a step,
        one of those behind it goes first, and where none fits it is cut.

        Args:
            samples: ``[n]`` an epoch's samples, in order.
            step: samples of a step; 1 where steps are cut otherwise.
        """
        groups = self.of_sample[samples]
        _, first, number = np.unique(groups, return_index=True, return_inverse=True)
        place = first[number.reshape(-1)]
        by_group = np.argsort(place, kind="stable")
        arranged: IntArray = samples[by_group]
        if step == 1:
            return arranged
        bounds = [0, *(np.flatnonzero(np.diff(place[by_group])) + 1).tolist(), len(samples)]
        runs = deque((start, end) for start, end in pairwise(bounds) if end > start)
        taken: list[IntArray] = []
        room = step
        while runs:
            start, end = _next_run(runs, room, step)
            taken.append(arranged[start:end])
            room = (room - (end - start)) or step
        return np.concatenate([samples[:0], *taken])


def _next_run(runs: deque[tuple[int, int]], room: int, step: int) -> tuple[int, int]:
    """Takes the next group, or a part of it, out of those that wait."""
    start, end = runs[0]
    cuts = room == step and end - start > step  # one that no step has room for begins with a step
    for number, (first, last) in enumerate(() if cuts else islice(runs, _LOOKED_AT)):
        if last - first <= room:
            del runs[number]
            return first, last
    runs[0] = start + room, end
    return start, start + room
