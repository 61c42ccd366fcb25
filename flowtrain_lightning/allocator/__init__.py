"""Allocator: which ranks play which role, in which layout. Plain Python, numpy and scipy, without torch.

Planning runs through these files, in this order: a module (`description`, `dimensions`, `huggingface`, `models`) and
what a step asks (`workload`) on a cluster (`devices`) make a `problem` for every role; `candidates` are timed
(`step_time`) and weighed (`memory`); `comparison` finds the best plan of every placement (`together`, `separate` by
`solver`, `mixed`); `placing` gives every rank its role.
"""

from flowtrain_lightning.allocator.allocation import Allocation, AllocationError, Placement
from flowtrain_lightning.allocator.candidates import WHOLE_COPIES, Choices
from flowtrain_lightning.allocator.comparison import Comparison, NoPlanError, compare
from flowtrain_lightning.allocator.default import default_allocation
from flowtrain_lightning.allocator.description import DescriptionError, ModuleDescription
from flowtrain_lightning.allocator.devices import DEVICES, Cluster, Device, DeviceError, device_from, named_device
from flowtrain_lightning.allocator.dimensions import describe_dimensions
from flowtrain_lightning.allocator.efficiency import Efficiency
from flowtrain_lightning.allocator.errors import PlanningError
from flowtrain_lightning.allocator.huggingface import describe_config
from flowtrain_lightning.allocator.layout import Layout, Sharding
from flowtrain_lightning.allocator.models import named_model
from flowtrain_lightning.allocator.placing import allocate
from flowtrain_lightning.allocator.plan import Plan
from flowtrain_lightning.allocator.problem import RoleProblem, role_problems
from flowtrain_lightning.allocator.roles import BACKBONE, ENCODER, ROLES
from flowtrain_lightning.allocator.workload import Workload, typical_workload

__all__ = [
    "BACKBONE",
    "DEVICES",
    "ENCODER",
    "ROLES",
    "WHOLE_COPIES",
    "Allocation",
    "AllocationError",
    "Choices",
    "Cluster",
    "Comparison",
    "DescriptionError",
    "Device",
    "DeviceError",
    "Efficiency",
    "Layout",
    "ModuleDescription",
    "NoPlanError",
    "Placement",
    "Plan",
    "PlanningError",
    "RoleProblem",
    "Sharding",
    "Workload",
    "allocate",
    "compare",
    "default_allocation",
    "describe_config",
    "describe_dimensions",
    "device_from",
    "named_device",
    "named_model",
    "role_problems",
    "typical_workload",
]
