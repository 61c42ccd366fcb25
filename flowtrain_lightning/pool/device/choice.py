"""Whether entries use device memory: asked for by name, or found out."""

from __future__ import annotations

from typing import Literal

import torch

from flowtrain_lightning.pool.device.cuda import CudaRuntime
from flowtrain_lightning.pool.device.opening import open_device_tier
from flowtrain_lightning.pool.device.tier import DeviceTier
from flowtrain_lightning.pool.errors import PoolError
from flowtrain_lightning.pool.mesh import Mesh

TierChoice = Literal["auto", "host", "device"]


def choose_device_tier(choice: TierChoice, mesh: Mesh, device: torch.device, nbytes: int) -> DeviceTier | None:
    """The device tier of a rank, or None where all entries go through host memory. Every rank calls it alike.

    Args:
        choice: ``"auto"`` uses device memory between ranks that have proved at start that they can read it;
            ``"host"`` never does; ``"device"`` refuses what cannot.
        mesh: connects the ranks.
        device: on which this rank computes.
        nbytes: of device memory for entries of this rank.

    Raises:
        PeerFailed: when a peer ends meanwhile.
        PoolError: when device memory was asked for by name and cannot be used.
    """
    if choice == "device" and device.type != "cuda":
        raise PoolError(f"Device memory was asked for, but this rank computes on {device}. Use 'auto' or 'host'.")
    if choice == "host" or device.type != "cuda":
        return None
    return open_device_tier(mesh, CudaRuntime(device), nbytes, required=choice == "device")
