"""Weights that were put off while a module was built are, to the bit, those of building it at once."""

from __future__ import annotations

import copy
import weakref

import pytest
import torch
from torch import Tensor, nn

from flowtrain_lightning.parallel.noting import noting
from flowtrain_lightning.parallel.ranks.building_log import BuildingLog
from flowtrain_lightning.parallel.ranks.random_streams import enter_stream, own_streams
from flowtrain_lightning.parallel.unfilled_weights import UnfilledWeights, build_without_weights

CPU = torch.device("cpu")
STREAM = ("weights", "test")


class Many(nn.Module):
    """Weights that come about in as many ways as there are."""

    def build(self) -> None:
        self.embed = nn.Embedding(50, 16, padding_idx=3)
        self.truncated = nn.init.trunc_normal_(nn.Linear(16, 32).weight, std=0.02)
        self.narrow = nn.init.trunc_normal_(nn.Linear(16, 32).weight, a=1.0, b=1.5)
        self.orthogonal = nn.Linear(16, 8)
        nn.init.orthogonal_(self.orthogonal.weight)
        self.sparse = nn.Linear(8, 8)
        nn.init.sparse_(self.sparse.weight, 0.5)
        self.norm = nn.BatchNorm1d(4)
        self.token = nn.Parameter(torch.zeros(1, 1, 7))
        nn.init.normal_(self.token)
        layer = nn.TransformerEncoderLayer(16, 2, batch_first=True)
        self.layers = nn.ModuleList(copy.deepcopy(layer) for _ in range(2))
        self.recurrent = nn.LSTM(4, 8)
        self.rates = [rate.item() for rate in torch.linspace(0, 0.1, 3)]
        self.turned = nn.Parameter(torch.randn(4, 6).t() * 3)
        self.given = nn.Parameter(torch.tensor([1.0, 2.0]))
        self.product = nn.Parameter(torch.ones(600, 600) @ torch.ones(600, 600))
        self.head = nn.Linear(16, 50)
        self.head.weight = self.embed.weight
        self.register_buffer("places", torch.zeros(5, 4))
        self.places[:, 0::2] = torch.sin(torch.arange(5.0)[:, None] * torch.ones(2))
        self.register_buffer("noise", torch.rand(3))
        self.apply(redraw)
        self.half = nn.Linear(3, 3).to(torch.bfloat16)


def redraw(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        module.weight.data.normal_(0, 0.1)


def built_at_once(kind: type[nn.Module]) -> nn.Module:
    module = kind()
    with own_streams():
        enter_stream(*STREAM)
        module.build()
    return module


def differing(one: nn.Module, other: nn.Module) -> list[str]:
    left, right = one.state_dict(), other.state_dict()
    assert left.keys() == right.keys()
    return [n for n in left if not (torch.equal(left[n], right[n]) and left[n].stride() == right[n].stride())]


def test_weights_that_are_filled_in_are_those_of_building_at_once():
    module = Many()
    weights = UnfilledWeights(module, module.build, STREAM)
    assert all(parameter.is_meta for parameter in module.parameters())
    assert not any(buffer.is_meta for buffer in module.buffers())
    weights.fill(module, lambda name: True, CPU)
    assert differing(module, built_at_once(Many)) == []
    assert module.head.weight is module.embed.weight
    assert module.rates == built_at_once(Many).rates


def test_a_part_of_the_weights_can_be_filled_alone():
    module = Many()
    weights = UnfilledWeights(module, module.build, STREAM)
    weights.fill(module, lambda name: name.startswith("recurrent"), CPU)
    assert differing(module.recurrent, built_at_once(Many).recurrent) == []
    assert module.embed.weight.is_meta


def test_a_weight_takes_the_precision_to_which_its_module_was_converted_meanwhile():
    module = Many()
    weights = UnfilledWeights(module, module.build, STREAM)
    module.to(torch.bfloat16)
    weights.fill(module, lambda name: True, CPU)
    assert differing(module, built_at_once(Many).to(torch.bfloat16)) == []


class Turned(nn.Module):
    """Reads a stack of matrices that lie the other way round, and are of another precision, as loaders do."""

    read = torch.randn(3, 512, 384).bfloat16()

    def build(self) -> None:
        self.stack = nn.Parameter(self.read.to(torch.float32).transpose(1, 2).contiguous())
        self.same = nn.Parameter(self.read.transpose(1, 2).contiguous())
        self.rounded = nn.Parameter(self.stack.detach().to(torch.bfloat16).to(torch.float32) * 1)


def test_what_is_turned_after_it_was_read_is_read_part_by_part():
    module = Turned()
    weights = UnfilledWeights(module, module.build, STREAM)
    assert module.stack.is_meta
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BuildingLog, "make", lambda *_: pytest.fail("all of it was made"))
        weights.fill(module, lambda name: name != "rounded", CPU)
    weights.fill(module, lambda name: name == "rounded", CPU)
    assert differing(module, built_at_once(Turned)) == []


def test_weights_that_were_there_before_stay_as_they_are():
    class Begun(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.early = nn.Linear(2, 2)

        def build(self) -> None:
            self.late = nn.Linear(2, 2)

    module = Begun()
    early = module.early.weight
    weights = UnfilledWeights(module, module.build, STREAM)
    assert module.early.weight is early
    assert module.late.weight.is_meta
    weights.fill(module, lambda name: True, CPU)
    assert module.early.weight is early


class Reads(nn.Module):
    def build(self) -> None:
        self.layer = nn.Linear(2, 2)
        self.scale = float(self.layer.weight.norm())


class Hides(nn.Module):
    def build(self) -> None:
        self.layer = nn.Linear(2, 2)
        self.tables = [torch.rand(2)]


class DrawsElsewhere(nn.Module):
    def build(self) -> None:
        self.weight = nn.Parameter(torch.empty(2).normal_(generator=torch.Generator().manual_seed(1)))


class WritesOutside(nn.Module):
    seen = torch.zeros(2)

    def build(self) -> None:
        self.layer = nn.Linear(2, 2)
        self.seen.copy_(self.layer.bias.detach())


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Reads, "cannot be called on meta tensors"),
        (Hides, r"Hides\.tables holds tensors that are no parameters"),
        (DrawsElsewhere, "draws from a generator of its own"),
        (WritesOutside, "writes what is drawn into a tensor that is there"),
    ],
)
def test_what_cannot_be_put_off_is_told_and_left_to_building_at_once(kind, reason):
    module = kind()
    with pytest.warns(UserWarning, match=f"Every rank builds the whole half.*{kind.__name__}.*{reason}"):
        assert build_without_weights(module, module.build, STREAM) is None


def test_a_tensor_that_changes_after_it_was_copied_into_a_weight_is_refused():
    table = torch.ones(2, 2)

    class Copies(nn.Module):
        def build(self) -> None:
            self.layer = nn.Linear(2, 2)
            self.layer.weight.data.copy_(table)

    module = Copies()
    weights = UnfilledWeights(module, module.build, STREAM)
    table.zero_()
    with pytest.raises(RuntimeError, match="was changed afterwards"):
        weights.fill(module, lambda name: True, CPU)


def test_no_more_than_one_weight_beside_the_filled_ones_is_in_memory():
    """Counted are the memories that `take` was handed and that are still held when the next one comes."""
    log = BuildingLog(CPU)
    with noting(log):
        layers = [nn.Linear(64, 64) for _ in range(8)]
    alive: list[weakref.ref] = []
    most = 0

    def take(number: int, memory: torch.UntypedStorage) -> None:
        nonlocal most
        view: Tensor = torch.empty(0).set_(memory)
        alive.append(weakref.ref(view.untyped_storage()))
        del view
        most = max(most, sum(one() is not None for one in alive))

    log.make([noted for layer in layers for p in layer.parameters() if (noted := log.noted(p))], take)
    assert len(alive) == 16
    assert most == 1


def test_nothing_is_drawn_for_unwanted_weights_where_any_numbers_will_do():
    log = BuildingLog(CPU)
    with noting(log):
        layers = [nn.Linear(8, 8, bias=False) for _ in range(3)]
    last = log.noted(layers[2].weight)
    assert last is not None

    def made(as_built_whole: bool) -> Tensor:
        found: list[Tensor] = []
        torch.manual_seed(1)
        log.make([last], lambda number, memory: found.append(last.within(memory).clone()), as_built_whole)
        return found[0]

    torch.manual_seed(1)
    whole = [nn.Linear(8, 8, bias=False).weight for _ in range(3)]
    assert torch.equal(made(True), whole[2])
    assert torch.equal(made(False), whole[0])


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_on_a_weight_that_is_put_off_is_refused_before_it_is_lost(register):
    class Hooked(nn.Module):
        def build(self) -> None:
            self.layer = nn.Linear(3, 3)
            getattr(self.layer.weight, register)(lambda _: None)

    module = Hooked()
    weights = UnfilledWeights(module, module.build, STREAM)
    with pytest.raises(
        ValueError, match=r"hook was registered on the weight 'layer.weight' .* `on_before_optimizer_step"
    ):
        weights.fill(module, lambda name: True, CPU)
