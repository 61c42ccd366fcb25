"""The policy of a member by itself: forward while activations may be kept; and what is recomputed for that."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence

from flowtrain_lightning.packing.policies.trunk_order import TrunkOrder, in_order
from flowtrain_lightning.packing.step_graph import BatchOf, BlockedError, Pass
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


def recomputed_batches(
    plan: StepPlan, kept_batches: int, readers_meet: int = 1, order: TrunkOrder | None = None
) -> Mapping[str, tuple[frozenset[int], ...]]:
    """The batches that an encoder which trains has to recompute, so that no lane ever blocks.

    With few kept activations the order of a step could block: an encoder batch waits for the gradients of a microbatch
    that waits for features of a later batch, which may not run yet: it reads them itself, or ranks that gather weights
    with its own do. So all lanes go as far as they can, and wherever none can go on, the next waiting batch is marked
    as recomputed: of several lanes' the one with the lowest number, then that of the first member. How far they can go
    does not depend on durations, so the plan alone decides.

    Where others read what the trunk makes, a microbatch goes backward here once all members have been forward at its
    position: those who read it need no more, whatever they share.

    Args:
        plan: the step's plan.
        kept_batches: batches of a member whose activations may be kept at a time, from 0.
        readers_meet: neighbouring members of the role that reads which begin each microbatch together.
        order: of that role's passes; None: each backward at once.

    Returns:
        Role that encodes -> the numbers of each member's recomputed batches.
    """
    lanes = _Lanes(plan, kept_batches, readers_meet, order)
    while not lanes.are_done:
        if not lanes.go_on():
            number, lane = min(
                (done, lane) for lane, done in enumerate(lanes.forwards) if done < len(lanes.readers[lane])
            )
            lanes.recomputed[lane].add(number)
    found: dict[str, list[frozenset[int]]] = {role: [] for role in plan.graph.producers}
    for (role, _), recomputed in zip(plan.makers, lanes.recomputed, strict=True):
        found[role].append(frozenset(recomputed))
    return {role: tuple(own) for role, own in found.items()}


class _Lanes:
    """The progress of a step's lanes, each on a rank of its own.

    Attributes:
        readers: ``[lane][batch]`` the microbatches that read it, for each member that encodes.
        forwards: ``[lane]`` how many are done.
        recomputed: ``[lane]`` the batches of which nothing is kept.
    """

    def __init__(self, plan: StepPlan, kept_batches: int, readers_meet: int, order: TrunkOrder | None) -> None:
        self._kept_batches = kept_batches
        self._readers_meet = readers_meet
        found: dict[BatchOf, list[BatchOf]] = {}
        for entry in plan.entries:
            found.setdefault(entry.maker, []).extend(entry.readers)
        self.readers = [
            [
                found[BatchOf(role, member, number)]
                for number, media in enumerate(plan.batches[role][member])
                if len(media)
            ]
            for role, member in plan.makers
        ]
        positions = range(len(plan.microbatches[0]))
        self._passes = order.passes if order else tuple(in_order(len(positions), (), in_flight=1))
        self._waited_for = {entry.maker.number for entry in plan.entries if entry.maker.role == plan.graph.trunk}
        self._lacks = [[0] * len(positions) for _ in plan.microbatches]  # batches yet to be encoded
        for readers in self.readers:
            for reader in (reader for of_batch in readers for reader in of_batch):
                self._lacks[reader.member][reader.number] += 1
        self.forwards = [0] * len(self.readers)
        self._backwards = [0] * len(self.readers)
        self._kept = [0] * len(self.readers)
        self._passed = [0] * len(self._lacks)  # passes that each member that reads has done
        self._read = [0] * len(self._lacks)  # of these the forwards
        self._done = [0] * len(self._lacks)  # and the backwards
        self.recomputed: list[set[int]] = [set() for _ in self.readers]

    @property
    def are_done(self) -> bool:
        """All forwards and backwards, and so all microbatches that read something."""
        return all(done == len(own) for done, own in zip(self._backwards, self.readers, strict=True))

    def go_on(self) -> bool:
        """Lets every lane do what it can; says whether one could."""
        moved = False
        for lane in range(len(self.readers)):
            while self._encode(lane) or self._give_back(lane):
                moved = True
        for first in range(0, len(self._lacks), self._readers_meet):
            group = range(first, min(first + self._readers_meet, len(self._lacks)))
            while self._can_pass(group):
                kind, _ = self._passes[self._passed[first]]
                for member in group:
                    self._passed[member] += 1
                    self._read[member] += kind == "forward"
                    self._done[member] += kind == "backward"
                moved = True
        return moved

    def _can_pass(self, group: range) -> bool:
        """Whether members that begin passes together have all that the next one takes."""
        if self._passed[group.start] == len(self._passes):
            return False
        kind, position = self._passes[self._passed[group.start]]
        if kind == "forward":
            return not any(self._lacks[member][position] for member in group)
        return position not in self._waited_for or min(self._read) > position

    def _encode(self, lane: int) -> bool:
        number = self.forwards[lane]
        keeps = number not in self.recomputed[lane]
        if number == len(self.readers[lane]) or (keeps and self._kept[lane] >= self._kept_batches):
            return False
        self.forwards[lane] += 1
        self._kept[lane] += keeps
        for reader in self.readers[lane][number]:
            self._lacks[reader.member][reader.number] -= 1
        return True

    def _give_back(self, lane: int) -> bool:
        number = self._backwards[lane]
        if number == self.forwards[lane]:
            return False
        if any(self._done[reader.member] <= reader.number for reader in self.readers[lane][number]):
            return False
        self._backwards[lane] += 1
        self._kept[lane] -= number not in self.recomputed[lane]
        return True
