"""FLOPs: causal halves, packing, windows, frozen parts."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain_lightning.allocator.description import Half
from flowtrain_lightning.allocator.flops import (
    FLASH_BACKWARD,
    attended_pairs,
    backward_flops,
    forward_flops,
    model_flops,
)
from flowtrain_lightning.allocator.module_parts import Dense, Embedding, Layers

torch = pytest.importorskip("torch")
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count  # noqa: E402

LENGTHS = np.array([5, 9, 2])


def counted_pairs(length, causal, window):
    pairs = product(range(length), repeat=2)
    if causal:
        return sum(k <= q and (window is None or q - k < window) for q, k in pairs)
    return sum(window is None or q // window == k // window for q, k in pairs)


@given(st.lists(st.integers(0, 12), min_size=1, max_size=4), st.booleans(), st.none() | st.integers(1, 14))
def test_pairs_are_those_that_a_mask_leaves_inside_each_packed_sequence(lengths, causal, window):
    expected = sum(counted_pairs(length, causal, window) for length in lengths)
    assert attended_pairs(np.array(lengths), causal, window) == expected


def test_packed_sequences_do_not_see_each_other():
    apart, together = attended_pairs(np.array([100, 100]), False, None), attended_pairs(np.array([200]), False, None)
    assert together == 2 * apart


class Attention(torch.nn.Module):
    """A layer as `Layers` describes it, without norms."""

    def __init__(self):
        super().__init__()
        linear = torch.nn.Linear
        self.entry = torch.nn.ModuleList([linear(16, 16, False), linear(16, 8, False), linear(16, 8, False)])
        self.leave, self.up, self.down = linear(16, 16, False), linear(16, 40, False), linear(40, 16, False)

    def forward(self, x):
        q, k, v = (one(x).unflatten(1, (-1, 8)).transpose(0, 1)[None] for one in self.entry)
        k, v = k.expand(1, 2, -1, 8), v.expand(1, 2, -1, 8)
        seen = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.leave(seen[0].transpose(0, 1).flatten(1))
        return x + self.down(torch.relu(self.up(x)))


HALF = Half((Embedding(50, 16), Dense(16, 16), Layers(2, 16, 40, 2, 1, 8), Dense(16, 12)))


def network():
    return torch.nn.Sequential(
        torch.nn.Embedding(50, 16), torch.nn.Linear(16, 16, False), Attention(), Attention(), torch.nn.Linear(16, 12)
    ).to("meta")


def counted(trains):
    net = network()
    for part, trainable in zip((net[:1], net[1:2], net[2:4], net[4:]), trains, strict=True):
        part.requires_grad_(trainable)
    with FlopCounterMode(display=False) as forward:
        out = net(torch.zeros(30, dtype=torch.long, device="meta"))
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    return forward.get_total_flops(), backward.get_total_flops()


@pytest.mark.parametrize("trains", [one for one in product([True, False], repeat=4) if any(one)])
def test_frozen_parts_skip_what_torch_skips(trains):
    parts = tuple(
        type(part)(**{**vars(part), "trainable": trainable}) for part, trainable in zip(HALF.parts, trains, strict=True)
    )
    half, lengths = Half(parts), np.array([30])
    forward, backward = counted(trains)
    assert forward_flops(half, lengths).total == pytest.approx(forward, rel=0.01)
    assert model_flops(half, lengths) == pytest.approx(forward + backward, rel=0.01)


def test_a_frozen_half_still_passes_gradients_on_to_what_trains_before_it():
    frozen = HALF.frozen()
    assert backward_flops(frozen, LENGTHS).total == 0
    passed = backward_flops(frozen, LENGTHS, receives_gradient=True)
    assert passed.dense == pytest.approx(forward_flops(frozen, LENGTHS).dense)


def test_a_tower_may_be_frozen_below_a_projector_that_trains():
    projector = 2 * 16 * 12 * LENGTHS.sum()
    assert backward_flops(HALF.frozen(keep_projector=True), LENGTHS).total == pytest.approx(projector)


def test_a_fused_kernel_computes_the_scores_again_and_mfu_does_not_count_that():
    shape = (1, 2, 30, 8)
    assert sdpa_backward_flop_count(shape, shape, shape, shape) / sdpa_flop_count(shape, shape, shape) == FLASH_BACKWARD
    attention = forward_flops(HALF, LENGTHS).attention
    computed = forward_flops(HALF, LENGTHS).total + backward_flops(HALF, LENGTHS).total
    assert computed - model_flops(HALF, LENGTHS) == pytest.approx(attention / 2)
