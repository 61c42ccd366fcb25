"""Allocator: which ranks play which role, in which layout. Plain Python and numpy, without torch."""

from flowtrain_lightning.allocator.allocation import Allocation, AllocationError, Placement
from flowtrain_lightning.allocator.default import default_allocation
from flowtrain_lightning.allocator.layout import Layout, Sharding
from flowtrain_lightning.allocator.roles import BACKBONE, ENCODER, ROLES

__all__ = [
    "BACKBONE",
    "ENCODER",
    "ROLES",
    "Allocation",
    "AllocationError",
    "Layout",
    "Placement",
    "Sharding",
    "default_allocation",
]
