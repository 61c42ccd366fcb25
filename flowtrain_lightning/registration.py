"""Registers ``strategy="flowtrain"`` with Lightning: at once where Lightning is loaded, else as soon as it is.

Lightning has no entry point for strategies, and importing it takes seconds that planning does not need.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

NAME = "flowtrain"
"""The Trainer's name for the strategy."""

_REGISTRY_MODULE = "lightning.pytorch.strategies"


def register_strategy() -> None:
    """Make ``Trainer(strategy="flowtrain")`` known, now or once Lightning's registry of strategies is loaded."""
    if (loaded := sys.modules.get(_REGISTRY_MODULE)) is not None:
        _register(loaded)
    else:
        sys.meta_path.insert(0, _RegistryFinder())


def _register(strategies: ModuleType) -> None:
    registry = strategies.StrategyRegistry
    if NAME not in registry.available_strategies():
        registry.register(NAME, _make_strategy, description="encoder ranks and backbone ranks, bridged by one pool")


def _make_strategy(**settings: Any) -> Any:
    """Make the strategy. Its class needs all of Lightning, so it is imported here."""
    from flowtrain_lightning.strategy import FlowTrainStrategy

    return FlowTrainStrategy(**settings)


class _RegistryFinder(MetaPathFinder):
    """Finds Lightning's registry as the other finders do, and registers once it has been executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _REGISTRY_MODULE:
            return None
        found = (finder.find_spec(fullname, path, target) for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, found), None)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            _register(module)
            sys.meta_path.remove(self)

        spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec
