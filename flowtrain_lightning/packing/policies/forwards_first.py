"""The policy of a member by itself: forward while activations may be kept; and what is recomputed for that."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence

from flowtrain_lightning.packing.step_graph import BlockedError, Pass
from flowtrain_lightning.packing.step_plan import StepPlan


def forwards_first(batches: Sequence[int], in_flight: int, recomputed: Collection[int]) -> Iterable[Pass]:
    """Forward while activations may be kept, else the oldest backward. With one in flight, batch by batch.

    Args:
        batches: numbers of a member's batches, in order.
        in_flight: batches whose activations may be kept at a time.
        recomputed: batches of which nothing is kept; with those that `recomputed_batches` names, nothing can block.

    Raises:
        BlockedError: not one batch may be kept.
    """
    forwards, backwards = deque(batches), deque[int]()
    held = 0
    while forwards or backwards:
        if forwards and (forwards[0] in recomputed or held < in_flight):
            number = forwards.popleft()
            backwards.append(number)
            held += number not in recomputed
            yield "forward", number
        elif not backwards:
            raise BlockedError
        else:
            number = backwards.popleft()
            held -= number not in recomputed
            yield "backward", number


def recomputed_batches(plan: StepPlan, kept_batches: int, readers_meet: int = 1) -> tuple[frozenset[int], ...]:
    """The batches that an encoder which trains has to recompute, so that no lane ever blocks.

    With few kept activations the order of a step could block: an encoder batch waits for the gradients of a microbatch
    that waits for features of a later batch, which may not run yet: it reads them itself, or ranks that gather weights
    with its own do. So all lanes go as far as they can, and wherever
    none can go on, the next waiting batch is marked as recomputed: of several lanes' the one with the lowest number,
    then that of the lowest rank. How far they can go does not depend on durations, so the plan alone decides.

    Args:
        plan: the step's plan.
        kept_batches: encoder batches per rank whose activations may be kept at a time, from 0.
        readers_meet: neighbouring members of the role that reads which begin each microbatch together.

    Returns:
        for each encoder rank the numbers of its recomputed batches.
    """
    lanes = _Lanes(plan, kept_batches, readers_meet)
    while not lanes.are_done:
        if not lanes.go_on():
            number, rank = min(
                (done, rank) for rank, done in enumerate(lanes.forwards) if done < len(lanes.readers[rank])
            )
            lanes.recomputed[rank].add(number)
    return tuple(map(frozenset, lanes.recomputed))


class _Lanes:
    """The progress of a step's lanes, each on a rank of its own.

    Attributes:
        readers: ``[encoder rank][batch]`` the microbatches that read it.
        forwards: of each encoder rank, how many are done.
        recomputed: of each encoder rank, the batches of which nothing is kept.
    """

    def __init__(self, plan: StepPlan, kept_batches: int, readers_meet: int) -> None:
        self._kept_batches = kept_batches
        self._readers_meet = readers_meet
        found: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for entry in plan.entries:
            found.setdefault((entry.encoder_rank, entry.encoder_batch), []).extend(entry.readers)
        self.readers = [
            [found[rank, number] for number, media in enumerate(batches) if len(media)]
            for rank, batches in enumerate(plan.encoder_batches)
        ]
        self._lacks = [[0] * len(positions) for positions in plan.microbatches]  # batches yet to be encoded
        for readers in self.readers:
            for rank, position in (reader for of_batch in readers for reader in of_batch):
                self._lacks[rank][position] += 1
        self.forwards = [0] * len(self.readers)
        self._backwards = [0] * len(self.readers)
        self._kept = [0] * len(self.readers)
        self._done = [0] * len(self._lacks)
        self.recomputed: list[set[int]] = [set() for _ in self.readers]

    @property
    def are_done(self) -> bool:
        """All forwards and backwards, and so all microbatches that read something."""
        return all(done == len(of_rank) for done, of_rank in zip(self._backwards, self.readers, strict=True))

    def go_on(self) -> bool:
        """Lets every lane do what it can; says whether one could."""
        moved = False
        for rank in range(len(self.readers)):
            while self._encode(rank) or self._give_back(rank):
                moved = True
        for first in range(0, len(self._lacks), self._readers_meet):
            group = range(first, min(first + self._readers_meet, len(self._lacks)))
            while self._can_read(group):
                for rank in group:
                    self._done[rank] += 1
                moved = True
        return moved

    def _can_read(self, group: range) -> bool:
        """Whether ranks that begin microbatches together have all that the next ones read."""
        position = self._done[group.start]
        return position < len(self._lacks[group.start]) and not any(self._lacks[rank][position] for rank in group)

    def _encode(self, rank: int) -> bool:
        number = self.forwards[rank]
        keeps = number not in self.recomputed[rank]
        if number == len(self.readers[rank]) or (keeps and self._kept[rank] >= self._kept_batches):
            return False
        self.forwards[rank] += 1
        self._kept[rank] += keeps
        for reader, position in self.readers[rank][number]:
            self._lacks[reader][position] -= 1
        return True

    def _give_back(self, rank: int) -> bool:
        number = self._backwards[rank]
        if number == self.forwards[rank]:
            return False
        if any(self._done[reader] <= position for reader, position in self.readers[rank][number]):
            return False
        self._backwards[rank] += 1
        self._kept[rank] -= number not in self.recomputed[rank]
        return True
