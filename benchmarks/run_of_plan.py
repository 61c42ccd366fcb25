"""A plan as a run of processes that sleep for as long as the planner's model says of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from benchmarks import laid_out
from benchmarks.laid_out import LaidOutJob
from benchmarks.layout_cells import as_run, run_job, simulated_seconds
from benchmarks.stretched_costs import StretchedCosts, packing_by
from flowtrain_lightning.allocator import Allocation
from flowtrain_lightning.allocator.role_problem import Problems
from flowtrain_lightning.placement.layout_costs import ModelledLayoutCosts

WARMUP, STEPS = 1, 2
"""Steps of a run: those before its time counts, and the others."""

TOKEN_BUDGET = 8192
_BFLOAT16 = 2  # bytes


def run_planned(
    planned: Allocation,
    problems: Problems,
    stretch: float,
    data: Path,
    folder: Path,
    *,
    samples: int,
    deadline: float,
    train: Callable[[LaidOutJob], None] = laid_out.train,
) -> dict[str, float]:
    """Seconds of a step, measured and simulated, in those of the device, and the runtime's share of it.

    Args:
        planned: the allocation.
        problems: role -> what was planned for.
        stretch: seconds of the run for a second of the device.
        data: the folder of the records.
        folder: for what the run writes; it is made.
        samples: of a step.
        deadline: seconds after which the run has failed.
        train: what each rank does.
    """
    folder.mkdir()
    costs = ModelledLayoutCosts(problems, planned)
    tokens = problems.load.tokens * samples / problems.load.items
    job = LaidOutJob(
        allocation=as_run(planned),
        costs=StretchedCosts(costs, stretch, costs.encoder_trains),
        packing=packing_by(costs, problems),
        encoder_first=False,
        data=data,
        folder=folder,
        global_batch_size=samples,
        token_budget=TOKEN_BUDGET,
        warmup=WARMUP,
        steps=STEPS,
        step_bytes=int(2 * tokens * laid_out.WIDTH * _BFLOAT16),
    )
    run = run_job(job, deadline, train)
    return {
        "step": run["step"] / stretch,
        "simulated": simulated_seconds(job) / stretch,
        "runtime": run["runtime"],
    }
