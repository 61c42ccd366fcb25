"""Halves that do not fit on the device whole."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from flowtrain_lightning.data import IndexConfig, PackedMedia
from flowtrain_lightning.packing import CostModel
from flowtrain_lightning.placement import half_timing
from flowtrain_lightning.placement.module_profile import profile_module
from flowtrain_lightning.placement.profile import ProfileError
from tests.placement.emulated import Clock
from tests.tiny import IMAGES, WIDTH, Block, TinyVLM, tiny_data, write_records

DEPTH = 6
LAYER = CostModel(linear=5e-5, quadratic=0.0, constant=1e-3)
"""What one layer of the encoder takes; all else takes no time but what lies in the backbone."""


class DeepEncoder(nn.Module):
    """Layers of which only two fit."""

    def __init__(self, windowed: int = 0) -> None:
        super().__init__()
        self.embed = nn.Linear(IMAGES.patch_dim, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(DEPTH))
        self.head = nn.Linear(4 * WIDTH, WIDTH)
        self.windowed = windowed

    def forward(self, media: PackedMedia) -> torch.Tensor:
        x = self.embed(media.patches)
        for number, block in enumerate(self.blocks):
            if not x.is_meta:
                if len(self.blocks) > 2:
                    raise torch.OutOfMemoryError("no memory is left")
                DeepVLM.clock.pass_by(LAYER.of_set(np.diff(media.cu_seqlens.numpy())))
            again = number >= DEPTH - self.windowed
            for _ in range(1 + again):
                x = block(x, media.cu_seqlens, media.max_seqlen, False)
        return self.head(x.unflatten(0, (-1, 4)).flatten(1))


class DeepVLM(TinyVLM):
    """Its encoder is too deep for the device."""

    clock = Clock()
    windowed = 0

    def configure_encoder(self):
        self.encoder = DeepEncoder(self.windowed)

    def backbone_step(self, batch, features, stage):
        self.clock.pass_by(1e-3)
        return super().backbone_step(batch, features, stage)


@pytest.fixture
def data(tmp_path):
    write_records(tmp_path, 48)
    return tiny_data(tmp_path, token_budget=100, index=IndexConfig(too_long="drop"))


def profiled(module, data, **settings):
    return profile_module(module, data, accelerator="cpu", progress=False, seconds=0.0, reduction=False, **settings)


@pytest.mark.parametrize("build_first", [False, pytest.param(True, marks=pytest.mark.full)], ids=["not_built", "built"])
def test_what_a_layer_adds_counts_for_all_of_them(data, monkeypatch, build_first):
    monkeypatch.setattr(half_timing, "now", DeepVLM.clock.now)
    monkeypatch.setattr(Clock, "pass_by", lambda self, seconds: setattr(self, "seconds", self.seconds + seconds))
    module = DeepVLM(freeze_encoder=True)
    if build_first:
        module.configure_model()
    with pytest.warns(
        UserWarning, match="DeepVLM does not fit on .* whole. Each half is measured with one and with two"
    ):
        profile = profiled(module, data)
    assert not profile.whole
    for lengths in (np.array([40]), np.array([24, 24, 60])):
        assert profile.media_costs["encoder"].of_set(lengths) == pytest.approx(DEPTH * LAYER.of_set(lengths), rel=0.01)
    whole = DeepEncoder()
    assert profile.roles["encoder"].parameters == sum(weight.numel() for weight in whole.parameters())


@pytest.mark.filterwarnings("ignore:.*does not fit on")
def test_the_flops_are_those_of_the_whole_module(data):
    profile = profiled(DeepVLM(), data, flops=True)
    per_layer = 2 * WIDTH * (3 * WIDTH + WIDTH + 4 * WIDTH)
    ends = 2 * (IMAGES.patch_dim * WIDTH + WIDTH * WIDTH)
    assert profile.roles["encoder"].flops.forward.linear == pytest.approx(DEPTH * per_layer + ends, rel=0.01)
    assert profile.roles["backbone"].optimizer_seconds > 0


@pytest.mark.filterwarnings("ignore:.*does not fit on")
def test_layers_that_are_not_alike_are_refused(data):
    class Uneven(DeepVLM):
        windowed = 2

    with pytest.raises(
        ProfileError, match="layers of its encoder are not alike: by those of one layer and of two, all 6"
    ):
        profiled(Uneven(), data)


@pytest.mark.filterwarnings("ignore:.*does not fit on")
def test_without_a_list_of_layers_it_takes_a_larger_device(data):
    class NoList(TinyVLM):
        def encode(self, media):
            raise torch.OutOfMemoryError("no memory is left")

    with pytest.raises(
        ProfileError, match=r"NoList does not fit on the device, and none of its halves has an nn\.Module"
    ):
        profiled(NoList(), data)
