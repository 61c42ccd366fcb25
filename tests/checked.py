"""Leaves the packing check out of fits whose modules are not what a test is about: it takes as long as a short fit."""

from __future__ import annotations

import pytest

from flowtrain_lightning import module

_checks = module.check_before_fit


def leave_out_packing_check(patch: pytest.MonkeyPatch) -> None:
    """From now on, in this process and those forked for it, fits do not check how their modules pack."""
    patch.setattr(module, "check_before_fit", lambda *_: None)


def packing_is_checked() -> bool:
    """Whether fits of this process check it."""
    return module.check_before_fit is _checks
