"""In which order the members of a role that is read work: the policy that its ranks need, on the batches of a plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from flowtrain_lightning.packing.policies.forwards_first import forwards_first, recomputed_batches
from flowtrain_lightning.packing.policies.lockstep import lockstep_order
from flowtrain_lightning.packing.policies.trunk_order import TrunkOrder, trunk_order
from flowtrain_lightning.packing.step_graph import Pass
from flowtrain_lightning.packing.step_members import StepMembers
from flowtrain_lightning.packing.step_plan import StepPlan, Turn


class MemberOrder(NamedTuple):
    """In which order a member works.

    Attributes:
        turns: when each batch is due, in order: the member's own batches, or, where members meet, those of all of them.
        passes: forwards and backwards of these batches; of an encoder that does not train the forwards alone count.
        recomputed: the batches of which nothing is kept.
        until: the position of the last microbatches that go forward before the gradients of each batch of these turns
            come, of any member: those that read it last, if the trunk keeps no microbatch open.
    """

    turns: tuple[Turn, ...]
    passes: tuple[Pass, ...]
    recomputed: frozenset[int]
    until: tuple[int, ...] = ()


def member_orders(
    plan: StepPlan, members: StepMembers, role: str, kept_batches: int, only: Iterable[int] | None = None
) -> list[MemberOrder]:
    """The orders of a role's members.

    Args:
        plan: who encodes and who reads what.
        members: of all roles.
        role: one that encodes.
        kept_batches: batches of a member whose activations may be kept at a time.
        only: which of its members; None: all.
    """
    orders = []
    kept, recomputed = kept_batches, None
    meet, everyone = bool(members.meeting(role).passes), range(len(plan.batches[role]))
    colocated = {member for member, _ in members.colocated.get(role, ())}
    order = trunk_order(plan, members)
    turns = plan.turns_of(role) if meet else ()
    for member in everyone if only is None else only:
        if meet or (members.in_fixed_order and member in colocated):
            own = turns if meet else plan.turns[role][member]
            until = tuple(map(order.answered_after, plan.turns_until(role, own, everyone if meet else [member])))
            orders.append(_in_lockstep(own, until, kept_batches))
            continue
        if recomputed is None:
            readers_meet = members.meeting(members.trunk).together
            if colocated and not members.pipelines and len(plan.makers) == len(plan.microbatches) == 1:
                kept = _fewest_kept(plan, kept_batches, order)
            recomputed = recomputed_batches(plan, kept, readers_meet, order)[role]
        numbers = [number for number, media in enumerate(plan.batches[role][member]) if len(media)]
        passes = tuple(forwards_first(numbers, kept, recomputed[member]))
        own_until = tuple(map(order.answered_after, plan.read_until[role][member]))
        orders.append(MemberOrder(plan.turns[role][member], passes, recomputed[member], own_until))
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


class RolesInTurns(NamedTuple):
    """The order of a plan's roles that are read, on ranks that have several of them.

    Attributes:
        turns: role -> the turns of all of its members, rising.
        until: role -> the position of the last microbatches that go forward before the gradients of each turn come.
        order: of their passes.
    """

    turns: Mapping[str, tuple[Turn, ...]]
    until: Mapping[str, tuple[int, ...]]
    order: JointOrder


def roles_in_turns(plan: StepPlan, members: StepMembers, roles: Iterable[str], kept_batches: int) -> RolesInTurns:
    """See `joint_order`, of a plan.

    Args:
        plan: who encodes and who reads what.
        members: of all roles.
        roles: that a rank encodes for.
        kept_batches: batches of a rank whose activations may be kept at a time.
    """
    trunk = trunk_order(plan, members)
    turns = {role: plan.turns_of(role) for role in roles}
    until = {role: tuple(map(trunk.answered_after, plan.turns_until(role, own))) for role, own in turns.items()}
    return RolesInTurns(turns, until, joint_order(turns, kept_batches, until))


def _in_lockstep(turns: tuple[Turn, ...], until: tuple[int, ...], kept_batches: int) -> MemberOrder:
    passes, recomputed = lockstep_order([position for position, _ in turns], max(kept_batches, 1), until)
    return MemberOrder(turns, passes, recomputed if kept_batches else frozenset(range(len(turns))), until)


def _fewest_kept(plan: StepPlan, most: int, order: TrunkOrder) -> int:
    """Batches to keep on a rank that is alone: one that runs ahead of no other rank gains nothing by keeping more.

    It is as many as it takes to recompute no more batches than with ``most``.
    """
    recomputed = recomputed_batches(plan, most, order=order)
    fewer = range(min(1, most), most + 1)
    return next(kept for kept in fewer if recomputed_batches(plan, kept, order=order) == recomputed)
