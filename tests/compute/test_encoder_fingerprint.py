"""An encoder's fingerprint changes with all that its features follow from, and with nothing else."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from flowtrain_lightning.compute.encoder_fingerprint import EncoderFingerprints, weights_state
from flowtrain_lightning.data import FeaturesNotKept
from tests.tiny import TinyVLM


class Choosing(TinyVLM):
    """Its ``encode`` reads a number of the module, and counts itself."""

    def __init__(self, layer: int = 0, **settings: Any) -> None:
        super().__init__(**{"freeze_encoder": True, **settings})
        self.layer = layer
        self.calls = 0
        self.unread = layer

    def encode(self, media: Any) -> Any:
        self.calls += 1
        return self.encoder(media)[self.layer :]


class ChoosingToo(Choosing):
    """Reads the same number in the ``encode`` that it inherits."""

    def encode(self, media: Any) -> Any:
        return super().encode(media)


class ChoosingByProperty(Choosing):
    """Reads the same number in a property."""

    @property
    def first(self) -> int:
        return self.layer

    def encode(self, media: Any) -> Any:
        return self.encoder(media)[self.first :]


def built(layer: int = 0, kind: type[Choosing] = Choosing, **settings: Any) -> Choosing:
    torch.manual_seed(0)
    module = kind(layer, **settings)
    module.configure_encoder()
    return module


def fingerprint(module: Any, computes: object = "cpu") -> str:
    return EncoderFingerprints(module).of("encoder", computes)


def test_it_is_the_same_for_the_same_encoder_whatever_was_counted_or_else_is_set() -> None:
    module, other = built(), built(lr=0.5)
    other.calls, other.encoder.forwards, other.unread = 7, 0, 3
    del other.encoder.forwards
    assert fingerprint(module) == fingerprint(other)


@pytest.mark.parametrize(
    "change",
    [
        lambda module: module.encoder.embed.weight.data.view(-1)[3].add_(1e-6),
        lambda module: module.encoder.register_buffer("mask", torch.ones(1)),
        lambda module: setattr(module.encoder.dropout, "p", 0.25),
        lambda module: setattr(module.encoder.block.norm, "eps", 1e-6),
        lambda module: setattr(module.encoder, "select_layer", -2),
        lambda module: setattr(module, "layer", 1),
        lambda module: setattr(module, "layer", (0, 1)),
        lambda module: setattr(module, "layer", torch.zeros(())),
        lambda module: setattr(module.encoder, "select_layers", [-2]),
        lambda module: setattr(module.encoder, "scale", torch.ones(1)),
        lambda module: setattr(module.encoder, "act", nn.functional.relu),
        lambda module: setattr(module.encoder, "act", lambda values: 2 * values),
        lambda module: module.encoder.double(),
        lambda module: setattr(module.encoder, "block", nn.Identity()),
    ],
)
def test_it_changes_with_weights_buffers_settings_and_layers(change: Callable[[Any], Any]) -> None:
    module = built().eval()
    before = fingerprint(module)
    change(module)
    assert fingerprint(module) != before


@pytest.mark.parametrize("kind", [ChoosingToo, ChoosingByProperty])
def test_it_changes_with_what_inherited_methods_and_properties_read(kind: type[Choosing]) -> None:
    assert fingerprint(built(0, kind)) == fingerprint(built(0, kind))
    assert fingerprint(built(0, kind)) != fingerprint(built(1, kind))


def test_it_changes_with_where_and_how_it_computes() -> None:
    assert fingerprint(built(), "cuda") != fingerprint(built(), "cpu")


def test_it_follows_what_is_changed_while_a_module_lives() -> None:
    module = built().eval()
    module.encoder.register_buffer("mask", torch.ones(1))
    fingerprints = EncoderFingerprints(module)
    found = [fingerprints.of("encoder", "")]
    for change in (
        lambda: module.encoder.mask.fill_(2.0),
        lambda: module.encoder.embed.weight.data.mul_(0.5),
        lambda: setattr(module.encoder.block.norm, "eps", 0.5),
    ):
        change()
        found.append(fingerprints.of("encoder", ""))
    assert len(set(found)) == len(found)


def test_it_changes_with_a_function_that_encode_names_from_another_file(tmp_path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "seeing.py").write_text(
        "from helping import scaled\nfrom tests.tiny import TinyVLM\n\n\nclass Seeing(TinyVLM):\n"
        "    def encode(self, media):\n        return tuple(map(scaled, self.encoder(media)))\n"
    )
    found = []
    for times in (1, 7):
        (tmp_path / "helping.py").write_text(f"def scaled(values):\n    return {times} * values\n")
        for name in ("helping", "seeing"):
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        torch.manual_seed(0)
        module = importlib.import_module("seeing").Seeing(freeze_encoder=True)
        module.configure_encoder()
        found.append(fingerprint(module.eval()))
    assert found[0] != found[1]


def test_a_state_says_whether_weights_were_changed() -> None:
    module = built()
    fingerprints = EncoderFingerprints(module)
    before, state = fingerprints.of("encoder", ""), weights_state(module, "encoder")
    module.calls += 1
    assert fingerprints.of("encoder", "") == before
    assert weights_state(module, "encoder") == state
    with torch.no_grad():
        module.encoder.embed.weight.mul_(0.5)
    assert weights_state(module, "encoder") != state
    assert fingerprints.of("encoder", "") != before


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda module: module.encoder.heads[0].requires_grad_(True), "it trains"),
        (lambda module: setattr(module.encoder, "norm", nn.BatchNorm1d(4)), "follows the other pictures of a batch"),
        (lambda module: setattr(module.encoder.dropout, "p", 0.25), "draws random numbers"),
    ],
)
def test_what_does_not_follow_from_pixels_alone_is_refused(change: Callable[[Any], Any], told: str) -> None:
    module = built()
    change(module)
    module.encoder.norm.requires_grad_(False) if hasattr(module.encoder, "norm") else None
    with pytest.raises(FeaturesNotKept, match=told):
        fingerprint(module)
    if "trains" not in told:
        module.eval()
        assert fingerprint(module)
