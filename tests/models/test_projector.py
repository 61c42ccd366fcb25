"""A projector that trains behind a frozen tower is the backbone's, so that the tower works ahead, and stays exact."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from flowtrain_lightning.packing import CostModel
from flowtrain_lightning.parallel.halves import half_parameters, half_trains, role_of
from flowtrain_lightning.placement.module_profile import profile_module
from tests.exactness.compare import Run, error, read_run
from tests.exactness.data import write_steps
from tests.exactness.layouts import ranks_of
from tests.forks import Job, run_jobs
from tests.models.tiny import FAMILIES, projector_of, tower_of
from tests.tiny import tiny_data, write_records

pytest.importorskip("transformers")

FSDP, TENSOR, CONTEXT = ({"backbone": layout} for layout in ({"shard": "fsdp"}, {"tensor": 2}, {"context": 2}))
QUICK = [
    ("llava with clip", "1+2", FSDP),
    ("qwen2_5_vl", "mixed 1+2", {}),
]
LONG = [
    *(("llava with clip", layout, {}) for layout in ("1+1", "colocated 2")),
    ("qwen2_5_vl", "1+1", {}),
    *((family, layout, {}) for family in ("qwen3_vl", "internvl") for layout in ("1+1", "mixed 1+2")),
    *((family, "1+2", roles) for family in ("qwen2_5_vl", "qwen3_vl") for roles in (FSDP, TENSOR, CONTEXT)),
    ("llava with clip", "mixed 1+2", {}),
    ("llava with clip", "2+3", {}),
    ("qwen2_5_vl", "colocated 2", {}),
    ("qwen3_vl", "colocated 2", FSDP),
]
CASES = [pytest.param(*case, id=" ".join(map(str, case))) for case in QUICK] + [
    pytest.param(*case, id=" ".join(map(str, case)), marks=pytest.mark.full) for case in LONG
]


def built(family: str, kind: Any = None, **settings: Any) -> Any:
    module = (kind or FAMILIES[family].kind)(FAMILIES[family].config, **settings)
    module.configure_model()
    return module


@pytest.mark.parametrize("family", sorted(name for name in FAMILIES if FAMILIES[name].kind.projector))
def test_the_projector_is_the_backbones_where_it_trains_and_the_tower_does_not(family):
    module = built(family, frozen=tower_of(family))
    assert not half_trains(module, "encoder")
    projector = [weight for path in projector_of(family) for weight in module.model.get_submodule(path).parameters()]
    assert projector
    assert {*map(id, projector)} <= {*map(id, half_parameters(module, "backbone"))}
    for whole in (built(family), built(family, frozen=[*tower_of(family), *projector_of(family)])):
        assert whole.halves == type(whole).halves


def test_what_a_tower_is_made_of_is_named_by_its_other_parts():
    module = built("qwen2_5_vl", frozen=tower_of("qwen2_5_vl"))
    assert role_of("model.model.visual.merger.mlp.0.weight", module.halves) == "backbone"
    assert role_of("model.model.visual.blocks.0.norm1.weight", module.halves) == "encoder"
    assert module.halves["backbone"][0] == "model.model.language_model"


def test_a_class_with_its_own_encode_keeps_the_projector_where_it_calls_it():
    kind = FAMILIES["llava with clip"].kind

    class OwnLlava(kind):
        def encode(self, media: Any) -> Tensor:
            return super().encode(media)

    assert built("llava with clip", OwnLlava, frozen="model.vision_tower").halves == kind.halves


def test_a_profile_tells_the_projector_with_the_backbone(tmp_path):
    family = "llava with clip"
    write_records(tmp_path, 16)
    data = tiny_data(tmp_path, images=FAMILIES[family].images, global_batch_size=8, token_budget=512)
    settings = {"accelerator": "cpu", "seconds": 0.1, "reduction": False, "progress": False, "flops": True}
    module = FAMILIES[family].kind(FAMILIES[family].config, frozen=tower_of(family))
    roles = profile_module(module, data, **settings).roles
    encoder, backbone = roles["encoder"], roles["backbone"]
    whole = built(family, frozen=tower_of(family))
    assert backbone.parameters == sum(weight.numel() for weight in half_parameters(whole, "backbone"))
    assert (encoder.trains, encoder.gradient_bytes, encoder.forward_share) == (False, 0, 1.0)
    assert encoder.flops.forward.linear > 0
    assert encoder.flops.backward == CostModel(0.0, 0.0, 0.0)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The folder of a run."""
    folder = tmp_path_factory.mktemp("projector")
    write_steps(folder / "data")

    def run(name: str, target: str, ranks: int, **arguments: Any) -> Path:
        job = Job(name, f"tests.models.{target}", ranks, {"data": str(folder / "data"), **arguments})
        return run_jobs(folder, [job])[name].check().folder

    return run


@pytest.fixture(scope="module")
def plain(run: Callable[..., Path]) -> Callable[[str], Run]:
    """What a plain PyTorch loop computes with the tower frozen."""

    @cache
    def plain(family: str) -> Run:
        return read_run(run(f"plain {family}", "plain_loop:train", 1, family=family, frozen=tower_of(family)))

    return plain


def check_equal(found: Run, expected: Run, first: int = 0) -> None:
    assert found.losses == pytest.approx(expected.losses[first:], rel=1e-9)
    pairs = zip(found.gradients, expected.gradients[first:], strict=True)
    assert max(error(*pair) for pair in pairs) <= 1e-9
    assert error(found.weights[-1], expected.weights[-1]) <= 1e-9


@pytest.mark.parametrize(("family", "layout", "roles"), CASES)
def test_every_layout_computes_what_a_plain_loop_does(run, plain, family, layout, roles):
    name = f"{family} {layout} {''.join(map(str, roles.values()))}".replace("/", "")
    arguments = {"layout": layout, "family": family, "roles": roles, "frozen": tower_of(family)}
    found = read_run(run(name, "training:train", ranks_of(layout), **arguments))
    assert error(found.initial, plain(family).initial) == 0.0
    check_equal(found, plain(family))


def test_checkpoints_go_on_with_the_projector_on_the_other_side(run, plain):
    family, middle = "llava with clip", 3
    shared = {"family": family, "layout": "1+1", "frozen": tower_of(family)}
    kept = run("kept", "training:train", 2, **shared, moves=False, saves_after=middle)
    moved = run("moved", "training:train", 2, **shared, resumes=str(kept / "middle.ckpt"))
    check_equal(read_run(moved), plain(family), first=middle)
    unfrozen = FAMILIES[family].kind.load_from_checkpoint(moved / "last.ckpt", frozen=[])
    assert half_trains(unfrozen, "encoder")
    weights = {name: weight.detach().double() for name, weight in unfrozen.named_parameters()}
    assert error(weights, read_run(moved).weights[-1]) <= 1e-6
