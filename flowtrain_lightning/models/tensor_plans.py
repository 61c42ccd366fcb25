"""Plans that divide the halves of Hugging Face models among tensor-parallel ranks.

`transformers` has plans for the layers of most decoders. What it lacks is here: embeddings, heads, the norms of
attention heads, decoders whose plan has no layers (Qwen3-VL), the division of tokens between layers, and towers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from flowtrain_lightning.models.packed_scans import refuse_sharing
from flowtrain_lightning.parallel import TensorPlan, TensorStyle
from flowtrain_lightning.parallel.experts.expert_parallel import experts_of

_DECODER: Mapping[str, TensorStyle] = {
    "layers.*.self_attn.q_proj": "colwise",
    "layers.*.self_attn.k_proj": "colwise",
    "layers.*.self_attn.v_proj": "colwise",
    "layers.*.self_attn.o_proj": "rowwise",
    "layers.*.mlp.gate_proj": "colwise",
    "layers.*.mlp.up_proj": "colwise",
    "layers.*.mlp.down_proj": "rowwise",
}
"""Of decoders that are built as Llama's and whose plan has no layers."""

_TOKENS: Mapping[str, TensorStyle] = {
    "layers.*": "divided_tokens",
    "layers.*.self_attn": "all_tokens",
    "layers.*.mlp": "all_tokens",
}
"""Of all decoders: less memory for the same that ranks send, so nobody would do without."""

_MAKES: Mapping[str, str] = {"num_attention_heads": "q_proj.weight", "num_key_value_heads": "k_proj.weight"}
"""Number of heads of a decoder's config -> the weight that makes them."""

_HEAD_NORMS = ("q_norm", "k_norm")

_ATTENTION = {"layers.*.self_attn.q_proj", "layers.*.self_attn.o_proj"}
"""Layers that a plan must name, else ranks would compute the same attention twice."""

_WITHIN_LAYERS = ("colwise", "rowwise", "replicated_with_grad_allreduce")
"""Styles that layers of divided tokens can have, of those that ``transformers`` knows."""

_PERCEPTRONS = (
    (("gate_proj", "up_proj"), "down_proj"),
    (("fc1",), "fc2"),
    (("linear_fc1",), "linear_fc2"),
    (("linear_1",), "linear_2"),
)
"""Names of a perceptron's layers in towers and projectors: those that widen, and the one that narrows."""


def decoder_plan(decoder: Any, head: nn.Module, names: Mapping[nn.Module, str], ranks: int) -> TensorPlan:
    """The plan of a decoder, its embedding and its head.

    Args:
        decoder: of Hugging Face, without head.
        head: makes scores of what the decoder returns.
        names: module -> its path.
        ranks: tensor-parallel ranks.

    Raises:
        ValueError: they cannot share the attention heads evenly, nor its mixture of experts, or neither
            ``transformers`` nor this package has a plan for its attention.
        NotImplementedError: it has scans or convolutions over tokens.
    """
    config, path = decoder.config, names[decoder]
    refuse_sharing(decoder, "tensor")
    if any(name.endswith(".experts") and not experts_of([part]) for name, part in decoder.named_modules()):
        raise ValueError(
            f"{type(decoder).__name__} has experts of a kind of their own (biases or norms), which {ranks} tensor "
            "ranks cannot share; divide the backbone by shard='fsdp' instead, among ranks that each have microbatches "
            "of their own, or by context."
        )
    for name in _MAKES:
        if getattr(config, name, ranks) % ranks:
            raise ValueError(
                f"{type(decoder).__name__} has {name} {getattr(config, name)} (made by "
                f"{f'{path}.layers.0.self_attn.{_MAKES[name]}'!r} and its like), which {ranks} tensor ranks cannot "
                "share evenly; take a tensor degree that divides it."
            )
    plan = {f"{path}.{name}": style for name, style in _layers_plan(decoder).items()}
    if config.vocab_size % ranks == 0:
        plan |= {names[decoder.get_input_embeddings()]: "embedding_rowwise", names[head]: "colwise_gather_output"}
    return plan


def _layers_plan(decoder: Any) -> dict[str, TensorStyle]:
    """The plan of a decoder's layers, by ``transformers`` where it has one.

    A perceptron that it divides in another way than here stays whole: each rank then computes it for its share of the
    tokens.
    """
    given = getattr(decoder.config, "base_model_tp_plan", None) or {}
    layers: Mapping[str, TensorStyle] = {n: style for n, style in given.items() if n.startswith("layers.")} or _DECODER
    unknown = {name.rpartition(".")[0] for name, style in layers.items() if style not in _WITHIN_LAYERS}
    own = {f"layers.*.{name}" for layer in decoder.layers for name, _ in layer.named_modules()}
    plan = {name: style for name, style in layers.items() if name in own and not name.startswith(tuple(unknown))}
    if not plan.keys() >= _ATTENTION:
        raise ValueError(
            f"Neither transformers nor flowtrain has a plan by which tensor ranks share the attention of "
            f"{type(decoder).__name__}. Divide the backbone by shard='fsdp', or by context."
        )
    for norm in (f"layers.*.self_attn.{name}" for name in _HEAD_NORMS):
        if norm in own:
            plan[norm] = "replicated_with_grad_allreduce"
    has_perceptrons = any(name.startswith("layers.*.mlp.") for name in plan)
    return {**plan, **{name: style for name, style in _TOKENS.items() if has_perceptrons or not name.endswith("mlp")}}


def perceptron_plan(modules: Mapping[str, nn.Module], ranks: int) -> TensorPlan:
    """The plan of towers and projectors: their perceptrons are divided, and attention is whole on every rank.

    Most towers have queries, keys and values in one layer, whose outputs cannot be cut into equal parts by head.

    Args:
        modules: path -> module.
        ranks: tensor-parallel ranks; a perceptron whose width they do not divide stays whole.
    """
    plan: dict[str, TensorStyle] = {}
    found = {name: part for path, half in modules.items() for name, part in half.named_modules(prefix=path)}
    for name, part in found.items():
        layers = dict(part.named_children())
        for widening, narrowing in _PERCEPTRONS:
            last = layers.get(narrowing)
            if not isinstance(last, nn.Linear) or not layers.keys() >= set(widening) or last.in_features % ranks:
                continue
            wide = last.in_features  # of a layer that makes two halves in one, and of a norm between, it is another
            if any(getattr(layers[each], "out_features", 0) != wide for each in widening) or any(
                weight.shape == (wide,)
                for each in layers.keys() - {*widening, narrowing}
                for weight in layers[each].parameters()
            ):
                continue
            plan |= {f"{name}.{each}": "colwise" for each in widening}
            plan[f"{name}.{narrowing}"] = "rowwise"
    return plan
