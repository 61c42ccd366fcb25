"""Runs all ranks of a step whose roles are in stages: the real executor on a pool of messages in a random order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from flowtrain_lightning.data import RankShard, StepBatch, StepPlan
from flowtrain_lightning.data.loading.collate import PADDING_LENGTH
from flowtrain_lightning.packing import SampleSizes
from flowtrain_lightning.packing.stage_entries import hidden_states, slice_name, stage_name
from flowtrain_lightning.packing.stage_schedule import StageSchedule
from flowtrain_lightning.packing.step_members import StepMembers
from flowtrain_lightning.runtime.executor import Executor, RolePart
from flowtrain_lightning.runtime.program_of_plan import make_program
from flowtrain_lightning.runtime.role_methods import BackboneMethod, EncoderMethod
from flowtrain_lightning.runtime.step import RankContext, Step
from flowtrain_lightning.runtime.timeline import Timeline
from tests.packing.sizes import PATCHES_PER_ROW, meeting_of
from tests.runtime.interleaving import (
    NO_BUFFERS,
    SPEC,
    DeliveredPool,
    Interleaving,
    Numbers,
    NumbersCompute,
    Page,
    batch_of,
)

HIDDEN = hidden_states("backbone")
SPECS = {"image": SPEC, HIDDEN: SPEC, hidden_states("encoder"): SPEC}


@dataclass
class StageCompute(NumbersCompute):
    """What ``Compute`` does of one stage, on numbers: every stage reads features, beside the hidden states."""

    stage: int = 0
    pipeline: StageSchedule = field(default_factory=StageSchedule)
    chunks: list[Numbers] = field(default_factory=list)
    """What the chunks of the stage multiply by; the first is ``backbone``."""
    of_encoder: tuple[int, int] = (0, 1)
    """Which stage of the encoder it is, and how many there are."""

    def encode(self, role: str, media: Any, hidden: Any = None, **which: Any) -> tuple[Tensor, ...]:
        stage, stages = self.of_encoder
        if stages == 1:
            return super().encode(role, media, **which)
        self.gather("encoder", "forward")
        if hidden is None:
            counts = torch.tensor(media.rows) * PATCHES_PER_ROW
            made = (media.patches @ self.encoder.weight).repeat_interleave(counts, dim=0)
        else:
            self.read([hidden])
            made = (hidden * self.encoder.weight).sin()
        rows = len(made) // PATCHES_PER_ROW  # none of padding, whose media have no grid here
        return (made.view(rows, PATCHES_PER_ROW, made.shape[1]).sum(1) if stage == stages - 1 else made,)

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
    ) -> tuple[Any, tuple[Tensor, ...]]:
        self.gather("backbone", "microbatch")
        hidden = features.get(HIDDEN)
        if hidden is None:
            hidden = torch.arange(1, len(batch.tokens) + 1, dtype=torch.float64)[:, None] / 10
        self.read([tensor for tensor in features.values() if tensor is not None])
        number = self.pipeline.number(self.stage, chunk)
        half = self.chunks[chunk] if chunk else self.backbone
        hidden = (hidden * half.weight).sin()
        if "image" in features:
            place = torch.arange(1, len(features["image"]) + 1, dtype=torch.float64)
            hidden = hidden + (features["image"] * place[:, None]).cos().sum(0) * half.weight
        return (hidden.sum(), ()) if number == self.pipeline.runs - 1 else (None, (hidden,))

    def backward(self, *args: Any, left: list[Any] | None = None, **how: Any) -> bool:
        if left is not None:
            left.append(args)
        return super().backward(*args, **how)

    def weights(self, role: str, left: list[Any], *, last: bool) -> None:
        self.gather(role, "weights")
        assert len(left) == 1, "each backward leaves its weights, once"


def with_tokens(batch: StepBatch) -> StepBatch:
    """The same with as many tokens in each microbatch as the plan says."""
    sizes = batch.plan.sizes
    filled = [
        packed and replace(packed, tokens=torch.zeros(_tokens(sizes, packed.samples), dtype=torch.int64))
        for packed in batch.microbatches
    ]
    batch.microbatches = tuple(filled)
    return batch


def direct_gradients(plan: StepPlan, stages: int, encoder_stages: int = 1) -> list[Tensor]:
    """Gradients of each stage of the encoder and of the backbone when everything is computed in one go."""
    chain = [StageCompute(stage=stage, pipeline=StageSchedule(stages)) for stage in range(stages)]
    encoding = [StageCompute(of_encoder=(stage, encoder_stages)) for stage in range(encoder_stages)]
    shard = RankShard(StepMembers({role: len(of_role) for role, of_role in plan.batches.items()}), {"backbone": 0})
    for member in range(len(plan.microbatches)):
        batch = with_tokens(batch_of(plan, replace(shard, own={"backbone": member})))
        for packed, samples in zip(batch.microbatches, plan.microbatches[member], strict=True):
            if packed is None:
                continue
            sizes, features = plan.sizes, {}
            media = np.concatenate([np.arange(sizes.media_start[s], sizes.media_start[s + 1]) for s in samples])
            if len(media):
                encoded = media if plan.encoded_as is None else plan.encoded_as[media]
                patches = (torch.from_numpy(encoded + 1.0).reshape(-1, 1) / 10).to(torch.float64)
                rows, made = tuple(sizes.media_rows[media].tolist()), ()
                for compute in encoding:
                    made = compute.encode("encoder", _Media(patches, rows), *made, step=(0, 0), number=0)
                (features["image"],) = made
            loss: Any = None
            for compute in chain:
                loss, made = compute.microbatch_and_rows(packed, features, stage="train", step=(0, 0), number=0)
                features[HIDDEN] = made[0] if made else None
            loss.backward()
    return [*(_gradient(each.encoder) for each in encoding), *(_gradient(compute.backbone) for compute in chain)]


class _Media(NamedTuple):
    patches: Tensor
    rows: tuple[int, ...]


def with_random_costs(plan: StepPlan, seed: int) -> StepPlan:
    """The plan with what each batch costs, from one drawn number each."""
    random = np.random.default_rng(seed)
    costs = {
        role: [[float(random.integers(1, 20)) for _ in own] for own in plan.batches[role]] for role in plan.batches
    }
    return replace(plan, costs=costs)


class StagedStep:
    """A step of a plan that has run on all its ranks.

    Args:
        plan: the step's plan.
        colocated: every rank has an encoder, and the first ones a stage; else backbone ranks come first.
        kept_batches: encoder batches whose activations may be kept.
        trains: gradients go back to the encoder.
        seed: of the order in which ranks run and messages arrive.
        spare_bytes: of the pool, above those with which no order can block.
        pipeline: how many stages there are, and how they work.
        encoder_stages: those of the encoder.
        sharing: the ranks of a stage share weights: each forward and backward is a collective of them.
        encoder_sharing: so do those of a stage of the encoder.
        searched: one order of all works is searched, from costs of which this is the seed.
        room_for: so many of the longest batch has each rank room for activations; the encoder's are moved.

    Attributes:
        executed: the passes of the ranks, in order.
        programs: of the ranks.
        pools: of the ranks.
    """

    def __init__(
        self,
        plan: StepPlan,
        pipeline: StageSchedule,
        *,
        colocated: bool,
        kept_batches: int,
        trains: bool,
        seed: int,
        spare_bytes: int = 0,
        sharing: bool = False,
        encoder_sharing: bool = False,
        searched: int | None = None,
        encoder_stages: int = 1,
        room_for: float | None = None,
    ) -> None:
        encoders, backbones, stages = len(plan.batches["encoder"]), len(plan.microbatches), pipeline.stages
        trunk, encoding = range(stages * backbones), encoders * encoder_stages
        encoder_ranks = [*range(encoding)] if colocated else [*range(len(trunk), len(trunk) + encoding)]
        pairs = {"encoder": tuple((rank % encoders, rank % backbones) for rank in trunk)} if colocated else {}
        counts = {"encoder": encoders, "backbone": backbones}
        shares = {"encoder": encoder_sharing, "backbone": sharing}
        meets = {role: meeting_of(counts[role]) for role, shared in shares.items() if shared}
        of_both = {"encoder": StageSchedule(encoder_stages), "backbone": pipeline}
        pipelines = {role: each for role, each in of_both.items() if each.stages > 1}
        members = StepMembers(counts, plan.graph, colocated=pairs, meets=meets, pipelines=pipelines)
        ranks_of: Mapping[str, Sequence[tuple[int, ...]]] = {
            **_ranks_of_stages("backbone", [*trunk], stages),
            **_ranks_of_stages("encoder", encoder_ranks, encoder_stages),
        }
        if searched is not None:
            members, plan = replace(members, searched=_first_ranks(ranks_of)), with_random_costs(plan, searched)
            longest = max(
                int(plan.lengths(role)[items].sum()) for role, own in plan.batches.items() for items in sum(own, ())
            )
            most = None if room_for is None else room_for * longest
            members = replace(members, activation_bytes=most, moving=("encoder",))
        row_bytes = dict.fromkeys(ranks_of, 1.0)
        ranks = max(*trunk, *encoder_ranks) + 1
        room = make_program(plan, RankShard(members, {}), 0).pool_demand(SPECS).least + spare_bytes
        interleaving = Interleaving(ranks, seed)
        self.pools: list[DeliveredPool] = []
        self.pools += [DeliveredPool(interleaving, self.pools, rank, room) for rank in range(ranks)]
        self.computes, self.executed, self.programs, parts = [], [], [], []
        for rank in range(ranks):
            own = {"backbone": rank % backbones} if rank in trunk else {}
            own |= {"encoder": encoder_ranks.index(rank) % encoders} if rank in encoder_ranks else {}
            here = {"backbone": rank // backbones} if rank in trunk else {}
            here |= {"encoder": encoder_ranks.index(rank) // encoders} if rank in encoder_ranks else {}
            shard = RankShard(members, own, {role: stage for role, stage in here.items() if role in pipelines})
            stage, of_encoder = here.get("backbone", 0), (here.get("encoder", 0), encoder_stages)
            compute = StageCompute(specs=SPECS, stage=stage, pipeline=pipeline, of_encoder=of_encoder)
            compute.chunks = [compute.backbone, *(Numbers() for _ in range(pipeline.chunks - 1))]
            stage_of = {"backbone": (here.get("backbone", 0), [*trunk]), "encoder": (of_encoder[0], encoder_ranks)}
            peers = {role: ranks[s * counts[role] :][: counts[role]] for role, (s, ranks) in stage_of.items()}
            compute.gather = partial(_meet, interleaving, rank, {role: peers[role] for role in own if role in meets})
            batch = with_tokens(batch_of(plan, shard))
            training = [*(["encoder"] if trains else []), "backbone"]
            step = Step(batch, make_program(plan, shard, kept_batches, row_bytes), "train", 0, training)
            context = RankContext(self.pools[rank], compute, Page(), Timeline(), ranks_of)  # type: ignore[arg-type]
            roles = {}
            if rank in trunk:
                roles["backbone"] = RolePart(BackboneMethod(context, [], speaks=True, counts=True), NO_BUFFERS)
            if rank in encoder_ranks:
                roles["encoder"] = RolePart(EncoderMethod(context, "encoder"), NO_BUFFERS)
            parts.append(Executor(context, roles, step).run)
            self.computes.append(compute)
            self.executed.append(step.executed)
            self.programs.append(step.program)
        interleaving.run(parts)
        self._pipeline, self._trunk, self._encoder_stages = pipeline, trunk, encoder_stages

    @property
    def gradients(self) -> list[Tensor]:
        """Of each stage of encoder and backbone, virtual ones counted, summed over their ranks in order."""
        zero, numbers = torch.zeros(1, 2, dtype=torch.float64), range(self._pipeline.runs)
        encoder = [
            sum((_gradient(compute.encoder) for compute in self.computes if compute.of_encoder[0] == stage), zero)
            for stage in range(self._encoder_stages)
        ]
        of_trunk = [self.computes[rank] for rank in self._trunk]
        parts = [(number // self._pipeline.stages, self._pipeline.stage_of(number)) for number in numbers]
        return encoder + [
            sum((_gradient(each.chunks[chunk]) for each in of_trunk if each.stage == stage), zero)
            for chunk, stage in parts
        ]


def _ranks_of_stages(role: str, ranks: Sequence[int], stages: int) -> dict[str, Sequence[tuple[int, ...]]]:
    members = len(ranks) // stages
    found: dict[str, Sequence[tuple[int, ...]]] = {role: [tuple(ranks[member::members]) for member in range(members)]}
    for name in (stage_name, slice_name):
        for stage in range(stages):
            found[name(role, stage)] = [(rank,) for rank in ranks[stage * members : (stage + 1) * members]]
    return found


def _first_ranks(ranks_of: Mapping[str, Sequence[tuple[int, ...]]]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(ranks[0] for ranks in of_name) for name, of_name in ranks_of.items()}


def _meet(interleaving: Interleaving, rank: int, peers: Mapping[str, Sequence[int]], role: str, what: str) -> None:
    """Ranks of a stage come to one pass of a role together, if they share weights."""
    if role in peers:
        interleaving.gather(rank, peers[role], f"{role} {what}")


def _tokens(sizes: SampleSizes, samples: Sequence[int]) -> int:
    return int(sizes.tokens[[*samples]].sum()) if samples else PADDING_LENGTH


def _gradient(half: Any) -> Tensor:
    gradient: Tensor | None = half.weight.grad
    return torch.zeros(1, 2, dtype=torch.float64) if gradient is None else gradient
