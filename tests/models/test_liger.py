"""Liger's kernels: the modules that get them, and that these compute as before where there is no GPU."""

from __future__ import annotations

import importlib.util

import pytest
import torch

pytest.importorskip("transformers")
from flowtrain_lightning.models.liger import use_kernels
from tests.models.tiny import FAMILIES

NORMS = ("layernorm", "norm", "norm1", "norm2", "ln_q")


def built(family, **settings):
    """A tiny module of a family, whose weights are drawn from one seed."""
    torch.manual_seed(0)
    module = FAMILIES[family].kind(FAMILIES[family].config, **settings)
    module.configure_model()
    return module


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A package of that name, of which nothing is asked where there is no GPU."""
    (tmp_path / "liger_kernel").mkdir()
    (tmp_path / "liger_kernel/__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)


def test_norms_and_gated_perceptrons_get_them_and_weights_and_results_stay(installed):
    plain, fused = built("qwen2_5_vl"), built("qwen2_5_vl", kernels="liger")
    changed = {name for name, module in fused.named_modules() if "forward" in vars(module)}
    assert changed == {
        name for name, _ in plain.named_modules() if name.endswith(NORMS) or name.rpartition(".")[2] == "mlp"
    } - {name for name, module in plain.named_modules() if "merger.mlp" in name}
    before, after = plain.state_dict(), fused.state_dict()
    assert list(before) == list(after)
    assert all(torch.equal(before[name], after[name]) for name in before)
    for name in changed:
        one, other = plain.get_submodule(name), fused.get_submodule(name)
        rows = torch.randn(5, one.weight.shape[0] if hasattr(one, "weight") else one.gate_proj.in_features)
        assert torch.equal(one(rows), other(rows))


def test_modules_that_only_look_like_it_stay_as_they_are():
    assert use_kernels(built("gemma3").model) == []  # its norms multiply by one more, its gates are no SiLU


@pytest.mark.skipif(importlib.util.find_spec("liger_kernel") is not None, reason="the package is installed here")
def test_without_the_package_a_sentence_says_what_to_install():
    with pytest.raises(ValueError, match="Install it with `pip install liger-kernel`"):
        built("qwen2_5_vl", kernels="liger")


@pytest.mark.parametrize(
    ("settings", "words"),
    [({"kernels": "fast"}, "kernels='fast' was given"), ({"kernels": "liger", "compile": "blocks"}, "take one")],
)
def test_what_cannot_be_is_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        built("qwen2_5_vl", **settings)
