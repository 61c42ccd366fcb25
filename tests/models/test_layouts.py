"""Models of Hugging Face train on separate ranks as on one, and a checkpoint gives the whole model back."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from flowtrain_lightning.models import read_config
from flowtrain_lightning.models.found_traits import traits_of
from tests.exactness.compare import Run, error, read_run, without_key_biases
from tests.exactness.data import write_steps
from tests.exactness.layouts import ranks_of
from tests.forks import Job, run_jobs
from tests.models.tiny import FAMILIES
from tests.models.without_a_class import WITHOUT_A_CLASS, family_of

pytest.importorskip("transformers")

LORA = {"peft_type": "LORA", "r": 2, "target_modules": "all-linear", "init_lora_weights": False}
LORA_OF_EXPERTS = {
    **LORA,
    "target_modules": ["q_proj"],
    "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
}
IN_PART = {
    "adapted and recomputed": {"adapters": LORA, "recompute": True},
    "frozen and recomputed": {"frozen": "encoder", "recompute": "selective"},
}
"""Ways to train a part of a model. A half that is named as frozen stands for its modules."""

ROUNDED = [("ernie4_5_vl_moe", "64-true", 1e-6), ("glm4v", "32-true", 1e-5), ("gemma4", "64-true", 1e-6)]
"""Family, precision in which all of its code runs, and how far gradients may lie apart."""

FAMILIES_IN_PARTS = [
    "qwen2_vl, tied",
    "llava_onevision",
    *(pytest.param(name, marks=pytest.mark.full) for name in ("qwen3_vl", "qwen3_vl_moe", "llava with clip")),
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The folder of a run of a family on a layout."""
    folder = tmp_path_factory.mktemp("layouts")
    write_steps(folder / "data")

    @cache
    def trained(family: str, layout: str, adapted: bool = False, in_part: str = "", precision: str = "64-true") -> Path:
        name = f"{family} {layout}{' adapted' * adapted} {in_part} {precision}"
        adapters = (LORA_OF_EXPERTS if "moe" in family else LORA) if adapted else None
        roles = {role: {"shard": "fsdp"} for role in ("encoder", "backbone")} if "sharded" in layout else None
        arguments = {"data": str(folder / "data"), "layout": layout, "family": family, "adapters": adapters}
        arguments |= {"roles": roles, "precision": precision, **IN_PART.get(in_part, {})}
        if "frozen" in arguments:
            arguments["frozen"] = traits_of(read_config(family_of(family).config)).halves[arguments["frozen"]]
        job = Job(name, "tests.models.training:train", ranks_of(layout), arguments)
        return run_jobs(folder, [job])[name].check().folder

    return trained


@pytest.mark.parametrize("family", FAMILIES_IN_PARTS)
def test_an_encoder_rank_and_a_backbone_rank_compute_what_one_process_does(trained, family):
    assert_equal(*(read_run(trained(family, each)) for each in ("1+1", "auto")))


@pytest.mark.parametrize(
    ("family", "layout", "adapted"),
    [
        ("qwen2_5_vl", "1+1", True),
        pytest.param("gemma3", "1+1", False, marks=pytest.mark.full),
        pytest.param("paligemma 2", "1+1", False, marks=pytest.mark.full),
        pytest.param("qwen3_vl_moe", "2+2 sharded", True, marks=pytest.mark.full),
    ],
)
def test_so_do_adapters_and_tokens_that_see_each_other(trained, family, layout, adapted):
    if adapted:
        pytest.importorskip("peft")
    assert_equal(*(read_run(trained(family, each, adapted)) for each in (layout, "auto")))


@pytest.mark.full
@pytest.mark.parametrize("layout", ["colocated 2", "mixed 1+2", "2+2 sharded"])
@pytest.mark.parametrize("family", ["llava_onevision", "qwen3_vl_moe"])
def test_tiles_are_joined_and_experts_chosen_in_every_placement_as_in_one_process(trained, family, layout):
    runs = [read_run(trained(family, each)) for each in (layout, "auto")]
    assert_equal(*runs)


@pytest.mark.full
@pytest.mark.parametrize("layout", ["1+1", "colocated 2", "2+2 sharded"])
@pytest.mark.parametrize("family", ["llava with clip by any", "qwen2_5_vl by any"])
def test_the_class_that_takes_any_family_computes_on_ranks_what_one_process_does(trained, family, layout):
    runs = [read_run(trained(family, each)) for each in (layout, "auto")]
    assert_equal(*runs)


@pytest.mark.full
@pytest.mark.parametrize("layout", ["1+1", "colocated 2", "2+2 sharded"])
@pytest.mark.parametrize("family", WITHOUT_A_CLASS)
def test_a_family_that_no_class_names_trains_on_ranks_as_in_one_process(trained, family, layout):
    found, expected = (read_run(trained(family, each)) for each in (layout, "auto"))
    assert error(found.initial, expected.initial) == 0.0
    # Qwen3.5's delta rule computes in float32, whatever it is given, so it rounds by what is packed together.
    assert error(found.gradients[0], expected.gradients[0]) <= (1e-6 if family == "qwen3_5" else 1e-12)
    # AdamW makes whole steps of weights whose gradients are rounding alone, and later steps magnify that.
    assert found.losses == pytest.approx(expected.losses, rel=1e-4 if family == "qwen3_5" else 1e-7)


@pytest.mark.full
@pytest.mark.parametrize("layout", ["1+1", "2+2 sharded"])
@pytest.mark.parametrize(("family", "precision", "limit"), ROUNDED)
def test_so_do_families_whose_own_code_rounds_to_float32(trained, family, precision, limit, layout):
    found, expected = (read_run(trained(family, each, precision=precision)) for each in (layout, "auto"))
    assert error(found.initial, expected.initial) == 0.0
    assert error(found.gradients[0], expected.gradients[0]) <= limit
    assert found.losses == pytest.approx(expected.losses, rel=1e-4)


@pytest.mark.full
@pytest.mark.parametrize("in_part", IN_PART)
@pytest.mark.parametrize("layout", ["1+1", "2+2 sharded"])
@pytest.mark.parametrize("family", WITHOUT_A_CLASS)
def test_so_do_its_adapters_and_what_is_left_of_frozen_halves(trained, family, layout, in_part):
    if in_part.startswith("adapted"):
        pytest.importorskip("peft")
    found, expected = (read_run(trained(family, each, in_part=in_part)) for each in (layout, "auto"))
    assert error(found.initial, expected.initial) == 0.0
    assert error(found.gradients[0], expected.gradients[0]) <= (1e-6 if family == "qwen3_5" else 1e-12)
    assert found.losses == pytest.approx(expected.losses, rel=1e-4 if family == "qwen3_5" else 1e-7)
    learned = {name for name, gradient in expected.gradients[0].items() if gradient is not None}
    assert learned
    assert all("lora_" in name for name in learned) == in_part.startswith("adapted")
    if in_part.startswith("frozen"):
        halves = traits_of(read_config(family_of(family).config)).halves
        assert not any(name.removeprefix("model.").startswith(halves["encoder"]) for name in learned)


def assert_equal(found: Run, expected: Run) -> None:
    assert error(found.initial, expected.initial) == 0.0
    assert found.losses == pytest.approx(expected.losses, rel=1e-9)
    assert max(error(*pair) for pair in zip(found.gradients, expected.gradients, strict=True)) <= 1e-9
    assert error(*(without_key_biases(run.weights[-1]) for run in (found, expected))) <= 1e-9


@pytest.mark.parametrize("family", FAMILIES_IN_PARTS)
def test_a_checkpoint_becomes_a_folder_of_hugging_face(trained, family, tmp_path):
    folder = trained(family, "1+1")
    module = FAMILIES[family].kind.load_from_checkpoint(folder / "last.ckpt")
    module.save_pretrained(tmp_path)
    again = dict(type(module.model).from_pretrained(tmp_path, dtype=torch.float64).named_parameters())
    inside = "parametrizations.image_newline.original"  # where a parameter of the model itself lies, in a half
    weights = {name.replace(inside, "image_newline"): w for name, w in read_run(folder).weights[-1].items()}
    assert weights.keys() == {f"model.{name}" for name in again}
    for name, weight in weights.items():
        torch.testing.assert_close(again[name.removeprefix("model.")], weight, rtol=1e-6, atol=1e-8)
