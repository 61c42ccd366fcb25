"""The copy that is checked: its blocks cut where it is large, its dropout off."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from flowtrain_lightning.packing_check import checked_module, report_of
from flowtrain_lightning.packing_check.checked_module import NotCheckable, blocks_to_cut, dropout_settings
from tests.packing_check.wrong_modules import SeesAll
from tests.tiny import WIDTH, Block, TinyVLM, tiny_data, write_records


class Deep(TinyVLM):
    """Twelve blocks in the encoder, of which one is of another kind."""

    def configure_encoder(self) -> None:
        super().configure_encoder()
        self.encoder.blocks = nn.ModuleList(Block(WIDTH) for _ in range(12))
        self.encoder.blocks[3].mlp = nn.Identity()

    def encode(self, media: Any) -> Any:
        x = self.encoder.embed(media.patches)
        for block in self.encoder.blocks:
            x = block(x, media.cu_seqlens, media.max_seqlen, False)
        return tuple(head(x.unflatten(0, (-1, 4)).flatten(1)) for head in self.encoder.heads)


class DeepAndWrong(Deep, SeesAll):
    """The same with a mistake."""


def test_blocks_are_cut_behind_the_first_of_every_kind():
    module = Deep()
    module.configure_model()
    ((blocks, depth),) = blocks_to_cut(module)
    assert (len(blocks), depth) == (12, 4)


BUILT = pytest.param(True, marks=pytest.mark.full)


@pytest.mark.parametrize(
    ("kind", "count"), [(DeepAndWrong, 1), pytest.param(Deep, 0, marks=pytest.mark.full)], ids=["wrong", "right"]
)
@pytest.mark.parametrize("built", [False, BUILT])
def test_a_large_module_is_checked_with_fewer_blocks(tmp_path, monkeypatch, built, kind, count):
    monkeypatch.setattr(checked_module, "WHOLE", 1000)
    write_records(tmp_path, 16)
    module = kind()
    if built:
        module.configure_model()
    assert len(report_of(module, tiny_data(tmp_path)).findings) == count


def test_what_does_not_fit_into_memory_is_said_with_figures(tmp_path, monkeypatch):
    monkeypatch.setattr(checked_module, "WHOLE", 1000)
    monkeypatch.setattr(checked_module, "free_memory", lambda device: 1 << 20)
    write_records(tmp_path, 16)
    with pytest.raises(NotCheckable, match=r"weights need .* GB in float64, even with one block of every kind"):
        report_of(Deep(), tiny_data(tmp_path))


def test_dropout_is_known_by_what_layers_call_it():
    assert dropout_settings(nn.Dropout(0.1)) == ["p"]
    assert dropout_settings(nn.Dropout(0.0)) == []
    assert dropout_settings(nn.MultiheadAttention(4, 2, dropout=0.1)) == ["dropout"]
    assert dropout_settings(nn.Linear(2, 2)) == []
    attention = nn.Module()
    attention.attention_dropout = 0.2
    assert dropout_settings(attention) == ["attention_dropout"]


def test_batch_norm_of_one_transposed_item_is_right_whatever_torch_does():
    layer = nn.BatchNorm2d(4).double().eval()
    batch, gradient = torch.randn(1, 4, 5, 5).double(), torch.randn(1, 25, 4).double()
    checked_module.freeze_batch_norms(nn.Sequential(layer))
    (layer(batch).flatten(2).transpose(1, 2) * gradient).sum().backward()
    by_hand = (batch.flatten(2).transpose(1, 2) * gradient).sum((0, 1)) / (1 + layer.eps) ** 0.5
    torch.testing.assert_close(layer.weight.grad, by_hand)
