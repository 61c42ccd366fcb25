"""Scans and short convolutions of decoders begin anew in every packed sequence."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from flowtrain_lightning.models import pack_attention
from flowtrain_lightning.models.packed_scans import pack_scans, refuse_sharing

transformers = pytest.importorskip("transformers")

_SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "pad_token_id": 0,
}
_DECODERS: dict[str, dict[str, Any]] = {
    "lfm2": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "lfm3": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2, "head_dim": 8},
    "qwen3_5_text": {
        "layer_types": ["linear_attention", "full_attention"],
        "num_hidden_layers": 2,
        "head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
    "bamba": {
        "num_hidden_layers": 2,
        "attn_layer_indices": [1],
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 8,
        "mamba_expand": 2,
        "mamba_n_groups": 1,
        "mamba_chunk_size": 4,
    },
}
_QUICK = ("lfm2", "qwen3_5_text")
_LENGTHS = (5, 1, 9, 7)


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in _QUICK else pytest.mark.full) for name in _DECODERS]
)
def test_packed_sequences_have_the_hidden_states_and_gradients_that_each_has_alone(family):
    if family not in transformers.CONFIG_MAPPING:
        pytest.skip(f"this version of transformers has no {family}")
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[family](**_SMALL, **_DECODERS[family])
    own = transformers.AutoModel.from_config(config, dtype=torch.float64).train()
    packed = copy.deepcopy(own)
    pack_attention(packed)
    tokens = [torch.randint(1, 64, (1, length)) for length in _LENGTHS]
    positions = torch.cat([torch.arange(length) for length in _LENGTHS])[None]
    ends = torch.tensor([0, *_LENGTHS]).cumsum(0, dtype=torch.int32)
    bounds = {f"cu_seq_lens_{side}": ends for side in "qk"} | {f"max_length_{side}": max(_LENGTHS) for side in "qk"}
    expected = torch.cat([own(input_ids=each, use_cache=False).last_hidden_state for each in tokens], dim=1)
    found = packed(input_ids=torch.cat(tokens, dim=1), position_ids=positions, use_cache=False, **bounds)
    torch.testing.assert_close(found.last_hidden_state, expected, rtol=1e-6, atol=1e-7)
    expected.square().sum().backward()
    found.last_hidden_state.square().sum().backward()
    for (name, weight), other in zip(own.named_parameters(), packed.parameters(), strict=True):
        torch.testing.assert_close(
            other.grad, weight.grad, rtol=1e-5, atol=1e-6, msg=lambda said, name=name: f"{name}: {said}"
        )


@pytest.mark.parametrize("degree", ["tensor", "context"])
def test_ranks_that_would_share_a_scan_are_refused(degree):
    decoder = torch.nn.Sequential(torch.nn.Linear(2, 2))
    refuse_sharing(decoder, degree)
    scan = torch.nn.Module()
    scan.convolution = torch.nn.Conv1d(2, 2, 3)
    decoder.append(scan)
    pack_scans(decoder)
    with pytest.raises(NotImplementedError, match=f"which {degree} ranks cannot share"):
        refuse_sharing(decoder, degree)
