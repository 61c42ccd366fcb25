"""Media items that several samples of a step have: which one is encoded for all of them."""

from __future__ import annotations

import math

import numpy as np

from flowtrain_lightning.packing.step_plan import Batches, BoolArray, FloatArray, IntArray, StepPlan

_MOST_READERS = 256
"""Members of the trunk that may read one media item: so many can give gradients of one entry back."""

_LEAST_SAVED = 1 / 8
"""Share of a step's patches that microbatches of different positions must spare each other. Each position may get one
more encoder batch by it: on a GPU that is a tower's launches, whatever it holds."""


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
    if together:
        return np.asarray(1 / (each * share) if share >= 1 else np.ceil(each / step) / each)
    parts = 1 / (each * share) if share >= 1 else (1 - (1 - share) ** each) / (each * share)
    return np.asarray(parts if 1 - parts.mean() >= _LEAST_SAVED else np.ones(count))


def encoded_as(
    alike: IntArray | None,
    member: IntArray,
    position: IntArray,
    patches: IntArray,
    *,
    local: bool,
    most_kept: float = math.inf,
) -> IntArray | None:
    """``[media items]`` the media item that is encoded in the place of each: of those alike, one that is read earlier.

    What microbatches of different positions read keeps its activations from the first to the last of them. It is shared
    as long as it fits ``most_kept``, short times first; and only where a step saves enough by it to pay for the encoder
    batches that it adds. The others are encoded anew.

    Args:
        alike: ``[media items]`` equal numbers for equal media items; None where no two are.
        member: ``[media items]`` the member of the trunk that reads each.
        position: ``[media items]`` the position of the microbatch that reads each.
        patches: ``[media items]`` of each.
        local: every rank encodes what it reads.
        most_kept: patches that may be kept at a time for microbatches of later positions: of a member of the trunk
            where it encodes what it reads, else of all encoders.

    Returns:
        None where every media item is encoded.
    """
    if alike is None:
        return None
    group = member if local else member // _MOST_READERS
    order = np.lexsort((member, position, group, alike))
    begins = np.ones(len(order), dtype=bool)
    begins[1:] = (np.diff(alike[order]) != 0) | (np.diff(group[order]) != 0)
    later = np.zeros(len(order), dtype=bool)  # read by a later microbatch than the one before it
    later[1:] = ~begins[1:] & (np.diff(position[order]) != 0)
    shared = _fitting(np.flatnonzero(later), order, member if local else group, position, patches, most_kept)
    encoded = patches[order[begins | later]].sum()
    if patches[order[shared]].sum() < _LEAST_SAVED * encoded:
        shared = shared[:0]
    begins |= later
    begins[shared] = False
    found = np.empty_like(order)
    found[order] = order[np.maximum.accumulate(np.where(begins, np.arange(len(order)), 0))]
    return found.astype(np.int64)


def _fitting(
    later: IntArray, order: IntArray, keeper: IntArray, position: IntArray, patches: IntArray, most_kept: float
) -> IntArray:
    """Those of some places in ``order`` whose media item fits until then, if it is kept since the place before them."""
    first, last = position[order[later - 1]], position[order[later]]
    if not math.isfinite(most_kept) or not len(later):
        return later
    kept = np.zeros((int(keeper.max()) + 1, int(position.max()) + 1))
    fitting = []
    for number in np.argsort(last - first, kind="stable").tolist():
        item = order[later[number]]
        meanwhile = kept[keeper[item], first[number] : last[number]]
        if meanwhile.max() + patches[item] <= most_kept:
            meanwhile += patches[item]
            fitting.append(later[number])
    return np.array(fitting, dtype=np.int64)


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


def divided_by_readers(batches: Batches, plan: StepPlan) -> Batches:
    """The same batches, without what later microbatches read: that makes batches of its own, which are kept for them.

    Args:
        batches: of a role that encodes, none of them cut.
        plan: says who reads them; what it has of this role does not count.
    """
    if plan.encoded_as is None:
        return batches
    last = np.array([readers[-1].number if readers else -1 for readers in plan.media_readers], np.int64)
    is_kept = last > plan.readers[1]
    return tuple(tuple(part for batch in each for part in _divided(batch, is_kept)) for each in batches)


def _divided(batch: IntArray, is_kept: BoolArray) -> list[IntArray]:
    kept = is_kept[batch]
    return [batch[~kept], batch[kept]] if kept.any() and not kept.all() else [batch]
