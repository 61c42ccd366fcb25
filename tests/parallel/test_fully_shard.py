"""Halves in shards (FSDP2): what a rank holds, which blocks are gathered one by one, what is refused."""

from __future__ import annotations

import pytest
from torch import nn

from flowtrain_lightning.parallel.blocks import repeated_blocks
from tests.exactness.modules import DeepBackbone
from tests.forks import Job, read_down, run_jobs
from tests.parallel.sharding import Layer, Layered


def ran(tmp_path, function, ranks=2):
    job = Job(function, f"tests.parallel.sharding:{function}", ranks)
    return read_down(run_jobs(tmp_path, [job])[function].check().folder)


def test_blocks_are_what_a_list_of_modules_holds_several_times():
    half = Layered()
    assert repeated_blocks(half) == list(half.blocks)
    assert len(repeated_blocks(DeepBackbone())) == 4  # of one class: three in a list, and one that stands alone
    assert repeated_blocks(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))) == []


def test_an_outer_block_is_gathered_with_what_is_inside_of_it():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(2))

    half = nn.ModuleList(Pair() for _ in range(2))
    assert repeated_blocks(half) == list(half)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.full)])
def test_every_rank_holds_its_share_and_tells_what_it_has_used(tmp_path, ranks):
    of_ranks = ran(tmp_path, "memory_of_shards", ranks)
    for found in of_ranks:
        assert found["held"] <= found["whole"] / ranks * 1.1
        assert found["gradients"] == found["held"]
        assert found["unused"] == []
        assert all(found["as plain"])
        assert found["unused then"] == [0, 1]  # weight and bias of what stands before the layers
        assert found["given"] == [True, False]
        assert "has no gradient, though its layers computed with gradients" in found["refused"]
    assert len({found["layers"] for found in of_ranks}) == 1
    assert len({found["other layers"] for found in of_ranks}) == 2  # that layers were swapped raises nothing by itself


def test_weights_that_are_frozen_or_hooked_after_they_were_sharded_are_refused(tmp_path):
    for found in ran(tmp_path, "thaw_a_shard"):
        assert "`requires_grad` of a parameter was changed after its half was sharded" in found["thawed"]
        assert "`register_hook` on a weight in shards (FSDP2), which never calls it" in found["hooked"]
        assert found["again"] == ""


def test_layers_that_only_the_last_backward_leaves_out_are_refused_with_replicas(tmp_path):
    for found in ran(tmp_path, "skip_a_layer_at_last"):
        assert "last backward has left out layers" in found["refused"]


def test_a_loss_counts_its_weights_as_used_in_whatever_container_it_is_returned(tmp_path):
    for found in ran(tmp_path, "losses_in_containers"):
        assert found == {"tuple": [], "list": [], "named tuple": [], "mapping": []}


def test_weights_that_cannot_be_gathered_or_summed_together_are_refused(tmp_path):
    for said in ran(tmp_path, "share_a_layer"):
        assert "The weight 'widen.weight' of a Layer is a weight of other layers, too" in said["blocks"]
        assert "The weight 'narrow.weight' of a Layer is a weight of other layers, too" in said["outlet"]
        assert said["whole block"] == said["frozen dtype"] == ""
        assert "'bias' is torch.float32 and 'bias' is torch.float64" in said["several dtypes"]


def test_offloading_to_host_memory_changes_no_gradient(tmp_path):
    for found in ran(tmp_path, "offload_parameters"):
        assert found["True"] == found["False"] > 0
        # Three rows of 8 numbers go into inlet and outlet, and in each block 8 into the first layer and 32 into the
        # second, whose input the tanh keeps as well: it is counted as often as it is saved.
        rows = 4 * 3
        assert found["left"] == found["returned"]
        assert rows * (2 * 8 + 3 * (8 + 32)) <= found["left"] <= rows * (2 * 8 + 3 * (8 + 2 * 32))
