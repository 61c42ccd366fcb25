"""Packed experts compute what those of Hugging Face do, in every precision, whatever other tokens there are."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flowtrain_lightning.models.packed_experts import pack_experts
from flowtrain_lightning.parallel.blocks import recompute_in_backward
from flowtrain_lightning.parallel.experts.experts import number_of_experts
from tests.exactness.compare import error
from tests.models.tiny import FAMILIES

transformers = pytest.importorskip("transformers")


@pytest.fixture
def text() -> Any:
    """A text model whose layers have four experts, two of which each token passes."""
    torch.manual_seed(1)
    module = FAMILIES["qwen3_vl_moe"].kind(FAMILIES["qwen3_vl_moe"].config)
    module.configure_model()
    return module.model.model.language_model


class Counted(TorchDispatchMode):
    """Counts grouped products inside, forwards' and backwards'."""

    products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.products += func is torch.ops.aten._grouped_mm.default
        return func(*args, **(kwargs or {}))


def computed(experts: Any, hidden: Tensor, chosen: Tensor, shares: Tensor) -> dict[str, Tensor]:
    experts.zero_grad()
    given = hidden.clone().requires_grad_()
    output = experts(given, chosen, shares)
    (output * torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)).sum().backward()
    found = {name: weight.grad.clone() for name, weight in experts.named_parameters()}
    return {**found, "hidden": given.grad, "output": output.detach()}


@pytest.mark.parametrize(
    ("dtype", "autocast", "limit"),
    [
        (torch.float64, False, 1e-12),
        (torch.float32, False, 1e-5),
        (torch.bfloat16, False, 2e-2),
        (torch.float32, True, 2e-2),
    ],
)
def test_outputs_and_gradients_are_those_of_hugging_faces_experts(text, dtype, autocast, limit):
    experts = text.layers[0].mlp.experts.to(dtype)
    hidden = torch.randn(7, 32, dtype=dtype)
    chosen = torch.tensor([[0, 3], [3, 1], [1, 0], [0, 1], [3, 0], [1, 3], [0, 1]])  # nobody chooses the third
    shares = torch.rand(7, 2, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
        found = computed(experts, hidden, chosen, shares)
        text.set_experts_implementation("eager")
        expected = computed(experts, hidden, chosen, shares)
    assert {name: (each.dtype, each.shape) for name, each in found.items()} == {
        name: (each.dtype, each.shape) for name, each in expected.items()
    }
    assert error(found, expected) <= limit
    assert not found["gate_up_proj"][2].any()
    assert found["gate_up_proj"][3].any()


class ClampedGate:
    """A gate of its own, as MiniMax M3's experts have."""

    def _apply_gate(self, wide: Tensor) -> Tensor:
        gate, up = wide.chunk(2, dim=-1)
        return (up.clamp(-0.1, 0.1) + 1.0) * gate * torch.sigmoid(1.7 * gate)


@pytest.mark.parametrize("change", ["transposed", "gate of its own", "biases"])
def test_experts_that_are_built_in_another_way_compute_by_their_own_rules(change):
    config = transformers.Qwen3MoeConfig(hidden_size=32, moe_intermediate_size=24, num_experts=4, num_hidden_layers=1)
    text = transformers.Qwen3MoeModel(config).double()
    experts = text.layers[0].mlp.experts
    hidden, chosen = torch.randn(3, 32, dtype=torch.float64), torch.tensor([[0, 3], [3, 1], [1, 0]])
    given = hidden, chosen, torch.rand(3, 2, dtype=torch.float64)
    if change == "gate of its own":
        experts.__class__ = type("Experts", (ClampedGate, type(experts)), {})
    text.set_experts_implementation("eager" if change == "biases" else "batched_mm")
    expected = computed(experts, *given)
    if change == "transposed":
        for name in ("gate_up_proj", "down_proj"):
            setattr(experts, name, torch.nn.Parameter(getattr(experts, name).detach().mT.contiguous()))
            expected[name] = expected[name].mT
        experts.is_transposed = True
    experts.has_bias = change == "biases"  # of which these have none, so that their own code computes the same
    pack_experts(text)
    assert (number_of_experts(experts) is None) == (change == "biases")
    assert error(computed(experts, *given), expected) <= 1e-12


@pytest.mark.parametrize(("recompute", "products"), [("none", 6), ("selective", 6), ("full", 8)])
def test_products_of_experts_are_kept_where_what_is_dear_is(text, recompute, products):
    experts = text.layers[0].mlp.experts.bfloat16()
    recompute_in_backward(experts, recompute)
    hidden = torch.randn(3, 32, dtype=torch.bfloat16)
    with Counted() as counted:
        computed(experts, hidden, torch.tensor([[0, 3], [3, 1], [1, 0]]), torch.rand(3, 2, dtype=torch.bfloat16))
    assert counted.products == products


def test_a_token_passes_the_same_experts_whatever_stands_beside_it(text):
    block, hidden = text.layers[0].mlp.double(), torch.randn(1, 9, 32, dtype=torch.float64)
    alone = torch.cat([block(token) for token in hidden.split(1, dim=1)], dim=1)
    torch.testing.assert_close(block(hidden), alone, rtol=0, atol=1e-12)


def test_a_folder_that_keeps_experts_transposed_is_read(tmp_path):
    family = FAMILIES["qwen3_vl_moe"]
    saved = family.kind(family.config)
    saved.configure_model()
    saved.model.save_pretrained(tmp_path)
    expected = {name: weight for name, weight in saved.model.named_parameters() if ".experts." in name}
    stored = load_file(tmp_path / "model.safetensors")
    turned = {n: w.mT.contiguous() if w.ndim == 3 and n in expected else w for n, w in stored.items()}
    save_file(turned, tmp_path / "model.safetensors", {"format": "pt"})
    loaded = family.kind(tmp_path)
    loaded.configure_model()
    found = dict(loaded.model.named_parameters())
    assert len(expected) == 4
    assert turned.keys() >= expected.keys()
    assert all(found[name].equal(weight) for name, weight in expected.items())
