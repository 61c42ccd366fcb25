"""Media items that several samples of a step have: which one is encoded for all of them."""

from __future__ import annotations

import numpy as np

from flowtrain_lightning.packing.step_plan import Batches, FloatArray, IntArray, StepPlan

_MOST_READERS = 256
"""Members of the trunk that may read one media item: so many can give gradients of one entry back."""


def costs_once(alike: IntArray | None, costs: FloatArray) -> FloatArray:
    """``[media items]`` what each costs, where of those alike one is encoded.

    Args:
        alike: ``[media items]`` equal numbers for equal media items; None where no two are.
        costs: ``[media items]`` what encoding each costs.
    """
    if alike is None:
        return costs
    once = np.zeros_like(costs)
    first = np.unique(alike, return_index=True)[1]
    once[first] = costs[first]
    return once


def encoded_parts(content: IntArray | None, count: int, samples: int, step: int, *, together: bool) -> FloatArray:
    """``[media items]`` the part of each that is encoded, on average: those of a step that are equal share one.

    Args:
        content: ``[media items]`` equal numbers for equal media items, -1 where it is not known; None: no two are.
        count: of media items.
        samples: that have them.
        step: samples of a step.
        together: samples that share a media item come in one step, as far as it has room; else they come by chance.
    """
    if content is None:
        return np.ones(count)
    content = np.where(content < 0, -1 - np.arange(count), content)
    numbers, uses = np.unique(content, return_inverse=True, return_counts=True)[1:]
    share, each = step / samples, uses[numbers.reshape(-1)].astype(np.float64)
    if share >= 1:  # every step has all of them, however often
        return np.asarray(1 / (each * share))
    if together:
        return np.asarray(np.ceil(each / step) / each)
    return np.asarray((1 - (1 - share) ** each) / (each * share))


def encoded_as(alike: IntArray | None, member: IntArray, position: IntArray, *, local: bool) -> IntArray | None:
    """``[media items]`` the media item that is encoded in the place of each: of those alike, that which is read first.

    Args:
        alike: ``[media items]`` equal numbers for equal media items; None where no two are.
        member: ``[media items]`` the member of the trunk that reads each.
        position: ``[media items]`` the position of the microbatch that reads each.
        local: every rank encodes what it reads.

    Returns:
        None where every media item is encoded.
    """
    if alike is None:
        return None
    group = member if local else member // _MOST_READERS
    order = np.lexsort((member, position, group, alike))
    begins = np.ones(len(order), dtype=bool)
    begins[1:] = (np.diff(alike[order]) != 0) | (np.diff(group[order]) != 0)
    found = np.empty_like(order)
    found[order] = order[np.maximum.accumulate(np.where(begins, np.arange(len(order)), 0))]
    return found.astype(np.int64)


def side_by_side(batches: Batches, plan: StepPlan) -> Batches:
    """The same batches, in which media items with the same readers lie side by side, as they make one entry.

    Args:
        batches: of a role that encodes.
        plan: says who reads them; what it has of this role does not count.
    """
    if plan.encoded_as is None:
        return batches
    members, readers = plan.readers[0], plan.media_readers
    return tuple(
        tuple(
            np.array(sorted(batch.tolist(), key=lambda item: (members[item], readers[item])), np.int64)
            for batch in each
        )
        for each in batches
    )
