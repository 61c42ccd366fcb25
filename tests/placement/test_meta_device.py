"""What runs on the meta device while numbers that steer it are read; models of eight families too."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode

from flowtrain_lightning.allocator import describe_config
from flowtrain_lightning.allocator.flops import forward_flops
from flowtrain_lightning.placement.meta_device import MetaTensorMode

pytest.importorskip("transformers")

from tests.allocator.live_models import CONFIGS, build


def test_numbers_that_steer_are_read_wherever_the_model_puts_them():
    vectors = torch.empty(6, 2, device="meta")
    with MetaTensorMode():
        ends = torch.tensor([0, 2, 6]).to(vectors.device)
        assert ends.diff().tolist() == [2, 4]
        assert torch.arange(3, device=vectors.device).tolist() == [0, 1, 2]
        assert [part.shape[0] for part in torch.split(vectors, ends.diff().tolist())] == [2, 4]


def test_vectors_are_picked_and_written_by_masks():
    vectors = torch.empty(4, 2, device="meta")
    mask = torch.tensor([True, False, True, True])
    with MetaTensorMode():
        assert vectors[mask].shape == (3, 2)
        assert vectors[mask, 0].shape == (3,)
        vectors[mask] = torch.zeros(3, 2)
        assert (vectors * torch.ones(4, 1)).is_meta


def test_what_is_computed_may_not_be_lost_in_a_tensor_on_the_cpu():
    part, whole = torch.empty(2, 2, device="meta"), torch.zeros(4, 2)
    with MetaTensorMode(), pytest.raises(RuntimeError, match="writes what is computed into a tensor on the CPU"):
        whole[:2] = part


@pytest.mark.parametrize(
    ("options", "pairs"),
    [
        ({}, 25),
        ({"is_causal": True}, 15),
        ({"attn_mask": torch.ones(5, 5, dtype=torch.bool).tril()}, 15),
        ({"attn_mask": torch.zeros(5, 5).masked_fill(~torch.eye(5, dtype=torch.bool), -torch.inf)}, 5),
    ],
)
def test_attention_counts_the_pairs_that_its_mask_leaves(options, pairs):
    query = torch.empty(1, 3, 5, 8, device="meta", requires_grad=True)
    with MetaTensorMode() as steered:
        out = scaled_dot_product_attention(query, query, query, **options)
        assert out.shape == query.shape
        assert steered.attention_flops == 3 * pairs * 4 * 8
        out.sum().backward()
        assert steered.attention_flops == 3 * 3 * pairs * 4 * 8
        assert query.grad.shape == query.shape


def counted(run):
    with MetaTensorMode() as steered, FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops() + steered.attention_flops


QUICK = ("qwen2_vl", "gemma3")


@pytest.mark.parametrize(
    "family", [name if name in QUICK else pytest.param(name, marks=pytest.mark.full) for name in sorted(CONFIGS)]
)
def test_live_models_run_without_weights_and_have_their_flops(family):
    live = build(family)
    for module in live.model.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(torch.empty_like(weight, device="meta")))
    described = describe_config(live.config)
    (encoder,) = described.encoders.values()
    tokens = np.array([40])
    assert counted(live.encode) == pytest.approx(forward_flops(encoder, live.lengths).total, rel=0.01)
    reading = counted(lambda: live.read(torch.empty(1, 40, 64, device="meta")))
    assert reading == pytest.approx(forward_flops(described.backbone, tokens).total, rel=0.01)
