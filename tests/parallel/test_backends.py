"""The backend of each rank's default group, with GPUs that ranks share or have for themselves."""

from __future__ import annotations

import pytest

from flowtrain_lightning.allocator import default_allocation
from flowtrain_lightning.parallel.ranks.groups import collective_backend


@pytest.mark.parametrize(
    ("device", "ranks", "placement", "shared", "backend"),
    [
        ("cuda", 8, "separate", 1, "nccl"),
        ("cuda", 16, "separate", 2, "nccl"),  # an encoder rank and a backbone rank on each of eight GPUs
        ("cuda", 2, "separate", 2, "nccl"),
        ("cuda", 2, "colocated", 2, "gloo"),
        ("cuda", 8, "colocated", 1, "nccl"),
        ("cpu", 8, "separate", 1, "gloo"),
    ],
)
def test_nccl_is_taken_where_no_two_ranks_of_a_group_share_a_gpu(device, ranks, placement, shared, backend):
    allocation = default_allocation(ranks, placement, ranks_per_device=shared)
    assert {collective_backend(device, rank, allocation, shared) for rank in range(ranks)} == {backend}


def test_each_role_is_looked_at_by_itself():
    allocation = default_allocation(4, "separate", 1, ranks_per_device=2)  # three backbone ranks on two GPUs
    assert [collective_backend("cuda", rank, allocation, 2) for rank in range(4)] == ["gloo", "gloo", "gloo", "nccl"]


def test_ranks_that_share_gpus_encode_on_all_of_them():
    assert default_allocation(16, ranks_per_device=2).ranks["encoder"] == tuple(range(1, 16, 2))
    assert default_allocation(8, "separate", 2, ranks_per_device=2).ranks["encoder"] == (5, 7)
    assert default_allocation(8, "separate", 5, ranks_per_device=2).ranks["encoder"] == (1, 3, 5, 6, 7)
    assert default_allocation(8, "separate", 2, devices_per_node=4, ranks_per_device=2).ranks["encoder"] == (3, 7)
