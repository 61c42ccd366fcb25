"""Pool: one address space for features and gradients, moved between processes.

How an entry is put, found, read and given back: `pool.py`; how it lies in memory: `entry.py`; which bytes it gets:
`memory_region.py`; how ranks tell each other: `mesh.py` and `control_records.py`. Beside these: `address.py`,
`shared_memory.py`, `rendezvous.py` (how ranks connect at start), `socket_stream.py`, `status_page.py` and
`status_board.py` (who is alive and who is to blame), the folder `device` (entries in GPU memory) and the folder
`between_hosts` (ranks of other hosts).
"""

from flowtrain_lightning.pool.address import MAX_OWNERS, MAX_SEGMENT_BYTES, Address, Tier, address_layout
from flowtrain_lightning.pool.between_hosts.location import address_of, address_towards, describe_ways, interface_of
from flowtrain_lightning.pool.control_records import ORDERED_STORES
from flowtrain_lightning.pool.counters import WAIT_LIMITS, Occupancy, PoolCounters
from flowtrain_lightning.pool.device.cuda_ipc import CudaRuntime, runtime_of
from flowtrain_lightning.pool.device.device_opening import TierChoice, choose_device_tier, open_device_tier
from flowtrain_lightning.pool.device.device_tier import DeviceRuntime, DeviceTier
from flowtrain_lightning.pool.entry import Key, entry_nbytes
from flowtrain_lightning.pool.lease import Lease
from flowtrain_lightning.pool.memory_region import AssignedOffsets, MemoryRegion, Reservation, assign_offsets
from flowtrain_lightning.pool.mesh import Mesh
from flowtrain_lightning.pool.pool import Pool
from flowtrain_lightning.pool.pool_errors import PeerFailed, PoolError
from flowtrain_lightning.pool.self_test import SelfTest, self_test
from flowtrain_lightning.pool.shared_memory import available_memory, create_memory, map_memory
from flowtrain_lightning.pool.status_board import (
    StatusBoard,
    blame_fault,
    fault_sentence,
    find_fault,
    first_fault,
    has_ended,
)
from flowtrain_lightning.pool.status_page import State, Status, StatusPage, is_stopped
from flowtrain_lightning.pool.transport import NetworkChoice

__all__ = [
    "MAX_OWNERS",
    "MAX_SEGMENT_BYTES",
    "ORDERED_STORES",
    "WAIT_LIMITS",
    "Address",
    "AssignedOffsets",
    "CudaRuntime",
    "DeviceRuntime",
    "DeviceTier",
    "Key",
    "Lease",
    "MemoryRegion",
    "Mesh",
    "NetworkChoice",
    "Occupancy",
    "PeerFailed",
    "Pool",
    "PoolCounters",
    "PoolError",
    "Reservation",
    "SelfTest",
    "State",
    "Status",
    "StatusBoard",
    "StatusPage",
    "Tier",
    "TierChoice",
    "address_layout",
    "address_of",
    "address_towards",
    "assign_offsets",
    "available_memory",
    "blame_fault",
    "choose_device_tier",
    "create_memory",
    "describe_ways",
    "entry_nbytes",
    "fault_sentence",
    "find_fault",
    "first_fault",
    "has_ended",
    "interface_of",
    "is_stopped",
    "map_memory",
    "open_device_tier",
    "runtime_of",
    "self_test",
]
