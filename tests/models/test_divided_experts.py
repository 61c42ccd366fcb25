"""Mixtures of Hugging Face train with divided experts as in one process, and checkpoints go across."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from flowtrain_lightning.allocator import Allocation, Layout
from flowtrain_lightning.allocator.plan_file import read_plan
from flowtrain_lightning.cli import main
from tests.exactness.compare import Run, error, read_run, same_bits, without_key_biases
from tests.exactness.data import write_steps
from tests.exactness.layouts import ranks_of
from tests.forks import Job, run_jobs
from tests.models.tiny import FAMILIES

pytest.importorskip("transformers")

QWEN = "qwen3_vl_moe"
WHOLE = {"expert": 2}
ACROSS = {"expert": 2, "shard": "fsdp", "recompute": "full"}
GROUPS = {"expert": 2, "shard": "fsdp", "replicas": 2}
TENSOR = {"tensor": 2}
BOTH = {"expert": 2, "tensor": 2, "shard": "fsdp", "recompute": "full"}
LORA = {"peft_type": "LORA", "r": 2, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
OF_EXPERTS = {**LORA, "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
LIMIT = {"64-true": 1e-9, "32-true": 1e-5}
DEGREES = ("tensor", "context", "expert", "replicas")
MIDDLE = 2
"""The step after which some runs save."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The folder of a run on a layout, in which the experts of the backbone are divided as ``backbone`` says."""
    folder = tmp_path_factory.mktemp("experts")
    write_steps(folder / "data")

    jobs: dict[str, Path] = {}

    def trained(
        layout: str,
        backbone: dict[str, Any] | None = None,
        family: str = QWEN,
        encoder: dict[str, Any] | None = None,
        **more: Any,
    ) -> Path:
        roles = None if backbone is None else {"backbone": backbone, "encoder": encoder or {}}
        given = {"data": str(folder / "data"), "layout": layout, "family": family, "roles": roles, **more}
        key = str(given)
        if key not in jobs:
            job = Job(f"{len(jobs)} {layout}", "tests.models.training:train", ranks_of(layout), given)
            jobs[key] = run_jobs(folder, [job])[job.name].check().folder
        return jobs[key]

    return trained


def assert_equal(found: Run, expected: Run, precision: str = "64-true") -> None:
    limit = LIMIT[precision]
    assert error(found.initial, expected.initial) == 0.0
    assert found.losses == pytest.approx(expected.losses, rel=limit)
    assert max(error(*pair) for pair in zip(found.gradients, expected.gradients, strict=True)) <= limit
    if precision == "64-true":  # in float32 AdamW makes steps of what is rounding
        assert error(*(without_key_biases(run.weights[-1]) for run in (found, expected))) <= limit


@pytest.mark.parametrize(
    ("layout", "backbone", "precision"),
    [
        ("1+2", ACROSS, "64-true"),
        pytest.param("colocated 2", WHOLE, "32-true", marks=pytest.mark.full),
        pytest.param("mixed 1+2", WHOLE, "64-true", marks=pytest.mark.full),
        pytest.param("1+4", GROUPS, "64-true", marks=pytest.mark.full),
        pytest.param("colocated 4", {"expert": 4, "shard": "fsdp"}, "32-true", marks=pytest.mark.full),
        pytest.param("1+4", {**WHOLE, "context": 2}, "64-true", marks=pytest.mark.full),
        pytest.param("colocated 4", BOTH, "64-true", marks=pytest.mark.full),
        pytest.param("1+4", {**WHOLE, **TENSOR}, "32-true", marks=pytest.mark.full),
        pytest.param("1+2", TENSOR, "64-true", marks=pytest.mark.full),
    ],
    ids=str,
)
def test_qwen3_vl_with_divided_experts_computes_what_one_process_does(trained, layout, backbone, precision):
    folder = trained(layout, backbone, precision=precision)
    follows = str(folder) if precision == "32-true" else ""  # in which AdamW makes steps of what is rounding
    assert_equal(read_run(folder), read_run(trained("auto", precision=precision, follows=follows)), precision)


PLANNED = {
    "8": ("colocated", 1, 1),
    "64": ("colocated", 2, 1),
    "512": ("mixed", 4, 4),
    "512 --microbatches 512": ("colocated", 2, 8),
    "4096 --microbatches 4096": ("mixed", 1, 104),
}
"""Devices that are asked for -> the recommended placement, and the backbone's tensor degree and replicas."""


@pytest.mark.full
@pytest.mark.parametrize("devices", PLANNED)
def test_the_plan_of_a_published_mixture_trains_with_degrees_of_its_kinds(trained, tmp_path, monkeypatch, devices):
    options = ["--model", "qwen3-vl-30b-a3b", "--devices", *devices.split(), "--out", str(tmp_path / "plan.yaml")]
    monkeypatch.setattr(sys, "argv", ["flowtrain", "plan", *options])
    main()
    plan = read_plan(tmp_path / "plan.yaml")
    backbone = plan.layouts["backbone"]
    assert (plan.placement, backbone.tensor, backbone.replicas) == PLANNED[devices]
    assert backbone.expert > 1
    layout, backbone, encoder = with_degrees_of_two(plan)
    assert_equal(read_run(trained(layout, backbone, encoder=encoder)), read_run(trained("auto")))


def with_degrees_of_two(plan: Allocation) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """A plan on eight ranks at most: the words for it, and its backbone and encoder.

    Where roles do not share all ranks, the backbone has one group of what would be several.
    """
    roles = {role: _cut(layout, plan.recompute[role]) for role, layout in plan.layouts.items()}
    backbone, encoder = roles["backbone"], roles["encoder"]
    if plan.placement != "colocated":
        backbone["replicas"] = 1
    ranks = prod(backbone[name] for name in DEGREES)
    if plan.placement == "colocated":
        ranks = max(ranks, prod(encoder[name] for name in DEGREES), 2)
        return f"colocated {ranks}", backbone, encoder
    return f"{'mixed ' * (plan.placement == 'mixed')}{ranks}+{ranks}", backbone, encoder


def _cut(layout: Layout, recompute: str) -> dict[str, Any]:
    degrees = {name: min(2, getattr(layout, name)) for name in DEGREES}
    return {"shard": layout.shard, "recompute": recompute, **degrees}


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "precision", "limit"),
    [
        ("qwen3_5_moe", "64-true", 1e-6),  # its delta rule computes in float32, whatever it is given
        ("glm4v_moe", "32-true", 1e-5),  # its tower knows no float64
    ],
)
def test_so_do_mixtures_that_no_class_names(trained, family, precision, limit):
    layouts = ("1+2", ACROSS), ("auto",)
    found, expected = (read_run(trained(*each, family=family, precision=precision)) for each in layouts)
    assert error(found.initial, expected.initial) == 0.0
    assert error(found.gradients[0], expected.gradients[0]) <= limit


@pytest.mark.full
@pytest.mark.parametrize("backbone", [WHOLE, ACROSS], ids=str)
def test_adapters_train_beside_frozen_experts_that_are_divided(trained, backbone):
    pytest.importorskip("peft")
    runs = [read_run(trained(*each, adapters=LORA)) for each in (("1+2", backbone), ("auto",))]
    assert_equal(*runs)


@pytest.mark.parametrize(
    ("layout", "backbone", "precision"),
    [
        ("1+2", ACROSS, "64-true"),
        pytest.param("colocated 2", WHOLE, "64-true", marks=pytest.mark.full),
        pytest.param("mixed 1+2", WHOLE, "32-true", marks=pytest.mark.full),
        pytest.param("1+4", GROUPS, "64-true", marks=pytest.mark.full),
        pytest.param("colocated 4", {**ACROSS, "context": 2}, "32-true", marks=pytest.mark.full),
        pytest.param("colocated 4", {"expert": 4, "recompute": "selective"}, "64-true", marks=pytest.mark.full),
        pytest.param("1+2", {"shard": "fsdp"}, "64-true", marks=pytest.mark.full),
    ],
    ids=str,
)
def test_so_do_adapters_of_the_experts_themselves(trained, layout, backbone, precision):
    pytest.importorskip("peft")
    given = {"adapters": OF_EXPERTS, "precision": precision}
    found, expected = (read_run(trained(*each, **given)) for each in ((layout, backbone), ("auto",)))
    if precision == "32-true":  # AdamW makes steps of rounding, with experts whole and divided alike
        found, expected = (
            replace(run, losses=run.losses[:1], gradients=run.gradients[:1]) for run in (found, expected)
        )
    assert_equal(found, expected, precision)
    trains = [name for name, gradient in found.gradients[0].items() if gradient is not None]
    assert {"lora_A", "lora_B"} == {name.split(".")[-3] for name in trains if ".experts." in name}


@pytest.mark.full
@pytest.mark.parametrize("backbone", [WHOLE, GROUPS, {**WHOLE, **TENSOR}], ids=str)
def test_muon_steps_experts_that_are_divided(trained, backbone):
    runs = [read_run(trained(*each, muon=True)) for each in (("1+4", backbone), ("auto",))]
    assert_equal(*runs)


@pytest.mark.full
@pytest.mark.parametrize(
    ("first", "then"),
    [
        (("1+2", ACROSS), ("colocated 1",)),
        (("auto",), ("colocated 2", WHOLE)),
        (("colocated 4", GROUPS), ("1+2", WHOLE)),
        (("1+2", WHOLE), ("1+2", {"shard": "fsdp"})),
        (("1+2", {"shard": "fsdp"}), ("colocated 4", {"expert": 4, "shard": "fsdp"})),
        (("colocated 4", BOTH), ("1+2", WHOLE)),
        (("1+2", TENSOR), ("colocated 4", BOTH)),
        (("colocated 4", BOTH), ("colocated 1",)),
    ],
    ids=str,
)
def test_a_checkpoint_goes_on_in_another_layout(trained, first, then):
    saved = trained(*first, saves_after=MIDDLE) / "middle.ckpt"
    found, unbroken = read_run(trained(*then, resumes=str(saved))), read_run(trained("auto"))
    assert_equal(replace(found, initial=unbroken.initial), _from_middle(unbroken))


@pytest.mark.full
@pytest.mark.parametrize(
    ("first", "then"),
    [
        (("1+2", ACROSS), ("colocated 1",)),
        (("auto",), ("1+4", GROUPS)),
        (("1+2", WHOLE), ("colocated 4", {"expert": 4, "shard": "fsdp"})),
    ],
    ids=str,
)
def test_a_checkpoint_of_their_adapters_goes_on_in_another_layout(trained, first, then):
    pytest.importorskip("peft")
    saved = trained(*first, adapters=OF_EXPERTS, saves_after=MIDDLE) / "middle.ckpt"
    found = read_run(trained(*then, adapters=OF_EXPERTS, resumes=str(saved)))
    unbroken = read_run(trained("auto", adapters=OF_EXPERTS))
    assert_equal(replace(found, initial=unbroken.initial), _from_middle(unbroken))


def _from_middle(run: Run) -> Run:
    return replace(run, losses=run.losses[MIDDLE:], gradients=run.gradients[MIDDLE:])


@pytest.mark.full
@pytest.mark.parametrize(("layout", "backbone"), [("1+2", ACROSS), ("colocated 4", BOTH)], ids=str)
def test_on_the_same_layout_it_goes_on_to_the_bit(trained, layout, backbone):
    unbroken = trained(layout, backbone, saves_after=MIDDLE)
    found, expected = (
        read_run(each) for each in (trained(layout, backbone, resumes=str(unbroken / "middle.ckpt")), unbroken)
    )
    rest = replace(_from_middle(expected), weights=expected.weights[MIDDLE:])
    assert same_bits(found, rest)


def test_a_checkpoint_becomes_a_folder_of_hugging_face_with_all_experts(trained, tmp_path):
    folder = trained("1+2", ACROSS, precision="64-true")
    module = FAMILIES[QWEN].kind.load_from_checkpoint(folder / "last.ckpt")
    module.save_pretrained(tmp_path)
    again = dict(type(module.model).from_pretrained(tmp_path, dtype=torch.float64).named_parameters())
    weights = read_run(folder).weights[-1]
    assert weights.keys() == {f"model.{name}" for name in again}
    for name, weight in weights.items():
        torch.testing.assert_close(again[name.removeprefix("model.")], weight, rtol=1e-6, atol=1e-8)


@pytest.mark.full
def test_a_checkpoint_of_their_adapters_becomes_a_folder_of_peft(trained, tmp_path):
    peft = pytest.importorskip("peft")
    folder = trained("1+2", ACROSS, adapters=OF_EXPERTS)
    module = FAMILIES[QWEN].kind.load_from_checkpoint(folder / "last.ckpt")
    module.save_pretrained(tmp_path)
    weights = read_run(folder).weights[-1]
    base = type(module.model)(type(module.model.config)(**module.model.config.to_dict())).double()
    plain = {name.removeprefix("model.").replace(".base_layer", ""): weight for name, weight in weights.items()}
    base.load_state_dict({name: plain[name] for name in base.state_dict() if name in plain}, strict=False)
    opened = peft.PeftModel.from_pretrained(base, tmp_path)
    found = {name.removeprefix("base_model.model."): weight for name, weight in opened.named_parameters()}
    adapted = {name.removeprefix("model."): weight for name, weight in weights.items() if ".lora_" in name}
    assert any(".experts." in name for name in adapted)
    assert {name for name in found if ".lora_" in name} == adapted.keys()
    for name, weight in adapted.items():
        torch.testing.assert_close(found[name].double(), weight, rtol=1e-6, atol=1e-8)
    merged = opened.merge_and_unload()
    for name, weight in merged.named_parameters():
        change = weight - plain[name]
        assert bool(change.any()) == ("experts" in name or "q_proj.weight" in name or "v_proj.weight" in name), name
