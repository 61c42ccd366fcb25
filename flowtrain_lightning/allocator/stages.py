"""One stage of a role as a role of its own: its layers, and what comes before the first or behind the last of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from flowtrain_lightning.allocator.collectives import ring
from flowtrain_lightning.allocator.description import Half
from flowtrain_lightning.allocator.flops import FloatArray
from flowtrain_lightning.allocator.late_bytes import is_made_later
from flowtrain_lightning.allocator.module_parts import Dense, Layers, Part
from flowtrain_lightning.allocator.pass_time import PassTime, pass_time
from flowtrain_lightning.allocator.role_problem import Family, RoleProblem


def half_of_chunk(half: Half, number: int, layers: Sequence[int]) -> Half:
    """The part of a half that one chunk of it is: some of the layers, and the first or last one what is outside.

    Layers of several kinds are taken to be spread over the half alike, as kinds that take turns are.

    Args:
        half: of which it is a part.
        number: of the chunk.
        layers: of each chunk.
    """
    first = next(place for place, part in enumerate(half.parts) if isinstance(part, Layers))
    start, depth = sum(layers[:number]), sum(layers)

    def here(place: int, part: Part) -> Part | None:
        if isinstance(part, Layers):
            end = start + layers[number]
            return replace(part, count=part.count * end // depth - part.count * start // depth)
        return part if number == (0 if place < first else len(layers) - 1) else None

    found = (here(place, part) for place, part in enumerate(half.parts))
    return replace(half, parts=tuple(part for part in found if part is not None))


def chunk_of_problem(
    problem: RoleProblem, family: Family, number: int, layers: Sequence[int], forwards: int
) -> tuple[RoleProblem, Family]:
    """A stage, or one of its chunks, as a role of its own on the same devices, and the layout of its ranks.

    Args:
        problem: of the role.
        family: its layout.
        number: of the chunk.
        layers: of each chunk.
        forwards: microbatches of all replicas in a step, as many as they are of the role in its layout.
    """
    before = (half_of_chunk(problem.half, each, layers) for each in range(number))
    own = replace(
        problem,
        half=half_of_chunk(problem.half, number, layers),
        load=replace(problem.load, forwards=forwards),
        receives_gradient=problem.receives_gradient or any(each.trains for each in before),
    )
    return own, replace(family, pipeline=1, schedule="1f1b")


def weights_seconds(
    problem: RoleProblem, family: Family, once: PassTime, tokens: FloatArray, pairs: Sequence[FloatArray]
) -> FloatArray:
    """Seconds of the backwards of microbatches that are for the gradients of weights alone.

    Args:
        problem: of a stage.
        family: its layout.
        once: what its passes take.
        tokens: ``[microbatches]`` of each.
        pairs: for every part with layers the ``[microbatches]`` attended pairs of a mean token.
    """
    frozen = replace(problem.half, parts=tuple(map(_without_late_weights, problem.half.parts)))
    through = pass_time(replace(problem, half=frozen, receives_gradient=True), family, tokens, pairs)
    return np.maximum(once.backward - through.backward, 0.0)


def _without_late_weights(part: Part) -> Part:
    waits_for_none = isinstance(part, Dense) and not is_made_later(part.inputs, part.outputs)
    return part if waits_for_none else replace(part, trainable=False)


def seconds_between_stages(problem: RoleProblem, family: Family, tokens: FloatArray) -> FloatArray:
    """Seconds in which the hidden states of microbatches pass from one stage to the next, or their gradients back.

    Ranks of one stage come before those of the next, so that what a stage shares is near, and its neighbour far.

    Args:
        problem: of the role.
        family: its layout.
        tokens: ``[layouts]`` of a microbatch; or ``[microbatches]`` of a family of one layout.
    """
    width = problem.precision.computing * max(part.hidden for part in problem.half.layers)
    stride = family.data * family.tensor * family.context
    neighbour = ring(problem.cluster, 2.0, stride, problem.efficiency.exchange)
    return neighbour.send(tokens * width / (family.tensor * family.context))
