"""Roles whose ranks share weights (FSDP2, HSDP): losses, gradients and weights are those of a plain PyTorch loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.exactness.compare import Run, error, read_run
from tests.exactness.data import STEPS, write_steps
from tests.exactness.layouts import ranks_of
from tests.exactness.test_layouts import LIMIT, without_key_biases
from tests.forks import Job, run_jobs

FSDP = {"shard": "fsdp"}
HSDP = {"shard": "fsdp", "replicas": 2}
RECOMPUTED = {"shard": "fsdp", "recompute": "full"}


@dataclass(frozen=True)
class Case:
    """A layout of each role, and what else differs."""

    layout: str
    roles: dict[str, dict[str, Any]]
    precision: str = "64-true"
    strategy: dict[str, Any] = field(default_factory=dict)
    clip: float | None = None
    freeze: bool = False
    kind: str = "deep"
    data: dict[str, Any] = field(default_factory=dict)
    kernel: str = ""

    def __str__(self) -> str:
        roles = "; ".join(f"{role} {_in_words(wanted)}" for role, wanted in self.roles.items() if wanted)
        more = [self.precision, *(f"{name} {value}" for name, value in self.strategy.items())]
        more += ["clipped"] * (self.clip is not None) + ["frozen encoder"] * self.freeze
        more += [self.kind] * (self.kind != "deep") + [self.kernel] * bool(self.kernel)
        more += [f"{name} {value}" for name, value in self.data.items()]
        return f"{self.layout}: {roles}, {', '.join(more)}"

    @property
    def module(self) -> dict[str, Any]:
        return {"freeze_encoder": self.freeze}


BOTH = {"encoder": FSDP, "backbone": FSDP}
CUT = {"encoder_budget": 40}
"""Patches that most positions' media have more of on a rank: several encoder batches each, unlike in number."""


def _in_words(wanted: dict[str, Any]) -> str:
    return "-".join(value if isinstance(value, str) else f"{name} {value}" for name, value in wanted.items())


QUICK = [
    Case("1+2", {"backbone": FSDP}, freeze=True, data=CUT),
    Case("2+2", BOTH, "32-true", {"encoder_activations": 0}, data=CUT),
    Case("2+4", {"encoder": RECOMPUTED, "backbone": HSDP}, clip=0.2),
    Case("mixed 2+2", {"encoder": HSDP, "backbone": FSDP}, clip=0.2, kind="uneven", kernel="foreach"),
    Case("colocated 2", BOTH, clip=0.2, strategy={"encoder_activations": 2}, data=CUT),
    Case(
        "colocated 2",
        {"encoder": {"recompute": "full"}, "backbone": {**FSDP, "recompute": "selective"}},
        strategy={"encoder_activations": 1},
        kernel="fused",
    ),
]
"""Each placement, each layout of each role, each precision and each kernel meets most of the others in some case."""

LONG = [
    Case("2+1", {"encoder": FSDP}),
    Case("2+2", {"encoder": FSDP, "backbone": {**FSDP, "context": 2}}, kind="uneven"),
    Case("colocated 2", {"encoder": RECOMPUTED, "backbone": FSDP}, kind="uneven"),
]
LONG += [
    Case(layout, {"encoder": encoder, "backbone": backbone}, precision, {"encoder_activations": kept})
    for precision in LIMIT
    for layout in ("4+4", "colocated 4", "3+2")
    for encoder, backbone in ((FSDP, FSDP), (HSDP, FSDP), (FSDP, HSDP), (RECOMPUTED, RECOMPUTED))
    for kept in (0, 1, 4)
    if layout != "3+2" or HSDP not in (encoder, backbone)
]
LONG += [
    Case("mixed 2+2", {"encoder": encoder, "backbone": backbone}, precision, {"encoder_activations": kept})
    for precision in LIMIT
    for encoder, backbone in (({}, FSDP), (HSDP, {}), (HSDP, FSDP), (HSDP, HSDP))
    for kept in (0, 1, 4)
]
LONG += [
    Case(layout, roles, precision, kind="uneven")
    for precision in LIMIT
    for layout, roles in (("2+2", BOTH), ("2+4", {"encoder": RECOMPUTED, "backbone": HSDP}), ("colocated 4", BOTH))
]
LONG += [
    Case(layout, {"encoder": encoder, "backbone": backbone}, kernel=kernel)
    for kernel in ("foreach", "fused")
    for layout, encoder, backbone in (
        ("colocated 2", FSDP, {}),
        ("colocated 2", {}, FSDP),
        ("colocated 4", HSDP, FSDP),
        ("mixed 2+2", HSDP, {}),
        ("mixed 2+2", {}, FSDP),
        ("mixed 2+2", HSDP, FSDP),
        ("1+2", {}, FSDP),
    )
]
CASES = [pytest.param(case, id=str(case)) for case in QUICK] + [
    pytest.param(case, id=str(case), marks=pytest.mark.full) for case in LONG
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """Runs a layout, or the reference, once."""
    folder = tmp_path_factory.mktemp("sharded")
    write_steps(folder / "data")
    return runs_in(folder)


def runs_in(folder: Path) -> Callable[..., Run]:
    """Runs a layout, or the reference, once, on the steps in the folder ``data`` of this one.

    A reference that ``follows`` begins each step with the weights with which the layout began it.
    """

    @cache
    def by_name(name: str) -> Run:
        target, ranks, arguments = jobs[name]
        imports = "deepspeed" if "deepspeed" in name else None
        job = Job(name, target, ranks, arguments, imports=imports)
        return read_run(run_jobs(folder, [job])[name].check().folder)

    jobs: dict[str, tuple[str, int, dict[str, Any]]] = {}

    def run(case: Case, *, reference: bool = False, follows: bool = False) -> Run:
        arguments: dict[str, Any] = {
            "data": str(folder / "data"),
            "kind": case.kind,
            "precision": case.precision,
            "clip": case.clip,
            "module": case.module,
        }
        name = str(case).replace(":", "").replace("; ", " ").replace(", ", " ")
        if reference:
            of_case = f"behind {name}" if follows else f"{case.kind} {case.precision} {case.clip} {case.freeze}"
            arguments |= {"follows": str(folder / name)} if follows else {}
            name = f"plain {of_case}"
            jobs[name] = "tests.exactness.reference:train", 1, arguments
        else:
            strategy = {**case.strategy, "roles": case.roles}
            arguments |= {"layout": case.layout, "strategy": strategy, "settings": case.data, "kernel": case.kernel}
            jobs[name] = "tests.exactness.train:train", ranks_of(case.layout), arguments
        return by_name(name)

    return run


@pytest.mark.parametrize("case", CASES)
def test_training_on_shards_is_that_of_the_plain_loop(run: Callable[..., Run], case: Case):
    check_against_plain_loop(run, case)


def check_against_plain_loop(run: Callable[..., Run], case: Case) -> None:
    """Losses, gradients and weights of a run are those of a plain PyTorch loop."""
    found, expected = run(case), run(case, reference=True)
    assert error(found.initial, expected.initial) == 0.0
    assert found.losses == pytest.approx(expected.losses, rel=LIMIT[case.precision])
    errors = [error(*pair) for pair in zip(found.gradients, expected.gradients, strict=True)]
    assert len(errors) == STEPS
    assert max(errors) <= LIMIT[case.precision], errors
    weights = found.weights[-1], expected.weights[-1]
    if case.precision == "32-true":
        weights = without_key_biases(weights[0]), without_key_biases(weights[1])
    assert error(*weights) <= LIMIT[case.precision]
