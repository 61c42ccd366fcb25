"""A half cut into stages: who holds what, and that stages one after another compute what the half does."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flowtrain_lightning.compute.stage_step import where_stages_look
from flowtrain_lightning.packing.stage_schedule import Schedule, StageSchedule
from flowtrain_lightning.packing.step_members import TWO_ROLES
from flowtrain_lightning.parallel.stages.stage_cut import cut_half, drop_other_stages
from flowtrain_lightning.parallel.stages.stage_forward import StageForward

WIDTH, VOCABULARY = 6, 11
ZB_V = StageSchedule(2, 2, "zb-v")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return x + scale * self.inner(x).tanh()


class Decoder(nn.Module):
    """Blocks between a tied embedding and head, with something between two of them."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.place = nn.Parameter(torch.randn(WIDTH))
        self.layers = nn.ModuleList(Block() for _ in range(blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = first = self.embed(tokens)[None] + self.place
        for number, layer in enumerate(self.layers):
            x = self.layer(layer, x, first)
            x = x * (number + 1.5)
        return self.head(self.norm(x)).square().sum()

    def layer(self, layer: nn.Module, x: Tensor, first: Tensor) -> Tensor:
        return layer(x, scale=0.5)


class ReadsAgain(Decoder):
    """Its layers read the embeddings beside what the layers before them have computed."""

    def layer(self, layer: nn.Module, x: Tensor, first: Tensor) -> Tensor:
        return layer(x) + first


class ComputesAgain(Decoder):
    """Its layers are computed again in the backward."""

    def layer(self, layer: nn.Module, x: Tensor, first: Tensor) -> Tensor:
        return checkpoint(layer, x, 0.5, use_reentrant=False)


class ComputesFromCopies(Decoder):
    """Its layers are computed again in the backward, from copies of what they were given."""

    def layer(self, layer: nn.Module, x: Tensor, first: Tensor) -> Tensor:
        return checkpoint(layer, x, use_reentrant=True)


class Whole(nn.Module):
    """A module whose backbone is a decoder."""

    def __init__(self, kind: type[Decoder] = Decoder, blocks: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.halves, self.role_graph = {"backbone": ("backbone",)}, TWO_ROLES
        self.backbone = kind(blocks).double()


def stages_of(
    count: int, virtual: int = 1, schedule: Schedule = "1f1b", kind: type[Decoder] = Decoder
) -> list[tuple[Whole, StageForward]]:
    """The stages of one module, each in a copy of its own."""
    found = []
    for stage in range(count):
        module = Whole(kind)
        cut = cut_half(module, "backbone", stage, StageSchedule(count, virtual, schedule))
        drop_other_stages(module, cut)
        found.append((module, forward := StageForward(module, cut)))
        forward.attach()
    return found


def held(module: nn.Module) -> set[str]:
    return {name for name, weight in module.named_parameters(remove_duplicate=False) if not weight.is_meta}


def run(stages: list[tuple[Whole, StageForward]], tokens: Tensor) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """The loss, and of each boundary what one stage makes and what the next one takes of it."""
    given, made, taken = None, [], []
    pipeline = stages[0][1].cut.pipeline
    for number in range(pipeline.runs):
        chunk, (module, forward) = number // len(stages), stages[pipeline.stage_of(number)]
        result = forward(module.backbone.forward, given, tokens, chunk=chunk)
        if not forward.cut.ends_in(chunk):
            made.append(result)
            given = result.detach().view(len(tokens), -1).requires_grad_()
            taken.append(given)
    return result, made, taken


def test_the_first_stage_holds_what_comes_before_the_blocks_and_the_last_the_rest():
    first, middle, last = (held(module) for module, _ in stages_of(3))
    assert first == {f"backbone.{name}" for name in ("embed.weight", "head.weight", "place")} | blocks(0)
    assert middle == blocks(1, 2), "the head takes as long as two blocks"
    assert last == {f"backbone.{n}" for n in ("embed.weight", "head.weight", "norm.weight", "norm.bias")} | blocks(3)


def test_of_virtual_stages_each_holds_several_runs_of_blocks():
    first, last = (held(module) for module, _ in stages_of(2, virtual=2))
    assert first == {f"backbone.{name}" for name in ("embed.weight", "head.weight", "place")} | blocks(0, 2)
    assert last == {f"backbone.{n}" for n in ("embed.weight", "head.weight", "norm.weight", "norm.bias")} | blocks(1, 3)


def test_in_a_v_the_first_stage_holds_both_ends():
    first, last = (held(module) for module, _ in stages_of(2, virtual=2, schedule="zb-v"))
    ends = ("embed.weight", "head.weight", "place", "norm.weight", "norm.bias")
    assert first == {f"backbone.{name}" for name in ends} | blocks(0, 3)
    assert last == blocks(1, 2)


def blocks(*numbers: int) -> set[str]:
    return {f"backbone.layers.{number}.inner.{name}" for number in numbers for name in ("weight", "bias")}


def test_buffers_of_blocks_are_where_the_blocks_are():
    for module, forward in stages_of(2):
        here = [number for number, block in enumerate(module.backbone.layers) if not block.calls.is_meta]
        assert here == [number for chunk in forward.cut.chunks for number in chunk]


PIPELINES = [(2, 1, "1f1b"), (3, 1, "1f1b"), (4, 1, "1f1b"), (2, 2, "1f1b"), (3, 1, "zb-h1"), (2, 2, "zb-v")]


@pytest.mark.parametrize(("count", "virtual", "schedule"), PIPELINES)
def test_stages_one_after_another_give_the_loss_and_all_gradients_of_the_whole(count, virtual, schedule):
    tokens, whole = torch.arange(7), Whole()
    expected = whole.backbone(tokens)
    expected.backward()
    stages = stages_of(count, virtual, schedule)
    loss, made, taken = run(stages, tokens)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    for output, entry in reversed(list(zip(made, taken, strict=True))):
        output.backward(entry.grad.view(output.shape))
    found: dict[str, Tensor] = {}
    for module, _ in stages:
        for name, weight in module.named_parameters():
            if weight.grad is not None:
                found[name] = found.get(name, 0) + weight.grad
    for name, weight in whole.named_parameters():
        torch.testing.assert_close(found[name], weight.grad, rtol=1e-12, atol=1e-12)


def test_a_half_of_too_few_blocks_is_refused_with_the_number_that_would_do():
    with pytest.raises(ValueError, match=re.escape("has pipeline 5, but 4 repeated blocks")):
        cut_half(Whole(), "backbone", 0, StageSchedule(5))
    with pytest.raises(
        ValueError, match=re.escape("has pipeline 3, with 2 runs of layers each, but 4 repeated blocks")
    ):
        cut_half(Whole(), "backbone", 0, StageSchedule(3, 2))


@pytest.mark.parametrize(
    ("shared", "pipeline", "stages"),
    [((0, 1), StageSchedule(4), "0 and 1"), ((0, 1, 3), StageSchedule(4), "0, 1 and 3"), ((0, 1), ZB_V, "0 and 1")],
)
def test_a_weight_of_blocks_in_several_stages_is_refused_where_nobody_sums_it(shared, pipeline, stages):
    module = Whole()
    for number in shared:
        module.backbone.layers[number].inner = module.backbone.layers[0].inner
    for stage in range(pipeline.stages):
        with pytest.raises(ValueError, match=re.escape(f"'backbone.layers.0.inner.weight' is used in stages {stages}")):
            cut_half(module, "backbone", stage, pipeline)


def test_a_weight_of_blocks_in_the_first_and_the_last_stage_is_one_of_both():
    module = Whole()
    module.backbone.layers[3].inner = module.backbone.layers[0].inner
    assert "backbone.layers.0.inner.weight" in cut_half(module, "backbone", 0, StageSchedule(4)).ties


def test_blocks_that_read_more_than_hidden_states_are_refused_with_a_weight():
    with pytest.raises(RuntimeError, match=re.escape("needs weights of the first stage beside the hidden states")):
        run(stages_of(2, kind=ReadsAgain), torch.arange(7))


def test_a_model_that_computes_blocks_again_does_so_from_the_same_hidden_states():
    loss, _, taken = run(stages_of(3), torch.arange(7))
    again, _, taken_again = run(stages_of(3, kind=ComputesAgain), torch.arange(7))
    loss.backward()
    again.backward()
    torch.testing.assert_close(taken_again[-1].grad, taken[-1].grad)


def test_one_that_does_not_know_them_is_told_who_does():
    loss, *_ = run(stages_of(2, kind=ComputesFromCopies), torch.arange(7))
    with pytest.raises(RuntimeError, match="recompute='full'"):
        loss.backward()


def test_the_module_of_a_stage_says_outside_of_steps_that_it_is_not_whole():
    (module, _), _ = stages_of(2)
    with pytest.raises(RuntimeError, match=re.escape("holds stage 0 of 2")):
        module.backbone(torch.arange(7))


def test_where_a_stage_meets_weights_of_another_it_says_how_both_find_theirs():
    (_, forward), _ = stages_of(2)
    said = where_stages_look("Whole", forward.cut)
    assert "Stage 0 of Whole has met weights that another stage holds, such as one of backbone.layers.3" in said
    assert "Register what runs before the repeated blocks before them" in said
