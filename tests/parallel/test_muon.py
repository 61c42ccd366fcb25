"""Muon for matrices and AdamW for the rest: as PyTorch's own, and the same weights on every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import flowtrain_lightning as flow
from flowtrain_lightning.parallel.muon import matrices_of_layers, orthogonal
from tests.exactness.compare import error, read_run
from tests.exactness.data import write_steps
from tests.exactness.layouts import ranks_of
from tests.forks import Job, run_jobs
from tests.tiny import Block


class Stacked(nn.Module):
    """Two layers between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 16)
        self.layers = nn.ModuleList(Block(16) for _ in range(2))
        self.head = nn.Linear(16, 11)


def with_gradients(module: nn.Module) -> nn.Module:
    for number, weight in enumerate(module.parameters()):
        weight.grad = torch.randn(weight.shape, generator=torch.Generator().manual_seed(number))
    return module


def test_matrices_of_layers_are_stepped_as_by_muon_and_all_else_as_by_adamw() -> None:
    torch.manual_seed(0)
    ours, theirs = Stacked(), Stacked()
    theirs.load_state_dict(ours.state_dict())
    optimizer = flow.MuonAdamW(ours, lr=0.01, weight_decay=0.1)
    chosen = {id(weight) for weight in matrices_of_layers(theirs)}
    matrices = [weight for weight in theirs.parameters() if id(weight) in chosen]
    others = [weight for weight in theirs.parameters() if id(weight) not in chosen]
    decays = [{"params": [w for w in others if w.ndim > 1]}, {"params": [w for w in others if w.ndim == 1]}]
    decays[1]["weight_decay"] = 0.0  # type: ignore[assignment]
    muon = torch.optim.Muon(matrices, lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(decays, lr=0.01, weight_decay=0.1, betas=(0.9, 0.95))
    assert len(matrices) == 8
    for _ in range(3):
        for module in (ours, theirs):
            with_gradients(module)
        for stepping in (optimizer, muon, adamw):
            stepping.step()
    for (name, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-3 if id(other) in chosen else 0.0, msg=name)


def test_singular_values_come_near_1_of_each_of_several_matrices() -> None:
    torch.manual_seed(0)
    several = torch.randn(3, 24, 8, dtype=torch.float64) * torch.tensor([1e-3, 1.0, 1e3]).view(3, 1, 1)
    values = torch.linalg.svdvals(orthogonal(several))
    assert values.min() > 0.6
    assert values.max() < 1.3
    assert orthogonal(several.float()).dtype == torch.bfloat16
    assert not orthogonal(torch.zeros(4, 4)).any()  # as of an expert to which no token went


def test_a_module_without_repeated_layers_is_told_of_adamw() -> None:
    with pytest.raises(ValueError, match=r"Linear has no repeated layers .* or take AdamW"):
        flow.MuonAdamW(nn.Linear(4, 4))


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "roles"),
    [
        ("2+2", {role: {"shard": "fsdp"} for role in ("encoder", "backbone")}),
        ("1+2", {"backbone": {"tensor": 2}}),
        ("colocated 2", None),
    ],
    ids=["shards", "tensor ranks", "copies"],
)
def test_weights_that_it_steps_on_ranks_are_those_of_one_process(tmp_path: Path, layout: str, roles: Any) -> None:
    pytest.importorskip("transformers")
    write_steps(tmp_path / "data")
    runs = []
    for each in ("auto", layout):
        arguments = {"data": str(tmp_path / "data"), "layout": each, "family": "qwen2_vl", "muon": True}
        arguments["roles"] = None if each == "auto" else roles
        job = Job(each, "tests.models.training:train", ranks_of(each), arguments)
        runs.append(read_run(run_jobs(tmp_path, [job])[each].check().folder))
    expected, found = runs
    assert found.losses == pytest.approx(expected.losses, rel=1e-9)
    assert error(found.weights[-1], expected.weights[-1]) <= 1e-9
