"""Packed attention inside models of Hugging Face: linear in the tokens, and refused where it would be wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import flowtrain_lightning as flow
from flowtrain_lightning.data import LoadedMedia
from flowtrain_lightning.data.loading.collate import pack_media
from flowtrain_lightning.models import pack_attention

transformers = pytest.importorskip("transformers")
from tests.exactness.layouts import trainer_for  # noqa: E402
from tests.models.tiny import FAMILIES  # noqa: E402
from tests.tiny import tiny_data, write_records  # noqa: E402

LENGTH = 32


def decoder(**changes: Any) -> Any:
    small = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.MistralConfig(**small, num_key_value_heads=1, vocab_size=64, **changes)
    return transformers.AutoModel.from_config(config)


def bounds(sequences: int) -> dict[str, Any]:
    ends = torch.arange(0, (sequences + 1) * LENGTH, LENGTH, dtype=torch.int32)
    return {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": LENGTH, "max_length_k": LENGTH}


def attention_work(model: Any, sequences: int, **arguments: Any) -> int:
    """FLOPs of attention, forward and backward, on so many sequences of ``LENGTH`` tokens."""
    embeddings = torch.randn(1, sequences * LENGTH, 16, requires_grad=True)
    positions = torch.arange(LENGTH).repeat(sequences)[None]
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        output = model(inputs_embeds=embeddings, position_ids=positions, use_cache=False, **arguments)
        output.last_hidden_state.sum().backward()
    return counter.get_flop_counts()["Global"][torch.ops.aten.bmm]


def test_work_grows_with_the_tokens_where_a_mask_makes_it_grow_with_their_square():
    masked = decoder(sliding_window=None)  # transformers finds the sequences by their positions, and masks
    packed = decoder(sliding_window=None)
    pack_attention(packed)
    of_masked = [attention_work(masked, sequences) for sequences in (4, 16)]
    of_packed = [attention_work(packed, sequences, **bounds(sequences)) for sequences in (4, 16)]
    assert of_masked[1] / of_masked[0] == pytest.approx(16, rel=0.01)
    assert of_packed[1] / of_packed[0] == pytest.approx(4, rel=0.01)
    assert of_masked[0] / of_packed[0] == pytest.approx(4, rel=0.01)


def test_layers_that_attend_within_windows_are_told_how_long_these_are():
    chosen, told = FAMILIES["qwen2_5_vl"], {}
    module = chosen.kind(chosen.config)
    module.configure_model()
    tower = module.model.model.visual
    for number, block in enumerate(tower.blocks):
        block.attn.register_forward_pre_hook(
            lambda _, args, kwargs, n=number: told.update({n: kwargs}), with_kwargs=True
        )
    patches = torch.randn(16 * 12, chosen.images.patch_dim).numpy()
    module.encode(pack_media([LoadedMedia(patches, (16, 12), 16 * 12 // 4)]))
    longest = {
        number: (int(kwargs["cu_seq_lens_q"].diff().max()), kwargs["max_length_q"]) for number, kwargs in told.items()
    }
    assert tower.fullatt_block_indexes == [1]
    assert longest == {0: (16, 16), 1: (192, 192)}


@pytest.mark.parametrize(
    ("changes", "arguments", "words"),
    [
        ({}, {}, r"was not told where .* Pass \*\*sequence_bounds\(batch\)"),
        ({"sliding_window": LENGTH - 1}, bounds(2), "sees 31 tokens back, but a sequence of 32 tokens came"),
        ({"attention_dropout": 0.1}, bounds(2), "uses dropout, which packed attention does not have"),
    ],
)
def test_what_packed_attention_does_not_compute_is_refused(changes, arguments, words):
    model = decoder(**changes)
    pack_attention(model)
    with pytest.raises(ValueError, match=words):
        attention_work(model.train(), 2, **arguments)


def test_a_run_that_would_drop_scores_is_refused_before_its_first_step(tmp_path):
    write_records(tmp_path, 2)
    config = FAMILIES["qwen2_vl"].config
    dropping = {**config, "text_config": {**config["text_config"], "attention_dropout": 0.1}}
    data = tiny_data(tmp_path, global_batch_size=2)
    with pytest.raises(ValueError, match=r"attention_dropout=0\.1, which packed attention does not have"):
        trainer_for("auto", max_steps=1).fit(flow.models.QwenVLM(dropping), datamodule=data)


def test_a_model_that_chooses_its_attention_itself_is_refused():
    model = transformers.AutoModel.from_config(transformers.MptConfig(d_model=16, n_heads=2, n_layers=1, vocab_size=64))
    with pytest.raises(TypeError, match="The attention of MptModel cannot be chosen"):
        pack_attention(model)
