"""In which order the members of a role that is read work: the policy that its ranks need, on the batches of a plan."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from flowtrain_lightning.packing.policies.forwards_first import forwards_first, recomputed_batches
from flowtrain_lightning.packing.policies.lockstep import lockstep_order
from flowtrain_lightning.packing.step_graph import Pass
from flowtrain_lightning.packing.step_plan import StepPlan, Turn


class MemberOrder(NamedTuple):
    """In which order a member works.

    Attributes:
        turns: when each batch is due, in order: the member's own batches, or, where members meet, those of all of them.
        passes: forwards and backwards of these batches; of an encoder that does not train the forwards alone count.
        recomputed: the batches of which nothing is kept.
        until: the position of the last microbatches that read each batch of these turns, of any member.
    """

    turns: tuple[Turn, ...]
    passes: tuple[Pass, ...]
    recomputed: frozenset[int]
    until: tuple[int, ...] = ()


def member_orders(
    plan: StepPlan,
    members: Iterable[int],
    kept_batches: int,
    *,
    meet: bool,
    of_role: Iterable[int] | None = None,
    colocated: Collection[int],
    in_fixed_order: bool,
    readers_meet: int,
) -> list[MemberOrder]:
    """The orders of some encoder members.

    Args:
        plan: who encodes and who reads what.
        members: which of the encoder's, or of all encoders'.
        kept_batches: encoder batches of a member whose activations may be kept at a time.
        meet: members need each other in a pass: each has a batch in every turn, if only an empty one.
        of_role: all members of their role, which meet; None where there is one such role.
        colocated: members whose ranks have a backbone lane, too.
        in_fixed_order: these take turns in a fixed order.
        readers_meet: neighbouring members of the role that reads which begin each microbatch together.
    """
    orders = []
    kept, recomputed = kept_batches, None
    together = [*(range(len(plan.encoder_batches)) if of_role is None else of_role)] if meet else []
    turns = plan.turns_of(together)
    for member in members:
        if meet or (in_fixed_order and member in colocated):
            own = turns if meet else plan.encoder_turns[member]
            orders.append(_in_lockstep(own, plan.turns_until(own, together or [member]), kept_batches))
            continue
        if recomputed is None:
            if colocated and len(plan.encoder_batches) == len(plan.microbatches) == 1:
                kept = _fewest_kept(plan, kept_batches)
            recomputed = recomputed_batches(plan, kept, readers_meet)
        numbers = [number for number, media in enumerate(plan.encoder_batches[member]) if len(media)]
        passes = tuple(forwards_first(numbers, kept, recomputed[member]))
        until = plan.read_until[member]
        orders.append(MemberOrder(plan.encoder_turns[member], passes, recomputed[member], until))
    return orders


class JointOrder(NamedTuple):
    """In which order the ranks of several roles that are read work.

    Attributes:
        passes: roles, and the forwards and backwards of their turns, by place.
        recomputed: role -> the turns, by place, of which nothing is kept.
    """

    passes: tuple[tuple[str, Pass], ...]
    recomputed: Mapping[str, frozenset[int]]


def joint_order(
    turns: Mapping[str, Sequence[Turn]], kept_batches: int, until: Mapping[str, Sequence[int]] | None = None
) -> JointOrder:
    """One order for ranks of several roles that are read, where some need each other: alike on all of these ranks.

    The roles' batches go through `lockstep_order` as if one role had them all. It takes the turns of every member of a
    role, also of those that meet in nothing, so that no rank comes to a pass in another order than the others.

    Args:
        turns: role -> the turns of all of its members, rising.
        kept_batches: batches of a rank whose activations may be kept at a time.
        until: role -> the position of the last microbatches that read each turn's batches; None: that of the turn.
    """
    places = sorted(
        (turn, number, role, place) for number, role in enumerate(turns) for place, turn in enumerate(turns[role])
    )
    last = None if until is None else [until[role][place] for *_, role, place in places]
    passes, again = lockstep_order([position for (position, _), *_ in places], max(kept_batches, 1), last)
    again = again if kept_batches else frozenset(range(len(places)))
    recomputed = {role: frozenset(places[at][3] for at in again if places[at][2] == role) for role in turns}
    return JointOrder(tuple((places[at][2], (kind, places[at][3])) for kind, at in passes), recomputed)


def _in_lockstep(turns: tuple[Turn, ...], until: tuple[int, ...], kept_batches: int) -> MemberOrder:
    passes, recomputed = lockstep_order([position for position, _ in turns], max(kept_batches, 1), until)
    return MemberOrder(turns, passes, recomputed if kept_batches else frozenset(range(len(turns))), until)


def _fewest_kept(plan: StepPlan, most: int) -> int:
    """Batches to keep on a rank that is alone: one that runs ahead of no other rank gains nothing by keeping more.

    It is as many as it takes to recompute no more batches than with ``most``.
    """
    recomputed = recomputed_batches(plan, most)
    return next(kept for kept in range(min(1, most), most + 1) if recomputed_batches(plan, kept) == recomputed)
