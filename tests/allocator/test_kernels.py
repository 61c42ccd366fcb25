"""Single kernels: how the shape of their work makes them slow."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from flowtrain_lightning.allocator import DEVICES
from flowtrain_lightning.allocator.coefficients import assumed_efficiency
from flowtrain_lightning.allocator.devices import TILE
from flowtrain_lightning.allocator.kernels import attention_seconds, product_seconds
from flowtrain_lightning.allocator.module_parts import Layers

H100 = DEVICES["h100"]
SHARE = assumed_efficiency(H100)


def product(m, n, k, groups=1, device=H100):
    return float(product_seconds(np.array([float(m)]), n, k, device, assumed_efficiency(device), 2, groups)[0])


def attention(length, head_size=128, causal=True):
    part = Layers(1, 32 * head_size, 1, 32, 32, head_size, causal=causal)
    pairs = length / 2 if causal else length
    return float(attention_seconds(part, pairs, np.array([65536.0]), H100, SHARE, 2)[0])


def test_a_large_product_reaches_the_rate_that_training_sustains():
    rate = 2 * 16384 * 8192 * 8192 / product(16384, 8192, 8192)
    assert rate == pytest.approx(SHARE.dense * H100.peak, rel=0.05)


def test_a_narrow_product_waits_for_memory():
    assert product(16384, 8192, 16) > 2 * 16384 * 8192 * 16 / (SHARE.dense * H100.peak) * 5


def test_a_product_of_less_than_a_wave_of_tiles_takes_as_long_as_a_wave():
    assert product(128, 128, 8192) == pytest.approx(product(512, 512, 8192), rel=0.01)


@pytest.mark.parametrize(("tokens", "slower"), [(256, 1.25), (512, 1.125), (4096, 1.016)])
def test_experts_compute_half_a_tile_more_than_their_tokens(tokens, slower):
    computes = replace(H100, memory_bandwidth=1e15)  # no product waits for memory
    together = product(tokens * 128, 1536, 2048, device=computes)
    assert product(tokens, 1536, 2048, groups=128, device=computes) / together == pytest.approx(slower, rel=0.02)


def test_larger_tiles_leave_more_of_the_last_wave_empty():
    b200 = DEVICES["b200"]
    smaller = replace(b200, tile=TILE**2)
    assert 1.02 < product(4096, 4096, 4096, device=b200) / product(4096, 4096, 4096, device=smaller) < 1.08


def test_attention_over_short_sequences_reaches_less_of_the_peak():
    assert attention(1024) / 1024 > 1.2 * attention(16384) / 16384


def test_heads_that_do_not_fill_a_tile_take_as_long_as_those_that_do():
    assert attention(4096, head_size=72) == pytest.approx(attention(4096, head_size=96))
