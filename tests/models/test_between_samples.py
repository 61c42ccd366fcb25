"""What would tie samples of a microbatch to each other is refused by its name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flowtrain_lightning.models import AnyVLM, pack_attention
from flowtrain_lightning.models.between_samples import refuse_growing_positions
from tests.models.test_packed_attention import LENGTH, bounds, decoder
from tests.models.tiny import FAMILIES

transformers = pytest.importorskip("transformers")

DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 24,
}


@pytest.mark.parametrize("by_any", [False, True])
def test_a_loss_that_balances_experts_over_a_batch(by_any):
    family = FAMILIES["qwen3_vl_moe"]
    asked_for = {**family.config["text_config"], "output_router_logits": True}
    kind: Any = AnyVLM if by_any else family.kind
    with pytest.raises(ValueError, match=r"output_router_logits on, .* would depend on how samples are packed"):
        kind({**family.config, "text_config": asked_for})


@pytest.mark.parametrize(("rope", "limit"), [(DYNAMIC, 20), (LONG, 24)])
def test_positions_that_follow_the_longest_sequence_beside(rope, limit):
    text = decoder(sliding_window=None, max_position_embeddings=20, rope_parameters=rope)
    embeddings, short = torch.randn(1, 2 * LENGTH, 16), limit - 4
    with torch.no_grad():
        alone = text(inputs_embeds=embeddings[:, :short]).last_hidden_state
        pack_attention(text)
        refuse_growing_positions(text)
        positions = torch.arange(short).repeat(2)[None]
        ends = torch.tensor([0, short, 2 * short], dtype=torch.int32)
        told = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": short, "max_length_k": short}
        packed = text(inputs_embeds=embeddings[:, : 2 * short], position_ids=positions, **told).last_hidden_state
        torch.testing.assert_close(packed[:, :short], alone)
        positions = torch.arange(LENGTH).repeat(2)[None]
        with pytest.raises(ValueError, match=rf"{LENGTH} tokens came to .* change beyond {limit} tokens, for all"):
            text(inputs_embeds=embeddings, position_ids=positions, **bounds(2))
