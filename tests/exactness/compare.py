"""How far a run is from the reference: law 1's error, tensor by tensor."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tests.exactness.train import Named

FLOOR = 1e-6
"""A tensor's own norm counts at least as this share of the norm of all tensors."""


@dataclass(frozen=True)
class Run:
    """What all ranks of a run wrote down, joined.

    Attributes:
        initial: weights before the first step.
        losses: of each step.
        gradients: of each step.
        weights: after each step.
        microbatches: of each step and backbone rank.
        encoder_batches: of each step and rank.
        computed: of each rank and step, how often it ran what.
    """

    initial: Named
    losses: list[float]
    gradients: list[Named]
    weights: list[Named]
    microbatches: list[list[int]]
    encoder_batches: list[list[int]]
    computed: list[list[dict[str, int]]]


def read_run(folder: Path) -> Run:
    """Joins the ranks' records; ranks that hold the same half must hold the same bits, and see the same loss."""
    ranks = [torch.load(path, map_location="cpu", weights_only=True) for path in sorted(folder.glob("rank*.pt"))]
    assert ranks, f"no rank of {folder.name} wrote anything"
    steps = range(len(ranks[0]["losses"]))
    for rank in ranks:
        assert rank["losses"] == ranks[0]["losses"]
    return Run(
        initial=_join([rank["initial"] for rank in ranks]),
        losses=ranks[0]["losses"],
        gradients=[_join([rank["gradients"][step] for rank in ranks]) for step in steps],
        weights=[_join([rank["weights"][step] for rank in ranks]) for step in steps],
        microbatches=[rank["microbatches"] for rank in ranks if any(rank["microbatches"])],
        encoder_batches=[rank["encoder_batches"] for rank in ranks],
        computed=[rank["computed"] for rank in ranks],
    )


def error(found: Named, reference: Named) -> float:
    """The largest error of a tensor: ``|x - ref| / max(|ref|, FLOOR * |all ref|)``.

    Tensors must be there, or be None, on both sides alike.
    """
    assert found.keys() == reference.keys()
    differing = [name for name in reference if (found[name] is None) != (reference[name] is None)]
    assert not differing, f"on one side only: {differing}"
    pairs = [(found[name], tensor) for name, tensor in reference.items() if tensor is not None]
    if not pairs:
        return 0.0
    whole = _norm(torch.stack([tensor.double().norm() for _, tensor in pairs]))
    found_norms = ((_norm(a - b), max(_norm(b), FLOOR * whole)) for a, b in pairs if a is not None)
    return max(float(distance > 0) if scale == 0 else distance / scale for distance, scale in found_norms)


def same_bits(one: Run, other: Run) -> bool:
    """Whether two runs computed the same, to the bit."""
    return one.losses == other.losses and all(
        _equal(a, b) for a, b in zip([*one.gradients, *one.weights], [*other.gradients, *other.weights], strict=True)
    )


def _join(parts: list[Named]) -> Named:
    joined: Named = {}
    for part in parts:
        for name, tensor in part.items():
            assert name not in joined or _same(joined[name], tensor), f"ranks disagree on {name}"
            joined[name] = tensor
    return joined


def _equal(one: Named, other: Named) -> bool:
    return one.keys() == other.keys() and all(_same(one[name], other[name]) for name in one)


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other if one is None or other is None else torch.equal(one, other)


def _norm(tensor: Tensor) -> float:
    return float(tensor.double().norm())


def without_key_biases(weights: Named) -> Named:
    """Weights less what softmax takes no notice of: its gradient is rounding, which AdamW scales up to steps."""
    return {name: weight for name, weight in weights.items() if not name.endswith("k_proj.bias")}
