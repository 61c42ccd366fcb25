"""Media items to encoder batches, alike in cost on all encoder ranks, in the order in which the backbone wants them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from flowtrain_lightning.packing.compiled import compiled
from flowtrain_lightning.packing.load_balancing import two_way_partition
from flowtrain_lightning.packing.step_plan import Batches, BoolArray, FloatArray, IntArray, SampleSizes

ENCODER_BUDGET = 16384
"""The most patches of an encoder batch where nothing else is said: what plans count on, too."""

_SWAPS = 32
"""Moves, swaps and partitions per encoder rank, at most."""
_TOLERANCE = 1e-4
"""The costliest encoder rank may stay above the mean by this share of it."""


def pack_encoder_batches(
    costs: FloatArray,
    reader: IntArray,
    position: IntArray,
    media: IntArray | None = None,
    *,
    members: int,
    colocated: Sequence[tuple[int, int]] = (),
    busy: FloatArray | None = None,
    in_fixed_order: bool = False,
    nodes: Sequence[int] = (),
    reader_nodes: Sequence[int] = (),
) -> Batches:
    """Deal the media items of one position after another to a role's members, balanced over the whole step.

    Where there are several nodes, a media item is encoded on the node of its reader as long as members stay even.

    A batch holds media items of one position only, so the position of the reading microbatches never falls for a
    member, and inside a batch the media items of one reader are adjacent. Ties are broken by index.

    Args:
        costs: ``[media items]`` what encoding each costs, in any unit.
        reader: ``[media items]`` the member of the trunk that reads each.
        position: ``[media items]`` the position of the microbatch that reads each.
        media: the numbers of those that are encoded; None: all.
        members: how many there are.
        colocated: the member and the reader of each process that has both: there the reader's media items are encoded
            unless balance moves them; where several processes share a reader's sequences, on that with the least to do.
        busy: ``[members]`` what each has to do beside encoding, in the unit of ``costs``: it is balanced together with
            what is encoded, and where some only encode, media items go there first. None is nothing.
        in_fixed_order: ranks with both roles encode all they can before their first microbatch and after their last one
            (see `taking_turns`), so that members that only encode should be as far: media items go there evenly over
            the step.
        nodes: the node of each member; ``()`` where there is one.
        reader_nodes: the node of each reader; ``()`` where there is one.

    Returns:
        ``[member][number]`` -> media item numbers. No batch is empty, so members may differ in their number; and none
        is cut yet, see `within_budget`.
    """
    media = np.arange(len(costs), dtype=np.int64) if media is None else media
    costs, reader, position = costs[media], reader[media], position[media]
    order = np.lexsort((-costs, position))
    reads = np.full(members, -1)
    for member, own in colocated:
        reads[member] = own
    takes = np.full(members, busy is not None)
    takes[[member for member, _ in colocated]] = False
    node = np.array(nodes or [0] * members, dtype=np.int64)
    reader_node = np.array(reader_nodes, dtype=np.int64)[reader] if reader_nodes else np.zeros_like(position)
    busy = np.zeros(members) if busy is None else busy
    counted = _busy_by_position(costs, position, busy, takes)[position] if in_fixed_order else np.ones(len(costs))
    member_of = _deal(costs, order, reader, reads, busy, counted, takes, node, reader_node)
    by_batch = np.lexsort((reader, position, member_of))
    changes = (np.diff(member_of[by_batch]) != 0) | (np.diff(position[by_batch]) != 0)
    batches: list[list[IntArray]] = [[] for _ in range(members)]
    for batch in np.split(by_batch, np.flatnonzero(changes) + 1):
        if len(batch):
            batches[int(member_of[batch[0]])].append(media[batch])
    return tuple(map(tuple, batches))


def local_encoder_batches(
    reader: IntArray, position: IntArray, media: IntArray | None = None, *, ranks: int, positions: int
) -> Batches:
    """Encode where it is read: batch ``i`` of rank ``r`` holds the media items of microbatch ``i`` of rank ``r``.

    Args:
        reader: ``[media items]`` the rank that reads each.
        position: ``[media items]`` the position of the microbatch that reads each.
        media: the numbers of those that are encoded; None: all.
        ranks: ranks, each of which encodes and reads.
        positions: microbatches of each rank.

    Returns:
        ``[rank][position]`` -> media item numbers; some batches may be empty.
    """
    media = np.arange(len(position), dtype=np.int64) if media is None else media
    rank_of, position_of = reader[media], position[media]
    return tuple(
        tuple(media[(rank_of == rank) & (position_of == number)] for number in range(positions))
        for rank in range(ranks)
    )


def divided_by_modality(batches: Batches, sizes: SampleSizes) -> Batches:
    """In the place of every batch one for each modality of the step, by name; some may be empty."""
    if sizes.media_modality is None:
        return batches
    return tuple(
        tuple(
            np.array([item for item in batch if sizes.modality_of(item) == modality], dtype=np.int64)
            for batch in of_rank
            for modality in sizes.modalities
        )
        for of_rank in batches
    )


def within_budget(batches: Batches, patches: IntArray, budget: int) -> Batches:
    """The same batches, those of more patches than the budget cut into several, in their order.

    Args:
        batches: of a role that encodes.
        patches: ``[media items]`` patches of each.
        budget: the most patches of a batch. A media item that has more by itself is a batch by itself.
    """
    return tuple(tuple(part for batch in of_rank for part in _cut(batch, patches, budget)) for of_rank in batches)


def _cut(batch: IntArray, patches: IntArray, budget: int) -> list[IntArray]:
    ends = np.cumsum(patches[batch])
    if not len(batch) or ends[-1] <= budget:
        return [batch]
    cuts, before = [0], 0
    while cuts[-1] < len(batch):
        end = max(int(np.searchsorted(ends, before + budget, side="right")), cuts[-1] + 1)
        cuts.append(end)
        before = int(ends[end - 1])
    return [batch[start:end] for start, end in itertools.pairwise(cuts)]


def _busy_by_position(costs: FloatArray, position: IntArray, busy: FloatArray, alone: BoolArray) -> FloatArray:
    """The weight of ranks' other work when the media items of a position are dealt, from 0 to 1.

    So much that ranks that only encode have as large a part of the media of every position, but for two: features of
    the first one are waited for, and gradients of the last one come when everything else is done. Of these they encode
    hardly more than ranks with both roles encode in all, as far as the latter then have no more to do than others.

    Args:
        costs: ``[media items]`` encoder cost.
        position: ``[media items]`` of the microbatch that reads each.
        busy: ``[ranks]`` what each encoder rank has to do beside encoding.
        alone: ``[ranks]`` which of them only encode.

    Returns:
        ``[positions]`` the part, 1 where ranks that only encode should take what they can at once.
    """
    media = np.bincount(position, weights=costs)
    both, only = int((~alone).sum()), int(alone.sum())
    level = float(costs.sum() + busy.sum()) / len(busy)  # what every rank has to do
    beside = float(busy[~alone].mean()) if only else 0.0
    own = level - beside  # what a rank with both roles encodes
    if own <= 0.0 or beside <= 0.0 or len(media) < 3:
        return np.ones(len(media))
    own_last = min(max((media[-1] - only * own / 2) / both, 0.0), own)
    encoded = level * media / media.sum()  # by a rank that only encodes
    encoded[-1] = min(encoded[-1], (media[-1] - both * own_last) / only)
    encoded[0] = min(encoded[0], max(own, (media[0] - both * (own - own_last)) / only))
    encoded[1:-1] *= (level - encoded[0] - encoded[-1]) / max(encoded[1:-1].sum(), 1e-12)
    return np.clip(np.cumsum(encoded - (media - only * encoded) / both) / beside, 0.0, 1.0)


@compiled
def _deal(
    costs: FloatArray,
    order: IntArray,
    reader: IntArray,
    reads: IntArray,
    busy: FloatArray,
    counted: FloatArray,
    takes: BoolArray,
    node: IntArray,
    reader_node: IntArray,
) -> IntArray:
    """Each media item, in ``order``, to the rank with the least cost so far; then the ranks are rebalanced.

    On its reader's node a rank is taken even if it has more to do than one elsewhere, at most by what the costliest
    media item costs.

    Args:
        costs: ``[media items]`` encoder cost.
        order: ``[media items]`` by the position that reads, and by falling cost inside a position: so the media items
            that a position waits for are alike on all ranks too.
        reader: ``[media items]`` the backbone rank that reads each.
        reads: ``[ranks]`` the backbone rank whose sequences each encoder rank reads itself, or -1: its media items stay
            on such ranks unless balance moves them.
        busy: ``[ranks]`` what each encoder rank has to do beside encoding.
        counted: ``[media items]`` the part of it that counts when each is dealt.
        takes: ``[ranks]`` whether a rank takes media items from ranks that read them where it has less to do.
        node: ``[ranks]`` of each encoder rank.
        reader_node: ``[media items]`` of the rank that reads each.

    Returns:
        ``[media items]`` the encoder rank of each.
    """
    ranks = len(busy)
    rank_of = np.full(len(costs), -1)
    encoded = np.zeros(ranks)
    most = costs.max() if len(costs) else 0.0
    for item in order:
        load = encoded + counted[item] * busy
        best = -1
        for rank in range(ranks):
            if reads[rank] == reader[item] and (best < 0 or load[rank] < load[best]):
                best = rank
        at_home, near = best >= 0, best
        for rank in range(ranks):
            may = takes[rank] or not at_home
            if best < 0 or (may and load[rank] < load[best]):
                best = rank
            if node[rank] == reader_node[item] and (near < 0 or (may and load[rank] < load[near])):
                near = rank
        if near >= 0 and load[near] <= load[best] + most:
            best = near
        rank_of[item] = best
        encoded[best] += costs[item]
    _rebalance(rank_of, costs, order, encoded + busy, busy)
    return rank_of


@compiled
def _rebalance(rank_of: IntArray, costs: FloatArray, order: IntArray, load: FloatArray, busy: FloatArray) -> None:
    """Moves media items from the rank with the most to do to that with the least, until that gains nothing more.

    Args:
        rank_of: ``[media items]`` the encoder rank of each; changed in place.
        costs: ``[media items]`` encoder cost.
        order: ``[media items]`` in which they were dealt.
        load: ``[ranks]`` what each has to do; changed in place.
        busy: ``[ranks]`` what of it is not encoding.
    """
    ranks = len(load)
    for _ in range(_SWAPS * ranks):
        top, low, total = -1, 0, 0.0
        for rank in range(ranks):
            total += load[rank]
            if load[rank] > busy[rank] and (top < 0 or load[rank] > load[top]):
                top = rank
            if load[rank] < load[low]:
                low = rank
        if top < 0 or load[top] * ranks <= total * (1.0 + _TOLERANCE):
            break
        gap = load[top] - load[low]
        moved = _swap(rank_of, costs, order, top, low, gap)
        if moved <= 0.0:
            moved = _partition(rank_of, costs, top, low, gap)
        if moved <= 0.0:
            break
        load[top] -= moved
        load[low] += moved


@compiled
def _swap(rank_of: IntArray, costs: FloatArray, order: IntArray, top: int, low: int, gap: float) -> float:
    """Move one media item, or swap two neighbours in order, so that ``gap`` shrinks most; the cost moved."""
    best_gain, best_give, best_take = 1e-6 * gap, -1, -1
    last = -1
    for item in order:
        if rank_of[item] == low:
            last = item
        elif rank_of[item] == top:
            for take in (-1, last):
                moved = costs[item] - (costs[take] if take >= 0 else 0.0)
                gain = min(moved, gap - moved)
                if gain > best_gain:
                    best_gain, best_give, best_take = gain, item, take
    if best_give < 0:
        return 0.0
    rank_of[best_give] = low
    if best_take < 0:
        return float(costs[best_give])
    rank_of[best_take] = top
    return float(costs[best_give] - costs[best_take])


@compiled
def _partition(rank_of: IntArray, costs: FloatArray, top: int, low: int, gap: float) -> float:
    """Partition the cheapest media items of two ranks anew so that ``gap`` shrinks most; the cost moved."""
    falling = np.argsort(-costs, kind="mergesort")
    sorted_costs, sorted_ranks = costs[falling], rank_of[falling]
    ours, theirs = np.flatnonzero(sorted_ranks == top), np.flatnonzero(sorted_ranks == low)
    no_tokens = np.zeros(len(costs), dtype=np.int64)
    moved = 0.0
    for index in two_way_partition(ours, theirs, no_tokens, sorted_costs, no_tokens[:2], 0, gap):
        item = falling[index]
        moved += costs[item] if rank_of[item] == top else -costs[item]
        rank_of[item] = low if rank_of[item] == top else top
    return moved
