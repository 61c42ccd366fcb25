"""A plan divides layers among tensor ranks: what each holds, and which plans are refused."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.utils.parametrizations import weight_norm

from flowtrain_lightning.parallel import local_part
from flowtrain_lightning.parallel.gradients import local_gradient
from flowtrain_lightning.parallel.tensor_plan import TensorPlan, divide_layers
from tests.exactness.mixture import Perceptrons
from tests.forks import Job, read_down, run_jobs, write_down

PLAN: TensorPlan = {
    "half.words": "embedding_rowwise",
    "half.layers.*.widen": "colwise",
    "half.layers.*.narrow": "rowwise",
    "half.scores": "colwise_gather_output",
}
WITH_TOKENS: TensorPlan = {**PLAN, "half.layers.*": "divided_tokens"}
REFUSED: dict[str, TensorPlan] = {
    "a part of a key head": {"half.attention.k_proj": "colwise"},
    "nothing of that name": {"half.layer.*.widen": "colwise"},
    "an unknown style": {"half.scores": "diagonal"},  # type: ignore[dict-item]
    "another kind of module": {"half.words": "colwise"},
    "an odd width": {"half.odd": "colwise"},
    "a weight that is computed": {"half.scaled": "colwise"},
    "one of two that are tied": {"half.words": "embedding_rowwise"},
    "all tokens where none are divided": {"half.layers.0": "all_tokens"},
    "all tokens of experts": {"half.mixture": "all_tokens"},
    "a head where tokens are divided": {
        "half.layers.*": "divided_tokens",
        "half.layers.*.widen": "colwise_gather_output",
    },
}


class Widening(nn.Module):
    """What is repeated."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.widen, self.narrow = nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(self.widen(self.norm(x)).tanh())


class OneKeyHead(nn.Module):
    """Attention that says how many heads its keys have."""

    num_key_value_heads = 1

    def __init__(self) -> None:
        super().__init__()
        self.k_proj = nn.Linear(4, 4)


class Words(nn.Module):
    """An embedding, layers, and the embedding once more as a head."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.scores = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
        self.layers = nn.Sequential(Widening(), Widening())
        self.odd = nn.Linear(4, 3)
        self.scaled = weight_norm(nn.Linear(4, 4))
        self.attention = OneKeyHead()
        self.mixture = nn.ModuleDict({"experts": Perceptrons()})
        self.scores.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.scores(self.layers(self.words(tokens)))


def divide(folder: Path) -> None:
    """What a rank holds of a divided half and what it computes, beside the whole; and what of a plan is refused."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    mesh, tokens = init_device_mesh("cpu", (2,)), torch.arange(6)
    whole, half = _built(), _built()
    half.layers[1].narrow.requires_grad_(False)
    found: dict[str, Any] = {"summed": len(divide_layers({"half": half}, PLAN, mesh))}
    found["held"] = [local_part(weight).numel() for weight in (half.words.weight, half.layers[0].narrow.weight)]
    found["is tied"] = half.scores.weight is half.words.weight
    found["stays frozen"] = not half.layers[1].narrow.weight.requires_grad
    found["error"] = float((half(tokens) - whole(tokens)).abs().max())
    half.scores(torch.zeros(0, 4, dtype=torch.float64)).sum().backward()
    gradient = local_gradient(half.scores.weight)
    found["gradient of no rows"] = 0 if gradient is None else gradient.numel()
    found["of tokens"] = _of_tokens(mesh, whole)
    for name, plan in REFUSED.items():
        try:
            divide_layers({"half": _built()}, plan, mesh)
        except ValueError as error:
            found[name] = str(error)
    write_down(folder, found)
    dist.destroy_process_group()


def _of_tokens(mesh: DeviceMesh, whole: Words) -> dict[str, Any]:
    """What becomes of a plan whose layers divide tokens, for even, odd and very few ones."""
    half, errors, shares = _built(), [], []
    summed = divide_layers({"half": half}, WITH_TOKENS, mesh)
    half.layers[0].register_forward_hook(lambda _, args, share: shares.append(len(share)))
    for count in (6, 7, 1):
        tokens = torch.arange(count) % 6
        with CommDebugMode() as sent:
            made = half(tokens)
        errors.append(float((made - whole(tokens)).abs().max()))
    dtypes: list[str] = []
    single = Words()
    divide_layers({"half": single}, WITH_TOKENS, mesh)
    single.layers[0].widen.register_forward_pre_hook(lambda _, args: dtypes.append(str(args[0].dtype)))
    with torch.autocast("cpu", torch.bfloat16):
        single(tokens)
    counts = {operation.__name__: count for operation, count in sent.get_comm_counts().items()}
    return {"summed": len(summed), "errors": errors, "shares": shares, "sent": counts, "dtypes": dtypes}


def _built() -> Words:
    torch.manual_seed(0)
    return Words().double()


SENTENCES = {
    "nothing of that name": r"names 'half.layer.\*.widen', but the half has no such module",
    "an unknown style": "'half.scores' the style 'diagonal'; known are colwise, rowwise",
    "another kind of module": "'half.words' the style 'colwise', but it is Embedding, no Linear",
    "an odd width": "'half.odd' has out_features 3, which 2 tensor ranks cannot divide evenly",
    "a weight that is computed": "'half.scaled' the style 'colwise', but its weight is computed from other parameters",
    "a part of a key head": "'half.attention.k_proj.weight' makes 1 key and value heads, which 2 tensor ranks cannot",
    "all tokens where none are divided": "the layer that it is part of has no style 'divided_tokens'",
    "all tokens of experts": "'half.mixture' the style 'all_tokens', but it has experts, to which each tensor rank",
    "a head where tokens are divided": "a layer of divided tokens, which can have 'colwise' and 'rowwise' layers only",
    "one of two that are tied": "Embedding and Linear share one weight, but tensor_plan divides it in one of them only",
}


@pytest.fixture(scope="module")
def divided(tmp_path_factory):
    """What each of two ranks found."""
    job = Job("divide", f"{__name__}:divide", 2)
    return read_down(run_jobs(tmp_path_factory.mktemp("divided"), [job])["divide"].check().folder)


def test_ranks_hold_shares_of_layers_and_compute_what_the_whole_does(divided):
    for found in divided:
        assert found["held"] == [6 * 4 / 2, 8 * 4 / 2]
        assert found["is tied"]
        assert found["stays frozen"]
        assert found["summed"] == 0
        assert found["error"] < 1e-14


def test_the_gradient_of_a_head_without_target_tokens_is_divided_as_its_weight(divided):
    for found in divided:
        assert found["gradient of no rows"] == 6 * 4 / 2


def test_between_divided_layers_each_rank_has_a_share_of_any_number_of_tokens(divided):
    for found, shares in zip(divided, ([3, 4, 1], [3, 3, 0]), strict=True):
        assert found["of tokens"]["shares"][:3] == shares
        assert max(found["of tokens"]["errors"]) < 1e-14
        assert found["of tokens"]["summed"] == 2 * len(("norm.weight", "norm.bias"))


def test_a_sum_over_tensor_ranks_becomes_a_gather_before_and_a_scatter_after(divided):
    layers, behind_them = 2, 1
    for found in divided:
        sent = found["of tokens"]["sent"]
        assert sent["reduce_scatter_tensor"] == layers
        assert sent["all_gather_into_tensor"] == layers + behind_them + len(("scores",))
        assert sent["all_reduce"] == len(("words",))


def test_tokens_are_gathered_in_the_precision_in_which_layers_compute(divided):
    assert all(found["of tokens"]["dtypes"] == ["torch.bfloat16"] for found in divided)


def test_plans_that_cannot_be_followed_are_refused(divided):
    for found in divided:
        for name, sentence in SENTENCES.items():
            assert re.search(sentence, found[name]), found[name]
