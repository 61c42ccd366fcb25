"""Modules that know a small twin of themselves, which is checked in their stead, on samples of its own."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, runtime_checkable

from flowtrain_lightning.packing_check.findings import Finding
from flowtrain_lightning.packing_check.samples import CheckedSamples


class CheckedTwin(NamedTuple):
    """A module and samples that are checked in place of the user's.

    Attributes:
        module: of the same class and settings, with every kind of layer, not built yet.
        samples: that it can read.
        findings: what is known to be wrong without running it.
    """

    module: Any
    samples: CheckedSamples
    findings: tuple[Finding, ...] = ()


@runtime_checkable
class HasTwin(Protocol):
    """A module of which what is found of a small twin holds: published code that no user has changed."""

    def checked_twin(self) -> CheckedTwin | None:
        """The twin; None where only the module itself can be checked."""
        ...
