"""How many layers each stage of a role has: as training cuts it, or as many as the others."""

from __future__ import annotations

import numpy as np

from flowtrain_lightning.allocator.description import Half
from flowtrain_lightning.allocator.division import parameters_of_rank
from flowtrain_lightning.allocator.flops import FloatArray
from flowtrain_lightning.allocator.module_parts import Dense, Layers, Part
from flowtrain_lightning.allocator.role_problem import Family, RoleProblem
from flowtrain_lightning.packing.stage_schedule import StageSchedule


def layers_of_chunks(problem: RoleProblem, pipeline: StageSchedule) -> tuple[int, ...]:
    """``[chunks]`` layers of each, as ``parallel/stages/stage_cut.py`` divides those of the built half."""
    half = problem.half
    return pipeline.layers(half.depth, _head_in_layers(half) if problem.is_trunk else 0.0)


def layers_of_stages(problem: RoleProblem, family: Family) -> FloatArray:
    """``[stages]`` layers of each."""
    pipeline = StageSchedule(family.pipeline, 2 if family.schedule == "zb-v" else 1, family.schedule, family.cut)
    found = np.zeros(family.pipeline)
    np.add.at(found, [*map(pipeline.stage_of, range(pipeline.runs))], layers_of_chunks(problem, pipeline))
    return found


def parameters_of_a_stage(problem: RoleProblem, family: Family) -> float:
    """Parameters on a device of the fullest stage. A head that is tied to an embedding is on the last stage, too."""
    half = problem.half

    def here(part: Part) -> float:
        return parameters_of_rank(half, part, family.tensor)

    if family.pipeline == 1:
        return sum(map(here, half.parts))
    of_stage = layers_of_stages(problem, family) / half.depth * sum(map(here, half.layers))
    number = next(number for number, part in enumerate(half.parts) if isinstance(part, Layers))
    before, behind = sum(map(here, half.parts[:number])), sum(map(here, half.parts[number:])) - of_stage.sum()
    if any(isinstance(part, Dense) and part.tied for part in half.parts):
        behind = max(before, behind)
    of_stage[0] += before
    of_stage[0 if family.schedule == "zb-v" else -1] += behind
    return float(of_stage.max())


def _head_in_layers(half: Half) -> float:
    """What follows the layers of a half, in layers, by its weights; those that it shares with an embedding count."""
    last = max(number for number, part in enumerate(half.parts) if isinstance(part, Layers))
    behind = sum(
        part.inputs * part.outputs * part.copies if isinstance(part, Dense) else part.parameters
        for part in half.parts[last + 1 :]
    )
    inside = sum(part.parameters for part in half.layers)
    return StageSchedule.head_in_layers(behind, inside / half.depth)
