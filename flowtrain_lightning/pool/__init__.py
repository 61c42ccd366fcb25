"""Pool: one address space for features and gradients, moved between processes.

Read in this order: `pool.py` (what a user of it sees), `key.py`, `entry.py` and `address.py` (what lies where),
`segment.py`, `part.py`, `reservations.py` and `arena.py` (room), `meeting.py` and `rendezvous.py` (how processes find
each other), `mesh.py`, `inbox.py` and `stream.py` (how they talk), `liveness.py`, `board.py` and `faults.py` (who is
alive), `transport.py` and `ways.py` (how entries travel), the folder `between_hosts` (what differs there) and the
folder `device`: `runtime.py` (what is asked of a device), `tier.py`, `entries.py` (the order of streams), `opening.py`.
"""

from flowtrain_lightning.pool.address import Address, Tier
from flowtrain_lightning.pool.board import StatusBoard
from flowtrain_lightning.pool.counters import WAIT_LIMITS, Occupancy, PoolCounters
from flowtrain_lightning.pool.entry import entry_nbytes
from flowtrain_lightning.pool.errors import PeerFailed, PoolError
from flowtrain_lightning.pool.faults import fault_sentence, first_fault
from flowtrain_lightning.pool.key import Key
from flowtrain_lightning.pool.lease import Lease
from flowtrain_lightning.pool.liveness import State, Status, StatusPage
from flowtrain_lightning.pool.mesh import Mesh
from flowtrain_lightning.pool.pool import Pool
from flowtrain_lightning.pool.reservations import Reservation, lay_out

__all__ = [
    "WAIT_LIMITS",
    "Address",
    "Key",
    "Lease",
    "Mesh",
    "Occupancy",
    "PeerFailed",
    "Pool",
    "PoolCounters",
    "PoolError",
    "Reservation",
    "State",
    "Status",
    "StatusBoard",
    "StatusPage",
    "Tier",
    "entry_nbytes",
    "fault_sentence",
    "first_fault",
    "lay_out",
]
