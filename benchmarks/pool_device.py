"""How fast entries are put into GPU memory, beside a plain copy on the device."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed import HashStore  # type: ignore[attr-defined]

from flowtrain_lightning.pool import Key, Mesh, Pool, Tier, choose_device_tier, entry_nbytes

MIB = 1 << 20
SIZES = (MIB, 16 * MIB, 64 * MIB, 256 * MIB)


def measure_device(samples: int) -> list[dict[str, Any]]:
    """Figures of every size, on the first GPU; puts and copies are taken in turn.

    A put is measured until its bytes are there (``put_us``) and until the call returns (``host_us``).
    """
    device = torch.device("cuda", 0)
    nbytes = entry_nbytes([max(SIZES)])
    mesh = Mesh.connect(HashStore(), 0, 1, ["owner"])
    tier = choose_device_tier("device", mesh, device, nbytes)
    pool = Pool.open(mesh, nbytes, 0, device=tier)
    try:
        return [_measure_size(pool, device, size, samples) for size in SIZES]
    finally:
        pool.close()
        if tier is not None:
            tier.close()
        mesh.close()


def _measure_size(pool: Pool, device: torch.device, nbytes: int, samples: int) -> dict[str, Any]:
    source = torch.randint(0, 255, (nbytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copies, puts, calls = [], [], []
    for sample in range(samples + 3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize()
        copies.append(time.perf_counter() - start)
        start = time.perf_counter()
        _put(pool, Key(0, nbytes, sample), source)
        calls.append(time.perf_counter() - start)
        torch.cuda.synchronize()
        puts.append(time.perf_counter() - start)
        lease = pool.get(Key(0, nbytes, sample))
        assert lease is not None
        assert torch.equal(lease.tensors[0], source)
        lease.release()
    copied, put, called = (np.array(values[3:]) for values in (copies, puts, calls))
    return {
        "way": "device",
        "cores": "idle",
        "device_bytes": nbytes,
        "copy_us": 1e6 * float(np.median(copied)),
        "put_us": 1e6 * float(np.median(put)),
        "host_us": 1e6 * float(np.median(called)),
        "bandwidth_share": float(np.median(copied / put)),
    }


def _put(pool: Pool, key: Key, tensor: Tensor) -> None:
    address = pool.put(key, [tensor], [0])
    assert address is not None
    assert address.tier is Tier.DEVICE
