"""A rank builds and holds its own half only, and halves that cannot be parted are refused by name."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor
from torch.nn.utils.parametrizations import orthogonal

from flowtrain_lightning.parallel.halves import (
    half_parameters,
    half_tensors,
    half_trains,
    role_of,
    without_absent_halves,
)
from tests.exactness.data import write_steps
from tests.exactness.hearing import SeeingAndHearing
from tests.exactness.layouts import ranks_of
from tests.exactness.modules import Whole
from tests.forks import Job, read_down, run_jobs
from tests.parallel.half_jobs import Heavy, Homeless, Tied
from tests.tiny import TinyVLM


def built(kind: type[TinyVLM] = TinyVLM, *resident: str) -> TinyVLM:
    module = kind()
    if resident:
        module.set_local_roles(resident)
    module.configure_model()
    return module


def names_of(module: TinyVLM, role: str) -> list[str]:
    return [name for name, _ in module.named_parameters() if role_of(name, module.halves) == role]


def weights(module: TinyVLM, role: str) -> dict[str, Tensor]:
    parameters = dict(module.named_parameters())
    return {name: parameters[name] for name in names_of(module, role)}


@pytest.mark.parametrize("kind", [TinyVLM, Whole])
@pytest.mark.parametrize(("own", "other"), [("encoder", "backbone"), ("backbone", "encoder")])
def test_the_absent_half_has_names_and_shapes_but_no_memory(kind, own, other):
    module, whole = built(kind, own), built(kind)
    assert all(p.is_meta for p in half_tensors(module, other))
    assert not any(p.is_meta for p in half_tensors(module, own))
    assert {n: p.shape for n, p in module.named_parameters()} == {n: p.shape for n, p in whole.named_parameters()}


@pytest.mark.parametrize("kind", [TinyVLM, Whole])
@pytest.mark.parametrize("own", ["encoder", "backbone"])
def test_a_half_has_the_weights_that_it_has_in_one_process(kind, own):
    alone, together = weights(built(kind, own), own), weights(built(kind), own)
    assert all(torch.equal(alone[name], together[name]) for name in together)


class Orthogonal(TinyVLM):
    """Its backbone is built by what reads weights."""

    def configure_backbone(self) -> None:
        super().configure_backbone()
        orthogonal(self.backbone.block.out)


@pytest.mark.parametrize("own", ["encoder", "backbone"])
def test_a_half_that_reads_weights_while_it_is_built_is_given_up_afterwards(own):
    together = weights(built(Orthogonal), own)
    with pytest.warns(match="Ranks without the backbone build it whole") if own == "encoder" else nullcontext():
        module = built(Orthogonal, own)
    alone, other = weights(module, own), {"encoder": "backbone", "backbone": "encoder"}[own]
    assert all(torch.equal(alone[name], together[name]) for name in together)
    assert all(tensor.is_meta for tensor in half_tensors(module, other))


def test_building_leaves_the_users_random_stream_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    built()
    assert torch.equal(torch.rand(3), expected)


def test_the_two_halves_hold_each_parameter_once():
    module = built()
    names = names_of(module, "encoder") + names_of(module, "backbone")
    assert sorted(names) == sorted(name for name, _ in module.named_parameters())


def test_buffers_belong_to_their_half():
    module = built()
    module.encoder.register_buffer("mean", torch.zeros(2))
    assert any(tensor is module.encoder.mean for tensor in half_tensors(module, "encoder"))
    assert not any(tensor is module.encoder.mean for tensor in half_tensors(module, "backbone"))


def test_a_half_trains_while_any_of_its_parameters_does():
    module = built()
    module.encoder.requires_grad_(False)
    assert not half_trains(module, "encoder")
    module.encoder.embed.bias.requires_grad_(True)
    assert half_trains(module, "encoder")
    assert half_trains(module, "backbone")


def test_a_half_is_found_by_whole_path_parts():
    halves = {"encoder": ("model.visual",), "backbone": ("model.language", "head")}
    assert role_of("model.visual.weight", halves) == "encoder"
    assert role_of("model.visual_head.weight", halves) is None
    assert role_of("head.weight", halves) == "backbone"


def test_absent_halves_are_off_the_module_for_a_while_only():
    module = built(Whole, "backbone")
    with without_absent_halves(module, ("backbone",)):
        module.double()
    assert all(p.dtype == torch.float64 for p in half_parameters(module, "backbone"))
    assert all(p.dtype == torch.float32 and p.is_meta for p in half_parameters(module, "encoder"))


def test_tied_parameters_are_refused_by_name():
    with pytest.raises(ValueError, match=r"'encoder\.block\.norm\.bias' \(encoder\) and 'backbone\.block\.norm\.bias'"):
        built(Tied)


def test_a_parameter_on_no_half_is_refused_by_name():
    with pytest.raises(ValueError, match=r"'scale' of Homeless lies on no half"):
        built(Homeless)


class TiedWithin(Whole):
    """A weight of its backbone has two names."""

    def configure_whole(self) -> None:
        super().configure_whole()
        self.backbone.head.weight = self.backbone.embed.weight


@pytest.mark.parametrize("own", ["encoder", "backbone"])
def test_parameters_tied_within_a_half_stay_tied_on_every_rank(own):
    module = built(TiedWithin, own)
    assert module.backbone.head.weight is module.backbone.embed.weight
    assert names_of(module, "backbone") == names_of(built(TiedWithin), "backbone")


@pytest.mark.parametrize("own", ["encoder", "backbone"])
def test_parameters_tied_across_halves_built_at_once_are_refused_on_every_rank(own):
    class TiedAcross(Whole):
        def configure_whole(self) -> None:
            super().configure_whole()
            self.backbone.block.norm.bias = self.encoder.block.norm.bias

    with pytest.raises(ValueError, match="are one tensor"):
        built(TiedAcross, own)


@pytest.mark.parametrize("kind", [TinyVLM, Whole, TiedWithin])
@pytest.mark.parametrize(("own", "other"), [("encoder", "backbone"), ("backbone", "encoder")])
def test_a_whole_module_gives_up_the_half_that_will_train_on_other_ranks(kind, own, other):
    module = built(kind)
    names, kept = [name for name, _ in module.named_parameters()], half_tensors(module, own)
    module.set_local_roles((own,))
    module.configure_model()
    assert not any(tensor.is_meta for tensor in half_tensors(module, other)), "validation changes no weights"
    module.drop_absent_roles()
    assert all(tensor.is_meta for tensor in half_tensors(module, other))
    assert all(now is before for now, before in zip(half_tensors(module, own), kept, strict=True))
    assert [name for name, _ in module.named_parameters()] == names
    module.set_local_roles((own, other))
    with pytest.raises(RuntimeError, match=rf"holds {own} only.*load_from_checkpoint"):
        module.configure_model()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("halves")
    write_steps(folder)
    return str(folder)


def test_fit_refuses_what_it_cannot_train_on_every_layout(tmp_path, data):
    arguments = {"data": data, "layout": "colocated 1"}
    done = run_jobs(tmp_path, [Job("refused", "tests.parallel.half_jobs:be_refused", 1, arguments)])["refused"]
    (told,) = read_down(done.check().folder)
    assert "TypeError: strategy='flowtrain' splits a flowtrain_lightning.FlowModule" in told["plain"]
    assert "BoringModel" in told["plain"]
    assert "'backbone.block.norm.bias' (backbone) are one tensor" in told["tied"]
    assert "'scale' of Homeless lies on no half" in told["homeless"]


def test_a_half_under_another_name_is_refused_and_the_clean_up_hides_nothing(tmp_path, data):
    done = run_jobs(tmp_path, [Job("misplaced", "tests.parallel.half_jobs:misplace_a_half", 2, {"data": data})])
    log = done["misplaced"].log
    assert done["misplaced"].codes == [1, 1]
    assert "Misplaced has no module 'backbone', where its backbone half should be" in log
    assert "Cannot copy out of meta tensor" not in log


def test_a_module_from_separate_ranks_is_refused_where_both_halves_are_needed(tmp_path, data):
    done = run_jobs(tmp_path, [Job("whole", "tests.parallel.half_jobs:part_a_whole_module", 2, {"data": data})])[
        "whole"
    ]
    backbone, encoder = read_down(done.check().folder)
    assert (backbone["absent"], encoder["absent"]) == (["encoder"], ["backbone"])
    assert backbone["absent after validation"] == encoder["absent after validation"] == []
    for rank, half in ((backbone, "backbone"), (encoder, "encoder")):
        for told in rank["told"].values():
            assert f"was built on a rank that holds {half} only" in told
            assert "TinyVLM.load_from_checkpoint(PATH)" in told


@pytest.fixture(scope="module")
def memory(tmp_path_factory: pytest.TempPathFactory, data: str) -> dict[str, list[dict]]:
    jobs = [
        Job(layout, "tests.parallel.half_jobs:measure_memory", ranks_of(layout), {"data": data, "layout": layout})
        for layout in ("colocated 1", "1+1")
    ]
    done = run_jobs(tmp_path_factory.mktemp("memory"), jobs)
    return {layout: read_down(job.check().folder) for layout, job in done.items()}


def test_a_rank_that_has_one_role_never_has_the_other_half_in_memory(memory):
    (whole,) = memory["colocated 1"]
    assert whole["absent"] == []
    assert [rank["absent"] for rank in memory["1+1"]] == [["encoder"], ["backbone"]]
    for rank in memory["1+1"]:
        # A half less while the module is built, and its gradients less too after a step.
        assert rank["built"] < whole["built"] - 0.8 * Heavy.ballast
        assert rank["trained"] < whole["trained"] - 1.2 * Heavy.ballast


@pytest.mark.parametrize(
    "names",
    [("encoder",), ("eye", "backbone"), ("encoder_image", "backbone"), ("encoder", "encoder_audio", "backbone")],
)
def test_halves_that_are_called_otherwise_are_refused(names):
    module = TinyVLM()
    module.halves = dict.fromkeys(names, ("backbone",))
    with pytest.raises(
        ValueError,
        match=r"The halves of TinyVLM: .* Call them 'encoder' and 'backbone', and what generates",
    ):
        module.configure_model()


def test_an_encoder_that_nobody_builds_is_refused_by_the_name_of_the_method():
    class Deaf(SeeingAndHearing):
        configure_encoder_audio = None

    with pytest.raises(NotImplementedError, match="Deaf must define configure_encoder_audio, or configure_whole"):
        built(Deaf)


def test_a_rank_of_one_of_two_encoders_holds_that_one_alone():
    module = built(SeeingAndHearing, "encoder_audio")
    held = {name.partition(".")[0] for name, weight in module.named_parameters() if not weight.is_meta}
    assert held == {"ear"}
    whole = dict(built(SeeingAndHearing).named_parameters())
    assert all(weight.equal(whole[name]) for name, weight in module.named_parameters() if not weight.is_meta)
