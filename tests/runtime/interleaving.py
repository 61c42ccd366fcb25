"""Runs all ranks of a step in one process: the real executor on a pool whose messages a random order delivers."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from flowtrain_lightning.compute.copy_stream import CopyStream
from flowtrain_lightning.compute.feature_spec import FeatureSpec
from flowtrain_lightning.data import PackedBatch, PackedMedia, PackedTargets, RankShard, StepBatch, StepPlan
from flowtrain_lightning.data.batch import GeneratedItem
from flowtrain_lightning.packing.role_graph import GENERATED, GENERATOR
from flowtrain_lightning.packing.step_members import StepMembers
from flowtrain_lightning.parallel.role_buffers import RoleBuffers
from flowtrain_lightning.pool import Key, MemoryRegion, Reservation, entry_nbytes
from flowtrain_lightning.runtime.executor import Executor, RolePart
from flowtrain_lightning.runtime.program_of_plan import make_program
from flowtrain_lightning.runtime.role_methods import BackboneMethod, EncoderMethod, GeneratorMethod
from flowtrain_lightning.runtime.step import RankContext, Step
from flowtrain_lightning.runtime.timeline import Timeline
from tests.packing.sizes import meeting_of
from tests.runtime.late_copies import LateCopies, read_after_copies

SPEC = FeatureSpec(((2,),), (torch.float64,))
LANES = ("encoder", "backbone", GENERATOR)


class Bare(nn.Module):
    """A module without anything in its encoder."""

    halves: ClassVar = {"encoder": ()}


NO_BUFFERS = RoleBuffers(Bare(), "encoder", None, torch.device("cpu"))  # type: ignore[arg-type]


class Interleaving:
    """Lets one rank run at a time; where a rank polls, chance says who goes on. Raises when nobody can."""

    def __init__(self, ranks: int, seed: int) -> None:
        self._chance = random.Random(seed)
        self._turn: list[threading.Event] = [threading.Event() for _ in range(ranks)]
        self._asleep = [False] * ranks
        self._gathering: list[tuple[tuple[int, ...], str] | None] = [None] * ranks  # with whom, and for what
        self._ended = [False] * ranks
        self._over = threading.Event()
        self.inbox: list[deque[Callable[[], None]]] = [deque() for _ in range(ranks)]
        self.failure: BaseException | None = None

    def run(self, parts: Sequence[Callable[[], None]]) -> None:
        """Runs one part per rank to its end."""
        threads = [threading.Thread(target=self._run, args=item, daemon=True) for item in enumerate(parts)]
        for thread in threads:
            thread.start()
        self._pass_on()
        self._over.wait()
        for turn in self._turn:
            turn.set()
        for thread in threads:
            thread.join()
        if self.failure is not None:
            raise self.failure
        for late in (message for inbox in self.inbox for message in list(inbox)):
            late()

    def poll(self, rank: int, sleeps: bool) -> bool:
        """What a pool's ``poll`` does: other ranks run, then some of what was sent to this one is there."""
        self._asleep[rank] = sleeps
        self._pass_on()
        self._await_turn(rank)
        self._asleep[rank] = False
        arriving = self._chance.randint(1 if sleeps else 0, max(len(self.inbox[rank]), 1))
        arrived = [self.inbox[rank].popleft() for _ in range(min(arriving, len(self.inbox[rank])))]
        for message in arrived:
            message()
        return bool(arrived)

    def gather(self, rank: int, ranks: Sequence[int], what: str) -> None:
        """A collective: goes on when all ``ranks`` have come, and raises where they come for other things."""
        group = tuple(ranks)
        self._gathering[rank] = group, what
        here = (self._gathering[other] for other in group)
        others = [each[1] for each in here if each is not None and each[0] == group]
        assert set(others) == {what}, f"rank {rank} runs {what!r} while others run {others}"
        if len(others) == len(ranks):
            for other in ranks:
                self._gathering[other] = None
        else:
            self._pass_on()
            self._await_turn(rank)

    def _run(self, rank: int, part: Callable[[], None]) -> None:
        try:
            self._await_turn(rank)
            part()
        except BaseException as failure:
            self.failure = self.failure or failure
        self._ended[rank] = True
        self._pass_on()

    def _await_turn(self, rank: int) -> None:
        self._turn[rank].wait()
        self._turn[rank].clear()
        if self.failure is not None:
            raise self.failure

    def _pass_on(self) -> None:
        waiting = [rank for rank, ended in enumerate(self._ended) if not ended]
        here = [rank for rank in waiting if self._gathering[rank] is None]
        able = [rank for rank in here if not self._asleep[rank] or self.inbox[rank]]
        if waiting and not able:
            self.failure = self.failure or AssertionError(f"ranks {waiting} all wait for one another")
        if self.failure is not None or not waiting:
            self._over.set()
            for turn in self._turn:
                turn.set()
        else:
            self._turn[self._chance.choice(able)].set()


class DeliveredPool:
    """One rank's pool, with the real bookkeeping of room and messages that come in a random order."""

    def __init__(self, interleaving: Interleaving, pools: list[DeliveredPool], rank: int, nbytes: int) -> None:
        self._interleaving, self._pools, self._rank = interleaving, pools, rank
        self._parts = {False: MemoryRegion(0, nbytes), True: MemoryRegion(0, nbytes)}
        self._published: dict[Key, DeliveredLease] = {}

    def poll(self, timeout: float = 0.0) -> bool:
        return self._interleaving.poll(self._rank, sleeps=timeout > 0)

    is_settled = True

    def settle(self) -> None:
        """Nothing is underway."""

    def reserve(self, *orders: Mapping[Key, Reservation], ahead: bool = False) -> bool:
        return self._parts[ahead].reserve(*orders)

    def has_room(self, keys: Sequence[Key], ahead: bool = False) -> bool:
        return self._parts[ahead].has_room(keys)

    def put(self, key: Key, tensors: Sequence[Tensor], readers: Sequence[int], ahead: bool = False) -> int | None:
        part, left = self._parts[ahead], len(readers)
        offset = part.allocate(key, entry_nbytes([tensor.nbytes for tensor in tensors]))
        if offset is None:
            return None

        def give_back() -> None:
            nonlocal left
            left -= 1
            if not left:
                part.free(offset)

        assert len({*readers}) == len(readers)
        for reader in readers:
            self._publish(key, tensors, reader, give_back)
        return offset

    def _publish(self, key: Key, tensors: Sequence[Tensor], reader: int, give_back: Callable[[], None]) -> None:
        copies = tuple(tensor.detach().clone() for tensor in tensors)
        lease = DeliveredLease(copies, lambda: self._pools[reader].send(self._rank, give_back))
        self.send(reader, lambda: self._pools[reader].publish(key, lease))

    def publish(self, key: Key, lease: DeliveredLease) -> None:
        assert key not in self._published
        self._published[key] = lease

    def arrived(self, keys: Iterable[Key]) -> list[Key]:
        return [key for key in keys if key in self._published]

    def get(self, key: Key) -> DeliveredLease | None:
        return self._published.pop(key, None)

    def send(self, rank: int, message: Callable[[], None]) -> None:
        if rank == self._rank:
            message()
        else:
            self._interleaving.inbox[rank].append(message)

    @property
    def is_empty(self) -> bool:
        return not self._published and not any(part.occupancy.now for part in self._parts.values())


@dataclass
class DeliveredLease:
    tensors: tuple[Tensor, ...]
    release: Callable[[], None]


def least_bytes(plan: StepPlan, spec: FeatureSpec, in_fixed_order: bool = False, colocated: bool = False) -> int:
    """Bytes of the pool with which a step of this plan cannot block, on any rank."""
    counts = {role: len(batches) for role, batches in plan.batches.items()}
    pairs = {role: ((0, 0),) for role in counts if role != "backbone"} if colocated or in_fixed_order else {}
    meets = {"backbone": meeting_of(counts["backbone"])} if in_fixed_order else {}
    shard = RankShard(StepMembers(counts, plan.graph, colocated=pairs, meets=meets), {})
    return make_program(plan, shard, 0).pool_demand({"image": spec, GENERATED: spec}).least


class Numbers(nn.Module):
    """A half of a few numbers, so that gradients can be compared."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([[0.3, -0.7]], dtype=torch.float64))


@dataclass
class NumbersCompute:
    """What ``Compute`` does, on numbers: a media's patch is its number, a microbatch's loss couples its features."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    specs: Mapping[str, FeatureSpec] = field(default_factory=lambda: {"image": SPEC, GENERATED: SPEC})
    copies: Mapping[str, Sequence[CopyStream]] = field(
        default_factory=lambda: {lane: [CopyStream(torch.device("cpu"))] for lane in LANES}
    )
    encoder: Numbers = field(default_factory=Numbers)
    backbone: Numbers = field(default_factory=Numbers)
    generator: Numbers = field(default_factory=Numbers)
    patch_dims: Mapping[str, int] = field(default_factory=lambda: {GENERATOR: 1})
    kept: int = 0
    most_kept: int = 0
    forwards: int = 0
    gather: Callable[[str, str], None] = lambda role, what: None
    read: Callable[[Iterable[Tensor | None]], None] = lambda copies: None
    sum_backbone: Callable[[], None] = lambda: None
    sums: int = 0

    def encode(self, role: str, media: PackedMedia, *, step: tuple[int, int], number: int) -> tuple[Tensor, ...]:
        self.forwards += 1
        self.gather("encoder", "forward")
        features = media.patches @ self.encoder.weight
        if features.requires_grad:
            self.kept += 1
            self.most_kept = max(self.most_kept, self.kept)
        return (features.repeat_interleave(torch.tensor(media.rows), dim=0),)

    def check_context(self, batch: Any, features: dict[str, Any], chunk: int = 0) -> None:
        """No ranks share sequences here."""

    def microbatch_and_rows(
        self,
        batch: Any,
        features: dict[str, Any],
        *,
        stage: str,
        step: Any,
        number: int,
        counts: bool = True,
        chunk: int = 0,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        self.gather("backbone", "microbatch")
        loss = self.backbone.weight.sum() * len(batch.samples)
        if "image" in features:
            self.read([features["image"]])
            place = torch.arange(1, len(features["image"]) + 1, dtype=torch.float64)
            loss = loss + (features["image"].sin() * place[:, None] * self.backbone.weight).sum()
        places = len(batch.media_positions.get(GENERATED, ()))
        rows = torch.arange(1, places + 1, dtype=torch.float64)[:, None] * self.backbone.weight
        if "image" in features:
            rows = rows + features["image"].cos().sum(0)
        return loss, (rows,)

    def generate(
        self, role: str, items: PackedTargets, condition: tuple[Tensor, ...], *, stage: str, number: int, counts: bool
    ) -> Tensor:
        self.gather("generator", "forward")
        self.read(condition if counts else ())  # nobody copies what padding is given
        numbers = items.media.pixels.flatten().repeat_interleave(torch.tensor(items.condition_rows))
        return (condition[0].sin() * numbers[:, None] * self.generator.weight).sum()

    def backward(
        self,
        role: str,
        outputs: tuple[Tensor, ...],
        gradients: tuple[Tensor | None, ...],
        *,
        last: bool,
        left: list[Any] | None = None,
    ) -> bool:
        self.gather(role, "backward")
        self.read([gradient for gradient in gradients if gradient is not None and gradient.dim() > 0])
        self.kept -= role == "encoder"
        pairs = [pair for pair in zip(outputs, gradients, strict=True) if pair[1] is not None]
        if pairs:  # no padding
            torch.autograd.backward([out for out, _ in pairs], [gradient for _, gradient in pairs])
        return bool(pairs)

    def send_gradients(self, role: str) -> None:
        """At its worst: the rank does nothing more until all others have come to the sum."""
        if role == "backbone":
            self.sums += 1
            self.sum_backbone()


class Evenly:
    """Losses that are divided by nothing."""

    def gradient(self, loss: Tensor, *_: Any) -> Tensor:
        return torch.ones_like(loss)


def direct_gradients(plan: StepPlan) -> tuple[Tensor, ...]:
    """Gradients of encoder, backbone and generator when everything is computed in one go."""
    compute = NumbersCompute()
    for members in (members for of_rank in plan.microbatches for members in of_rank if len(members)):
        sizes = plan.sizes
        every = np.concatenate([np.arange(sizes.media_start[s], sizes.media_start[s + 1]) for s in members])
        drawn = every[np.isin(every, sizes.of_modality(GENERATED))]
        media = every[~np.isin(every, drawn)]
        packed, features = _microbatch(plan, members), {}
        if len(media):
            features["image"] = compute.encode("encoder", _media(plan, media), step=(0, 0), number=0)[0]
        loss, rows = compute.microbatch_and_rows(packed, features, stage="train", step=(0, 0), number=0)
        if len(drawn):
            items = PackedTargets(_media(plan, drawn), 0, 0, 0)
            loss = loss + compute.generate(GENERATOR, items, rows, stage="train", number=0, counts=True)
        loss.backward()
    return tuple(_gradient([getattr(compute, half)]) for half in LANES)


class InterleavedStep:
    """A step of a plan that has run on all its ranks.

    Args:
        plan: the step's plan.
        colocated: ranks have both lanes, as many as there are of both; else backbone ranks come first.
        part_bytes: room for the features of a rank, and again for its gradients.
        kept_batches: encoder batches whose activations may be kept.
        trains: gradients go back.
        seed: of the order in which ranks run and messages arrive.
        sharing: roles whose ranks share weights: each forward and backward is a collective of them, or where some ranks
            have both lanes and others have not, of those of one kind.
        meets_in_forwards: of the encoder lanes.

    Attributes:
        executed: role -> the passes of the first rank, in order.
    """

    executed: Mapping[str, Sequence[str]]

    def __init__(
        self,
        plan: StepPlan,
        *,
        colocated: bool,
        part_bytes: int,
        kept_batches: int,
        trains: bool,
        seed: int,
        sharing: Collection[str] = (),
        meets_in_forwards: bool = True,
    ) -> None:
        encoders, backbones = len(plan.batches["encoder"]), len(plan.microbatches)
        generators = len(plan.batches.get(GENERATOR, ()))
        ranks = max(encoders, backbones) if colocated else encoders + backbones + generators
        backbone_ranks = tuple(range(backbones))
        encoder_ranks = tuple(range(encoders)) if colocated else tuple(range(backbones, backbones + encoders))
        generator_ranks = tuple(range(generators)) if colocated else tuple(range(backbones + encoders, ranks))
        of_both = [(rank, rank) for rank in range(min(encoders, backbones) if colocated else 0)]
        interleaving = Interleaving(ranks, seed)
        self.pools: list[DeliveredPool] = []
        self.pools += [DeliveredPool(interleaving, self.pools, rank, part_bytes) for rank in range(ranks)]
        self.compute = []
        for _ in range(ranks):
            copies = {lane: [LateCopies() for _ in range(2)] for lane in LANES}
            of_all = [stream for streams in copies.values() for stream in streams]
            self.compute.append(NumbersCompute(copies=copies, read=partial(read_after_copies, of_all)))
        of_role = {"backbone": backbone_ranks, "encoder": encoder_ranks}
        of_role |= {GENERATOR: generator_ranks} if generators else {}
        parts = []
        for rank in range(ranks):

            def gather(role: str, what: str, rank: int = rank) -> None:
                if role in sharing and (what != "forward" or meets_in_forwards):
                    peers = [other for other in of_role[role] if (other in backbone_ranks) == (rank in backbone_ranks)]
                    interleaving.gather(rank, peers, f"{role} {what}")

            def sum_backbone(rank: int = rank) -> None:
                if rank in backbone_ranks and not sharing:
                    interleaving.gather(rank, backbone_ranks, "sum of the backbone")

            self.compute[rank].gather, self.compute[rank].sum_backbone = gather, sum_backbone
            pairs = {role: tuple(of_both) for role in plan.graph.roles if of_both and role != "backbone"}
            counts = {role: len(each) for role, each in of_role.items()}
            meets = {role: meeting_of(len(of_role[role])) for role in sharing}
            order = [role for role in ("backbone", GENERATOR, "encoder") if rank in of_role.get(role, ())]
            own = {role: of_role[role].index(rank) for role in order}
            part = RankShard(StepMembers(counts, plan.graph, colocated=pairs, meets=meets), own)
            program = make_program(plan, part, kept_batches)
            step = Step(batch_of(plan, part), program, "train", 0, [*(["encoder"] if trains else []), "backbone"])
            self.executed = step.executed if rank == 0 else self.executed
            members = {role: [(each,) for each in ranks] for role, ranks in of_role.items()}
            context = RankContext(self.pools[rank], self.compute[rank], Page(), Timeline(), members)  # type: ignore[arg-type]
            roles = {}
            if "backbone" in part.own:
                roles["backbone"] = RolePart(BackboneMethod(context, [], speaks=True, counts=True), NO_BUFFERS)
            if GENERATOR in part.own:
                method = GeneratorMethod(context, GENERATOR, Evenly(), counts=True)  # type: ignore[arg-type]
                roles[GENERATOR] = RolePart(method, NO_BUFFERS)
            if "encoder" in part.own:
                encoding = EncoderMethod(context, "encoder", meets_in_forwards=meets_in_forwards)
                roles["encoder"] = RolePart(encoding, NO_BUFFERS)
            parts.append(partial(_run_and_sum, Executor(context, roles, step), self.compute[rank]))
        interleaving.run(parts)

    def gradient(self, half: str) -> Tensor:
        """The gradient of a half, over all ranks."""
        return _gradient([getattr(compute, half) for compute in self.compute])


def _run_and_sum(executor: Executor, compute: NumbersCompute) -> None:
    """Runs all works; the backbone's gradients are summed at their end, if they are not yet."""
    executor.run()
    if not compute.sums:
        compute.sum_backbone()


def _gradient(halves: Sequence[Numbers]) -> Tensor:
    gradients = [half.weight.grad for half in halves]
    return sum((g for g in gradients if g is not None), torch.zeros(1, 2, dtype=torch.float64))


class Page:
    """A status page that nobody reads."""

    def enter(self, phase: str, step: int) -> None:
        pass


def batch_of(plan: StepPlan, part: RankShard) -> StepBatch:
    """A rank's part of a plan, without pixels or tokens: media carry their number as their only patch."""
    microbatches: tuple[Any, ...] = ()
    media: dict[str, tuple[Any, ...]] = {}
    if "backbone" in part.own:
        pads = bool(part.members.meeting("backbone").passes)
        own = plan.microbatches[part.own["backbone"]]
        microbatches = tuple(_microbatch(plan, samples, pads) for samples in own)
    padding = {}
    for role in part.own.keys() - {"backbone"}:
        media[role] = tuple(_media(plan, items) for items in plan.batches[role][part.own[role]])
        every = np.concatenate([np.empty(0, np.int64), *(items for own in plan.batches[role] for items in own)])
        if len(every):
            padding[role] = _media(plan, every[plan.sizes.media_patches[every].argmin(keepdims=True)])
    return StepBatch(plan, part, microbatches, media, 0, 0, padding)


def _microbatch(plan: StepPlan, members: np.ndarray, pads: bool = False) -> PackedBatch | None:
    if len(members) == 0 and not pads:
        return None
    sizes = plan.sizes.select(members)
    nothing = torch.zeros(0, dtype=torch.int64)
    rows = {name: int(sizes.media_rows[sizes.of_modality(name)].sum()) for name in ("image", GENERATED)}
    places = {name: torch.arange(count) for name, count in rows.items() if count}
    return PackedBatch(nothing, nothing, nothing, nothing, 0, places, tuple(members.tolist()), nothing)


def _media(plan: StepPlan, media: np.ndarray) -> PackedMedia | None:
    if len(media) == 0:
        return None
    rows = tuple(plan.sizes.media_rows[media].tolist())
    modality = plan.sizes.modality_of(media[0])
    items = tuple(GeneratedItem(0, item, count) for item, count in zip(media.tolist(), rows, strict=True))
    media = media if plan.encoded_as is None else plan.encoded_as[media]
    patches = torch.from_numpy(media + 1.0).reshape(-1, 1) / 10
    nothing = torch.zeros(0)
    return PackedMedia(modality, patches, nothing, nothing, 0, rows, items=items if modality == GENERATED else ())
