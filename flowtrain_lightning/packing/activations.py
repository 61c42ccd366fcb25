"""Which encoder batches keep their activations until their backward, and which compute their forward twice."""

from __future__ import annotations

from flowtrain_lightning.packing import StepPlan


def recomputed_batches(plan: StepPlan, limit: int) -> tuple[frozenset[int], ...]:
    """The encoder batches whose activations are not kept, for each encoder rank.

    An encoder rank keeps the activations of at most ``limit`` batches and runs backwards in the order of forwards.
    With a small limit that order could block: a batch waits for gradients of a microbatch which waits for features of
    a batch that may not run yet. Where this would happen, whatever the timing, the later batch runs without keeping
    anything and is computed again for its backward. So the limit holds and nothing blocks; the plan alone decides.

    Args:
        plan: the step's plan.
        limit: encoder batches per rank whose activations may be kept at a time, from 0.
    """
    walk = _Walk(plan, limit)
    while not walk.finished:
        if not walk.advance():
            walk.force()
    return tuple(frozenset(batches) for batches in walk.recomputed)


class _Walk:
    """The fixed order of a step, played with counters: what has run on each rank so far."""

    def __init__(self, plan: StepPlan, limit: int) -> None:
        self._limit = limit
        self._batches = [[n for n, media in enumerate(rank) if len(media)] for rank in plan.encoder_batches]
        self._needs: dict[tuple[int, int], set[tuple[int, int]]] = {}
        self._readers: dict[tuple[int, int], set[tuple[int, int]]] = {}
        for entry in plan.entries:
            source, reader = (entry.encoder_rank, entry.encoder_batch), (entry.backbone_rank, entry.microbatch)
            self._needs.setdefault(reader, set()).add(source)
            self._readers.setdefault(source, set()).add(reader)
        self._microbatches = [len(rank) for rank in plan.microbatches]
        self._read = [0] * len(self._microbatches)
        self._forward = [0] * len(self._batches)
        self._backward = [0] * len(self._batches)
        self._kept = [0] * len(self._batches)
        self.recomputed: list[set[int]] = [set() for _ in self._batches]

    @property
    def finished(self) -> bool:
        return all(done == len(batches) for done, batches in zip(self._backward, self._batches, strict=True))

    def advance(self) -> bool:
        """Runs whatever the limit allows; False when nothing could."""
        moved = False
        for rank in range(len(self._read)):
            while self._read[rank] < self._microbatches[rank] and self._has_features(rank):
                self._read[rank] += 1
                moved = True
        for rank, batches in enumerate(self._batches):
            while self._backward[rank] < self._forward[rank] and self._has_gradients(rank):
                number = batches[self._backward[rank]]
                self._kept[rank] -= number not in self.recomputed[rank]
                self._backward[rank] += 1
                moved = True
            while self._forward[rank] < len(batches) and self._kept[rank] < self._limit:
                self._kept[rank] += 1
                self._forward[rank] += 1
                moved = True
        return moved

    def force(self) -> None:
        """Lets the next waiting batch run without keeping its activations."""
        waiting = [
            (batches[self._forward[rank]], rank)
            for rank, batches in enumerate(self._batches)
            if self._forward[rank] < len(batches)
        ]
        number, rank = min(waiting)
        self.recomputed[rank].add(number)
        self._forward[rank] += 1

    def _has_features(self, rank: int) -> bool:
        needed = self._needs.get((rank, self._read[rank]), ())
        return all(number in self._batches[e][: self._forward[e]] for e, number in needed)

    def _has_gradients(self, rank: int) -> bool:
        readers = self._readers[rank, self._batches[rank][self._backward[rank]]]
        return all(microbatch < self._read[reader] for reader, microbatch in readers)
