"""Allocator: which ranks play which role, in which layout. Plain Python, numpy and scipy, without torch.

Planning runs through these files, in this order: a module (`description`, from `dimensions`, `hf_config` or
`public_models`) and what a step asks of it (`workload`, `flops`) on a cluster (`devices`) make a problem for every role
(`role_problem`). Layouts that may solve it (`candidates`) are timed (`kernels`, `collectives`, `pass_time`,
`sharing_time`, `role_time`, by `coefficients`) and weighed (`memory_use`), as tensor ranks divide them (`division`).
`operations` are what eager code starts and moves around products. `placements` finds the best plan of every kind, with
`solver` where roles have devices of their own (`silenced`); `modelled_plan` says what a plan takes, one that is given
too, and within which band. `planner` says which of them to take, and `rank_assignment` which rank does what. The answer
is an `allocation` with a `role_layout` for every role, which `plan_file` writes and reads: that file alone needs PyYAML
and jsonargparse.
"""

from flowtrain_lightning.allocator.allocation import Allocation, Placement
from flowtrain_lightning.allocator.candidates import WHOLE_COPIES, SearchSpace
from flowtrain_lightning.allocator.coefficients import Efficiency
from flowtrain_lightning.allocator.description import ModuleDescription
from flowtrain_lightning.allocator.devices import DEVICES, Cluster, Device, device_from, named_device
from flowtrain_lightning.allocator.dimensions import describe_dimensions
from flowtrain_lightning.allocator.hf_config import describe_config
from flowtrain_lightning.allocator.modelled import ModelledCosts
from flowtrain_lightning.allocator.planner import NoPlanError, PlacementChoice, Prediction, choose_placement
from flowtrain_lightning.allocator.public_models import named_model
from flowtrain_lightning.allocator.rank_assignment import default_allocation
from flowtrain_lightning.allocator.role_layout import AllocationError, Layout, PlanningError, RoleLayout, Sharding
from flowtrain_lightning.allocator.role_problem import PRECISIONS, RoleProblem, role_problems
from flowtrain_lightning.allocator.workload import Workload, typical_workload
from flowtrain_lightning.packing.role_graph import BACKBONE, ENCODER, ROLES, Edge, RoleError, RoleGraph, graph_of
from flowtrain_lightning.packing.stage_schedule import StageSchedule

__all__ = [
    "BACKBONE",
    "DEVICES",
    "ENCODER",
    "PRECISIONS",
    "ROLES",
    "WHOLE_COPIES",
    "Allocation",
    "AllocationError",
    "Cluster",
    "Device",
    "Edge",
    "Efficiency",
    "Layout",
    "ModelledCosts",
    "ModuleDescription",
    "NoPlanError",
    "Placement",
    "PlacementChoice",
    "PlanningError",
    "Prediction",
    "RoleError",
    "RoleGraph",
    "RoleLayout",
    "RoleProblem",
    "SearchSpace",
    "Sharding",
    "StageSchedule",
    "Workload",
    "choose_placement",
    "default_allocation",
    "describe_config",
    "describe_dimensions",
    "device_from",
    "graph_of",
    "named_device",
    "named_model",
    "role_problems",
    "typical_workload",
]
