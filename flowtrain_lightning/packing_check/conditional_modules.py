"""Modules with weights that only some samples run: ranks that gather weights together must all run them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from flowtrain_lightning.packing_check.passes import FeaturesOfItems, Passes
from flowtrain_lightning.packing_check.samples import CheckedSamples


def conditional_modules(passes: Passes, samples: CheckedSamples, features: FeaturesOfItems) -> list[str]:
    """Their paths.

    Samples without media get features of no rows, as ranks that share weights do. What a module computes without being
    called, by its weights alone, is not seen.
    """
    found: set[str] = set()
    with torch.no_grad():
        for modality in samples.modalities:
            runs = []
            for item in samples.of_modality(modality):
                with _noted(passes.module) as run:
                    passes.encode(modality, [[item]])
                runs.append(run)
            found |= _in_some(runs)
        runs = []
        for member in range(len(samples.samples)):
            # A merge that takes no features of no rows is one that says so in training.
            with _noted(passes.module) as run, suppress(Exception):
                passes.run_with_all_modalities(member, features)
                runs.append(run)
        found |= _in_some(runs)
    return sorted(found)


def _in_some(runs: list[set[str]]) -> set[str]:
    return runs[0].union(*runs[1:]) - runs[0].intersection(*runs[1:]) if runs else set()


@contextmanager
def _noted(module: Any) -> Iterator[set[str]]:
    """Inside, the paths of called modules that have weights of their own are noted."""
    called: set[str] = set()
    handles = []
    for name, layer in module.named_modules():
        if name and any(True for _ in layer.parameters(recurse=False)):
            handles.append(layer.register_forward_pre_hook(lambda *_, name=name: called.add(name)))
    try:
        yield called
    finally:
        for handle in handles:
            handle.remove()
