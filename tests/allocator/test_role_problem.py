"""What is planned for is what trains: a projector behind a frozen tower is work of the backbone."""

from __future__ import annotations

import numpy as np
import pytest

from flowtrain_lightning.allocator import Cluster, Workload, named_device, named_model, role_problems
from flowtrain_lightning.allocator.flops import model_flops

PATCHES, TOKENS = np.array([1024, 256]), np.array([900, 400])
WORKLOAD = Workload(TOKENS, {"image": PATCHES}, global_batch_size=8)
H100 = named_device("h100")


def planned(module):
    return role_problems(module, WORKLOAD, Cluster(H100, 8, 8))


@pytest.mark.parametrize(
    ("name", "handed_over"),
    [
        ("llava-1.5-7b", (1024, 1.0)),
        ("qwen2.5-vl-7b", (4 * 1280, 1 / 4)),
        ("gemma-3-4b", (1152, 1 / 16)),
    ],
)
def test_a_projector_behind_a_frozen_tower_is_the_backbones(name, handed_over):
    module = named_model(name).with_frozen("tower")
    problems = planned(module)
    encoder, backbone = problems["encoder"], problems["backbone"]
    assert not encoder.half.trains
    assert encoder.load.batches_in_flight == 1
    assert not backbone.receives_gradient
    assert encoder.half.result == pytest.approx(handed_over)
    projector = module.encoders["image"].trainable_parameters
    assert encoder.half.parameters == module.encoders["image"].parameters - projector
    assert backbone.half.trainable_parameters == module.backbone.trainable_parameters + projector


@pytest.mark.parametrize("name", ["llava-1.5-7b", "qwen2.5-vl-7b", "qwen3-vl-8b"])
@pytest.mark.parametrize("frozen", [("tower",), ("tower", "backbone")])
def test_both_roles_together_have_the_same_to_do(name, frozen):
    module = named_model(name).with_frozen(*frozen)
    whole = model_flops(module.encoders["image"], PATCHES) + model_flops(
        module.backbone, TOKENS, receives_gradient=True
    )
    parted = sum(problem.model_flops for problem in planned(module).values())
    assert parted == pytest.approx(whole * WORKLOAD.global_batch_size / len(TOKENS))


@pytest.mark.parametrize("frozen", [(), ("encoder",), ("backbone",)])
def test_elsewhere_it_stays_with_its_tower(frozen):
    module = named_model("qwen2.5-vl-7b").with_frozen(*frozen)
    assert planned(module)["encoder"].half == module.encoders["image"]
