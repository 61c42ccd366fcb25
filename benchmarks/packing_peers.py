"""Other packers by name: those from papers, and those packages that are installed here."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from benchmarks.packing_packages import (
    binpacking_number,
    binpacking_volume,
    cp_sat,
    milp,
    numberpartitioning_kk,
    prtpy_fit,
    prtpy_partition,
    trl,
)
from benchmarks.packing_papers import cheapest, fewest_tokens, flowtrain_paper, verl
from benchmarks.packing_signatures import StepPacker, WindowPacker


def window_packers() -> dict[str, WindowPacker]:
    """Peers that fill bins to a token budget."""
    found: dict[str, WindowPacker] = {"FlowTrain best fit*": flowtrain_paper}
    # TRL's other strategies cut samples in pieces, so that one is in several bins.
    found |= _available({"trl bfd": ("trl", lambda: trl("bfd"))})
    found |= _available({"binpacking volume": ("binpacking", lambda: binpacking_volume)})
    found |= _available({"prtpy FFD": ("prtpy", prtpy_fit)})
    return found


def step_packers(solver_seconds: float) -> dict[str, tuple[StepPacker, float, int | None]]:
    """Peers that balance a number of bins: the packer, its share of the budget, and the most steps to try."""
    found: dict[str, tuple[StepPacker, float, int | None]] = {
        "OrchMLLM, DFLOP LPT*": (cheapest, 0.97, None),
        "DistTrain LPT*": (fewest_tokens, 0.97, None),
        "verl KK+KK*": (verl, 0.90, 40),
        "scipy milp": (milp(solver_seconds), 0.97, 2),
    }
    named: dict[str, tuple[str, Callable[[], Any]]] = {
        "prtpy KK": ("prtpy", lambda: (prtpy_partition("kk"), 0.90, 10)),
        "prtpy LPT": ("prtpy", lambda: (prtpy_partition("greedy"), 0.90, 10)),
        "numberpartitioning KK": ("numberpartitioning", lambda: (numberpartitioning_kk, 0.90, 10)),
        "binpacking number": ("binpacking", lambda: (binpacking_number, 0.90, 40)),
        "ortools CP-SAT": ("ortools", lambda: (cp_sat(solver_seconds), 0.97, 2)),
    }
    return found | _available(named)


def _available(named: dict[str, tuple[str, Callable[[], Any]]]) -> dict[str, Any]:
    found = {}
    for name, (package, make) in named.items():
        if find_spec(package) is None:
            print(f"{name} is left out: install {package} to compare with it.")
            continue
        try:
            found[name] = make()
        except Exception as error:
            print(f"{name} is left out: {error}")
    return found
