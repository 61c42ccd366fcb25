"""Training on a GPU: in every layout what plain Lightning computes there, and without a wait. Skipped without one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from flowtrain_lightning.packing_check import CheckReport, report_of
from tests.exactness.compare import Run, error, read_run
from tests.exactness.data import write_steps
from tests.exactness.layouts import ranks_of
from tests.exactness.train import Named
from tests.forks import Job, run_jobs
from tests.packing_check.right_modules import RIGHT
from tests.packing_check.wrong_modules import WRONG

pytest.importorskip("transformers")
from tests.compute.test_never_waiting import MODELS, family, quickstart, run_step
from tests.models.without_a_class import WITHOUT_A_CLASS, family_of
from tests.tiny import tiny_data, write_records

pytestmark = pytest.mark.skipif(not torch.cuda.device_count(), reason="needs a GPU")  # asks no context of CUDA

TARGET = "tests.models.training:train"
FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "idefics3")


def on_one_card(layout: str, pool: str, **more: Any) -> dict[str, Any]:
    """A layout whose ranks share a card, and pass features and gradients through one kind of memory."""
    return {"layout": layout, "strategy": {"ranks_per_device": ranks_of(layout), "pool": {"tier": pool}}, **more}


LAYOUTS: dict[str, dict[str, Any]] = {
    "colocated": {"layout": "colocated 1"},
    "separate, GPU memory": on_one_card("1+1", "device"),
    "separate, host memory": on_one_card("1+1", "host"),
    "a backbone in two stages": on_one_card("1+2", "device", roles={"backbone": {"pipeline": 2}}),
}


def train(folder: Path, name: str, data: Path, **settings: Any) -> Run:
    """Trains on the GPU, and reads what all ranks wrote down."""
    arguments = {"data": str(data), "accelerator": "cuda", **settings}
    job = Job(name, TARGET, ranks_of(settings["layout"]), arguments)
    return read_run(run_jobs(folder, [job])[name].check().folder)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_steps(folder)
    return folder


@pytest.fixture(scope="module", params=[pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in FAMILIES])
def plain(request, data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Run]]:
    """A family, and its run under plain Lightning in each precision."""
    folder = tmp_path_factory.mktemp("plain")
    settings = {"family": request.param, "layout": "auto"}
    runs = {kind: train(folder, kind, data, precision=kind, **settings) for kind in ("32-true", "bf16-mixed")}
    return request.param, runs


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_gives_the_gradients_of_plain_lightning_in_float32(plain, data, tmp_path, layout):
    name, runs = plain
    found = train(tmp_path, "run", data, family=name, precision="32-true", **LAYOUTS[layout])
    assert error(found.gradients[0], runs["32-true"].gradients[0]) <= 1e-5
    assert found.losses == pytest.approx(runs["32-true"].losses, rel=1e-3)  # AdamW makes much of little gradients


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_in_bfloat16_is_not_further_from_float32_than_plain_lightning(plain, data, tmp_path, layout):
    name, runs = plain
    exact = runs["32-true"].gradients[0]
    found = train(tmp_path, "run", data, family=name, precision="bf16-mixed", **LAYOUTS[layout])
    assert error(found.gradients[0], exact) <= 1.5 * error(runs["bf16-mixed"].gradients[0], exact)


def without_key_biases(gradients: Named) -> Named:
    """Softmax takes no notice of these: their gradients are what rounding leaves."""
    return {name: gradient for name, gradient in gradients.items() if not name.endswith(("k_proj.bias", "qkv.bias"))}


@pytest.mark.parametrize(
    "settings",
    [{"compile": "blocks"}, {"recompute": "selective"}, {"kernels": "liger"}],
    ids=["compiled", "selective recomputation", "Liger's kernels"],
)
@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_layers_that_run_otherwise_give_the_gradients_of_those_that_do_not(data, tmp_path, name, settings):
    if "kernels" in settings:
        pytest.importorskip("liger_kernel")
    common = {"family": name, "precision": "32-true", "layout": "colocated 1"}
    expected, found = train(tmp_path, "plain", data, **common), train(tmp_path, "other", data, **common, **settings)
    gradients = (without_key_biases(run.gradients[0]) for run in (found, expected))
    assert error(*gradients) <= 1e-5


@contextmanager
def never_waiting() -> Iterator[None]:
    """Inside, PyTorch raises where the host would wait for the GPU."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", [*MODELS, "quickstart"])
def test_microbatches_and_encoder_batches_never_wait_for_the_gpu(tmp_path, name):
    write_records(tmp_path, 8)
    module, images = quickstart() if name == "quickstart" else family(name)
    assert run_step(module, images, tmp_path, torch.device("cuda", 0), never_waiting)


def checked(module: Any, folder: Path, **settings: Any) -> CheckReport:
    """What the packing check of a run on the GPU finds."""
    trainer = L.Trainer(accelerator="cuda", devices=1, logger=False, enable_checkpointing=False)
    return report_of(module, tiny_data(folder, **settings), trainer)


@pytest.mark.parametrize("name", [*MODELS, "quickstart"])
def test_families_pass_the_packing_check_on_the_gpu(tmp_path, name):
    write_records(tmp_path, 24)
    module, images = quickstart() if name == "quickstart" else family(name)
    report = checked(module, tmp_path, images=images)
    assert (report.findings, report.device.type) == ([], "cuda")


@pytest.mark.parametrize("name", [*WITHOUT_A_CLASS, "qwen3_5_moe", "gemma3"])
def test_other_families_keep_samples_apart_on_the_gpu(tmp_path, name):
    """By the kernels of a GPU: in half precision attention, and scans where their packages are installed."""
    write_records(tmp_path, 24)
    chosen = family_of(name)
    report = checked(chosen.kind(chosen.config), tmp_path, images=chosen.images, token_budget=512)
    assert (report.findings, report.device.type) == ([], "cuda")


@pytest.mark.parametrize("module", WRONG, ids=lambda module: module.__name__)
def test_a_wrong_module_is_named_on_the_gpu(tmp_path, module):
    write_records(tmp_path, 24)
    kind, words = WRONG[module]
    found = checked(module(), tmp_path).findings
    assert any(finding.kind == kind and words in finding.sentence for finding in found), found


@pytest.mark.parametrize("module", RIGHT, ids=lambda module: module.__name__)
def test_a_right_module_is_not_accused_on_the_gpu(tmp_path, module):
    write_records(tmp_path, 24)
    assert checked(module(), tmp_path).findings == []


def test_after_a_run_nothing_of_it_is_left_on_the_gpu(tmp_path):
    write_records(tmp_path, 8)
    module, images = quickstart()
    data = tiny_data(tmp_path, images=images, global_batch_size=4)
    trainer = L.Trainer(accelerator="cuda", devices=1, strategy="flowtrain", max_steps=2, default_root_dir=tmp_path)
    trainer.fit(module, data)
    assert torch.cuda.max_memory_allocated() > 0
    states = [value for entries in trainer.optimizers[0].state.values() for value in entries.values()]
    kept = [*module.parameters(), *(weight.grad for weight in module.parameters()), *states]
    assert {each.device.type for each in kept if isinstance(each, torch.Tensor)} == {"cpu"}
